# SPDX-License-Identifier: Apache-2.0
"""Networks of the agents: perceptrons over flat observations, convolutions over images, targets that follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.nn.utils import biased_softplus
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ConvNet, DuelingCnnDQNet, NoisyLinear, QValueModule, SafeProbabilisticModule


def perceptron(input_size: int, hidden_sizes: Sequence[int], output_size: int) -> nn.Sequential:
    """Returns linear layers with ReLU between them."""
    sizes = [input_size, *hidden_sizes]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], output_size))


def checked_sides(
    shape: Sequence[int],
    axes: tuple[int, int],
    channels: Sequence[int],
    kernel_sizes: Sequence[int],
    strides: Sequence[int],
) -> list[int]:
    """Returns height and width of the output of convolutions over images of this shape.

    Raises ``ValueError`` for no convolution, not one number of each kind for each, or too small an image.
    """
    if not len(channels) == len(kernel_sizes) == len(strides) > 0:
        raise ValueError(
            f"channels {list(channels)}, kernel_sizes {list(kernel_sizes)} and strides {list(strides)} must have one "
            "number for each convolution, of which images need at least one."
        )
    sides = [shape[axis] for axis in axes]
    for kernel_size, stride in zip(kernel_sizes, strides, strict=True):
        sides = [(side - kernel_size) // stride + 1 for side in sides]
        if min(sides) < 1:
            raise ValueError(
                f"convolutions with kernel_sizes {list(kernel_sizes)} and strides {list(strides)} leave nothing of "
                f"images {list(shape)}. Give fewer or smaller ones; for MinAtar's 10 x 10 channels=(16,), "
                "kernel_sizes=(3,), strides=(1,)."
            )
    return sides


class BoundedActor(nn.Module):
    """Deterministic policy with actions between ``low`` and ``high``, both ``[A]``.

    ``center + half_range * tanh(perceptron(observation))``.
    """

    center: Tensor
    half_range: Tensor

    def __init__(
        self,
        observation_size: int,
        low: Tensor,
        high: Tensor,
        hidden_sizes: Sequence[int],
    ) -> None:
        super().__init__()
        self.perceptron: nn.Sequential = perceptron(observation_size, hidden_sizes, len(low))
        self.register_buffer("center", (high + low) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2, persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns actions, ``[B, A]``."""
        return self.center + self.half_range * torch.tanh(self.perceptron(observation))


class StateActionCritic(nn.Module):
    """Value of an observation with an action, ``[B, 1]``."""

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.perceptron: nn.Sequential = perceptron(observation_size + action_size, hidden_sizes, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns the values."""
        return self.perceptron(torch.cat([observation, action], dim=-1))


def two_critics(observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> list[TensorDictModule]:
    """Returns two critics for TorchRL's losses, which use the smaller value of both."""
    critics = [StateActionCritic(observation_size, action_size, hidden_sizes) for _ in range(2)]
    return [TensorDictModule(critic, ["observation", "action"], ["state_action_value"]) for critic in critics]


class QNetwork(nn.Module):
    """Values of all discrete actions, ``[B, num_actions]``."""

    def __init__(self, observation_size: int, num_actions: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.perceptron: nn.Sequential = perceptron(observation_size, hidden_sizes, num_actions)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the values."""
        return self.perceptron(observation)


def with_noise() -> set_exploration_type:
    """Returns a context in which noisy layers use the noise of the last ``torchrl.modules.reset_noise``.

    Outside of it they use the mean weights alone. A forward pass draws no noise.
    """
    return set_exploration_type(ExplorationType.RANDOM)


class ImageNetwork(nn.Module):
    """Values of all actions of images divided by their largest pixel value: ``[B, *output_shape]``.

    Convolutions, one hidden layer and one output per action (and atom); with ``dueling``
    (https://arxiv.org/abs/1511.06581) the sum of a state's value and its actions' advantages, whose mean is 0. Raises
    as :func:`~lightning_replay.agents.networks.checked_sides`.

    Args:
        output_shape: ``(actions,)``, or ``(atoms, actions)`` for logits of distributions.
        noise_deviation: σ₀ of factorised noise in the fully connected layers (https://arxiv.org/abs/1706.10295);
            ``None`` for plain layers.

    The other arguments are those of :class:`~lightning_replay.agents.Rainbow`.
    """

    scale: Tensor

    def __init__(
        self,
        observation_shape: Sequence[int],
        observation_high: float,
        output_shape: Sequence[int],
        *,
        channels: Sequence[int],
        kernel_sizes: Sequence[int],
        strides: Sequence[int],
        hidden_size: int,
        dueling: bool,
        noise_deviation: float | None,
    ) -> None:
        super().__init__()
        checked_sides(observation_shape, (1, 2), channels, kernel_sizes, strides)
        self.register_buffer("scale", torch.tensor(1.0 / observation_high), persistent=False)
        convolutions = {
            "num_cells": list(channels),
            "kernel_sizes": list(kernel_sizes),
            "strides": list(strides),
            "activation_class": nn.ReLU,
        }
        layers = {"depth": 1, "num_cells": hidden_size, "activation_class": nn.ReLU}
        if noise_deviation is not None:
            layers |= {"layer_class": NoisyLinear, "layer_kwargs": [{"std_init": noise_deviation} for _ in range(2)]}
        self.body: nn.Module
        if dueling:
            value_shape = (*output_shape[:-1], 1)
            self.body = DuelingCnnDQNet(tuple(output_shape), value_shape, cnn_kwargs=convolutions, mlp_kwargs=layers)
        else:
            self.body = nn.Sequential(ConvNet(**convolutions), MLP(out_features=tuple(output_shape), **layers))
        self(torch.zeros(1, *observation_shape, dtype=torch.uint8))  # initialises TorchRL's lazy layers

    def forward(self, observation: Tensor) -> Tensor:
        """Returns values or logits of images ``[B, C, H, W]``."""
        return self.body(observation * self.scale)


class ActorCritic(nn.Module):
    """Logits of discrete actions and the value of an observation, both linear in the trunk's last hidden layer.

    Weights are orthogonal at first, and small in the policy, so that all actions are about equally likely. The
    arguments are those of :class:`~lightning_replay.agents.PPO`.

    Attributes:
        trunk: observations ``[B, ...]`` to hidden units ``[B, H]``.
        policy: hidden units to logits ``[B, num_actions]``.
        value: hidden units to values ``[B, 1]``.

    Raises:
        ValueError: no hidden layer; categories of flat observations; see also
            :func:`~lightning_replay.agents.networks.checked_sides`.
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        observation_high: float,
        num_actions: int,
        *,
        hidden_sizes: Sequence[int],
        channels: Sequence[int],
        kernel_sizes: Sequence[int],
        strides: Sequence[int],
        categories: Sequence[int] | None,
    ) -> None:
        super().__init__()
        if not hidden_sizes:
            raise ValueError("hidden_sizes is empty; the policy and the value need at least one hidden layer.")
        if categories is not None and len(observation_shape) != 3:
            raise ValueError(
                f"categories is {list(categories)}, and observations have the shape {tuple(observation_shape)}; it is "
                "for images (height, width, channels). Leave it out."
            )
        layers: list[nn.Module] = []
        size = observation_shape[0]
        if len(observation_shape) == 3:
            planes = ImagePlanes(observation_shape[2], observation_high, categories)
            height, width = checked_sides(observation_shape, (0, 1), channels, kernel_sizes, strides)
            size = height * width * channels[-1]
            layers = [planes]
            inputs = (planes.count, *channels)
            for before, after, kernel_size, stride in zip(inputs, channels, kernel_sizes, strides, strict=False):
                layers += [_orthogonal(nn.Conv2d(before, after, kernel_size, stride), math.sqrt(2.0)), nn.ReLU()]
            layers.append(nn.Flatten())
        for fan_in, fan_out in itertools.pairwise([size, *hidden_sizes]):
            layers += [_orthogonal(nn.Linear(fan_in, fan_out), math.sqrt(2.0)), nn.ReLU()]
        self.trunk: nn.Sequential = nn.Sequential(*layers)
        self.policy: nn.Module = _orthogonal(nn.Linear(hidden_sizes[-1], num_actions), 0.01)
        self.value: nn.Module = _orthogonal(nn.Linear(hidden_sizes[-1], 1), 1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits ``[B, num_actions]`` and values ``[B, 1]``."""
        hidden = self.trunk(observation)
        return self.policy(hidden), self.value(hidden)


class ImagePlanes(nn.Module):
    """Images ``[B, H, W, C]`` as planes ``[B, P, H, W]`` for convolutions.

    Values are divided by the largest one, ``observation_high``. With ``categories``, the number of them in each of the
    C ``channels``, they are one-hot encoded instead, such as MiniGrid's object, colour and state of a cell (11, 6 and
    4). A value beyond the categories is 0 in all planes.

    Raises:
        ValueError: not one count per channel.
    """

    channel: Tensor
    category: Tensor
    scale: Tensor

    def __init__(self, channels: int, observation_high: float, categories: Sequence[int] | None = None) -> None:
        super().__init__()
        if categories is not None and (len(categories) != channels or min(categories) < 1):
            raise ValueError(
                f"categories is {list(categories)} for images of {channels} channels; give one count, at least 1, for "
                "each channel, or None to scale the values."
            )
        self.is_one_hot: bool = categories is not None
        counts = categories or [1] * channels
        self.count: int = sum(counts)
        self.register_buffer("channel", torch.arange(channels).repeat_interleave(torch.tensor(counts)), False)
        self.register_buffer("category", torch.cat([torch.arange(count) for count in counts]), False)
        self.register_buffer("scale", torch.tensor(1.0 / observation_high), False)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns planes, float32."""
        if self.is_one_hot:
            return (observation[..., self.channel] == self.category).float().movedim(-1, 1)
        return (observation * self.scale).movedim(-1, 1)


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    assert layer.bias is not None
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


_PARTS = (nn.Linear, nn.ReLU, biased_softplus, QValueModule, SafeProbabilisticModule)

Layers = tuple[tuple[Tensor, Tensor], ...]  # weight and bias of each linear layer


def layers_of(parameters: TensorDictBase) -> Layers:
    """Returns the linear layers among the parameters of a network, in order: the tensors themselves.

    They stay those of the network when it moves to another device or loads a state, not when it is copied.
    """
    named = [(key[-1] if isinstance(key, tuple) else key, leaf) for key, leaf in parameters.items(True, True)]
    weights, biases = ([leaf for name, leaf in named if name == kind] for kind in ("weight", "bias"))
    return tuple(zip(weights, biases, strict=True))


def perceptron_layers(loss: nn.Module, name: str) -> Layers:
    """Returns the linear layers of a network of a loss.

    Raises:
        TypeError: the network has parts that :func:`perceive` leaves out, such as another activation.
    """
    parts = [part for part in getattr(loss, name).modules() if not any(True for _ in part.children())]
    others = sorted({type(part).__name__ for part in parts if type(part) not in _PARTS})
    if others:
        raise TypeError(
            f"{name} of the agent's loss has {', '.join(others)}; this agent computes it as linear layers with ReLU "
            "between them. For another network write a LightningModule with act and training_step, see "
            "docs/lightning-agents.md."
        )
    return layers_of(getattr(loss, f"{name}_params"))


def tensors_of(layers: Layers) -> list[Tensor]:
    """Returns weight and bias of the first layer, of the second, and so on."""
    return [tensor for layer in layers for tensor in layer]


def detached(layers: Layers, network: int | None = None) -> Layers:
    """Returns the layers without gradients; of two stacked networks with ``network`` only that one's."""
    if network is None:
        return tuple((weight.detach(), bias.detach()) for weight, bias in layers)
    return tuple((weight.detach()[network], bias.detach()[network]) for weight, bias in layers)


def perceive(layers: Layers, inputs: Tensor) -> Tensor:
    """Returns the outputs ``[..., O]`` of linear layers with ReLU between them for inputs ``[..., I]``."""
    *hidden, (last_weight, last_bias) = layers
    for weight, bias in hidden:
        inputs = torch.relu_(linear(inputs, weight, bias))
    return linear(inputs, last_weight, last_bias)


def activations_of(layers: Layers, inputs: Tensor) -> list[Tensor]:
    """Returns the inputs ``[B, I]`` of each layer, and last the outputs, those of :func:`perceive`."""
    *hidden, (last_weight, last_bias) = layers
    activations = [inputs]
    for weight, bias in hidden:
        activations.append(torch.relu_(linear(activations[-1], weight, bias)))
    return [*activations, linear(activations[-1], last_weight, last_bias)]


def set_gradients(layers: Layers, inputs: list[Tensor], gradient: Tensor) -> None:
    """Sets the gradients of all weights and biases to those that autograd computes, without its graph.

    Args:
        layers: see :func:`can_set_gradients`.
        inputs: of each layer, see :func:`activations_of`.
        gradient: of the outputs ``[B, O]``; call it without gradients enabled.
    """
    for place in reversed(range(len(layers))):
        weight, bias = layers[place]
        weight.grad, bias.grad = gradient.t().mm(inputs[place]), gradient.sum(0)
        if place:
            gradient = torch.ops.aten.threshold_backward(gradient.mm(weight), inputs[place], 0)


def can_set_gradients(layers: Layers) -> bool:
    """Returns whether ``backward`` would only set the gradients of all layers: no layer is frozen or has hooks."""
    return not (torch.is_anomaly_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled()) and all(
        tensor.requires_grad and not tensor._backward_hooks and not tensor._post_accumulate_grad_hooks
        for layer in layers
        for tensor in layer
    )


def both_values(layers: Layers, observation: Tensor, action: Tensor) -> Tensor:
    """Returns the values ``[2, ...]`` of two stacked critics, parameters ``[2, O, I]`` and ``[2, O]``.

    Activations are ``[2, O, B]``: the gradients of the weights then come out in the weights' own layout, without a
    copy. Forward and backward are as fast as those of two separate critics, whose optimizer has twice as many tensors.
    """
    inputs = torch.cat([observation, action], dim=-1)
    columns = inputs.flatten(0, -2).t().expand(2, -1, -1)
    *hidden, (last_weight, last_bias) = layers
    for weight, bias in hidden:
        columns = torch.relu_(torch.baddbmm(bias.unsqueeze(-1), weight, columns))
    return torch.baddbmm(last_bias.unsqueeze(-1), last_weight, columns).reshape(2, *inputs.shape[:-1])


class TargetUpdate:
    """Moves the target parameters of a TorchRL loss: ``target += rate * (parameter - target)``.

    Keeps the tensors of ``loss.*_params`` and ``loss.target_*_params``, see :func:`layers_of`.
    """

    def __init__(self, loss: nn.Module, rate: float) -> None:
        found: dict[str, Any] = dict(loss.named_children())
        names = [name for name in found if f"target_{name}" in found]
        moved = [(found[name], found[f"target_{name}"], key) for name in names for key in found[name].keys(True, True)]
        pairs = [(source.get(key), target.get(key)) for source, target, key in moved]
        self._sources, self._targets = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
        self._rate = rate

    def step(self) -> None:
        """Moves all targets."""
        with torch.no_grad():
            torch._foreach_lerp_(self._targets, self._sources, self._rate)
