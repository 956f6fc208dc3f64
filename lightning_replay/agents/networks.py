# SPDX-License-Identifier: Apache-2.0
"""Networks of the agents: perceptrons over flat observations, convolutions over images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ConvNet, DuelingCnnDQNet, NoisyLinear

Layers = list[tuple[Tensor, Tensor]]  # weight and bias of each linear layer


def perceive(layers: Layers, inputs: Tensor, norms: Layers | None = None) -> Tensor:
    """Returns the outputs ``[..., O]`` of linear layers with ReLU between them for inputs ``[..., I]``.

    With ``norms``, layer normalization with these weights and biases precedes each ReLU.
    """
    *hidden, (last_weight, last_bias) = layers
    for place, (weight, bias) in enumerate(hidden):
        inputs = linear(inputs, weight, bias)
        if norms:
            inputs = layer_norm(inputs, bias.shape, *norms[place])
        inputs = torch.relu_(inputs)
    return linear(inputs, last_weight, last_bias)


class Perceptron(nn.Module):
    """Linear layers with ReLU between them.

    Has the weights and biases itself: with a module for each layer, acting takes almost half as long again.

    Args:
        input_size: Number of inputs.
        hidden_sizes: Widths of the hidden layers.
        output_size: Number of outputs.
        has_norms: Whether layer normalization (Ba et al. 2016, https://arxiv.org/abs/1607.06450) precedes each ReLU.
    """

    def __init__(
        self, input_size: int, hidden_sizes: Sequence[int], output_size: int, *, has_norms: bool = False
    ) -> None:
        super().__init__()
        self.has_norms: bool = has_norms
        self._num_linear = len(hidden_sizes) + 1
        for number, (fan_in, fan_out) in enumerate(itertools.pairwise([input_size, *hidden_sizes, output_size])):
            for name, parameter in nn.Linear(fan_in, fan_out).named_parameters():
                self.register_parameter(f"{name}{number}", parameter)
        for number, size in enumerate(hidden_sizes if has_norms else ()):
            self.register_parameter(f"norm_weight{number}", nn.Parameter(torch.ones(size)))
            self.register_parameter(f"norm_bias{number}", nn.Parameter(torch.zeros(size)))

    def layers(self, *, frozen: bool = False) -> Layers:
        """Returns the linear layers, then the normalizations. ``frozen`` layers get no gradients."""
        tensors: Any = self._parameters.values()  # getattr of each takes longer
        tensors = [tensor.detach() for tensor in tensors] if frozen else [*tensors]
        return [*zip(tensors[::2], tensors[1::2], strict=True)]

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs ``[..., O]`` for inputs ``[..., I]``."""
        layers = self.layers()
        return perceive(layers[: self._num_linear], inputs, layers[self._num_linear :])


class TwoCritics(Perceptron):
    """Two perceptrons for the value of an observation with an action, whose parameters are stacked.

    Args:
        observation_size: Number of features of an observation.
        action_size: Number of dimensions of an action.
        hidden_sizes: Widths of the hidden layers.
        has_norms: Whether layer normalization precedes each ReLU.
        support: Evenly spaced atoms ``[N]`` of predicted distributions (C51, Bellemare et al. 2017,
            https://arxiv.org/abs/1707.06887). Without atoms, the critics predict numbers.
    """

    support: Any  # Without atoms, it is None.

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        hidden_sizes: Sequence[int],
        *,
        has_norms: bool = False,
        support: Tensor | None = None,
    ) -> None:
        sizes = observation_size + action_size, hidden_sizes, 1 if support is None else len(support)
        super().__init__(*sizes, has_norms=has_norms)
        second = Perceptron(*sizes, has_norms=has_norms)
        for name, parameter in second.named_parameters():  # weights become [2, O, I] and biases [2, O]
            stacked = torch.stack([self.get_parameter(name), parameter]).detach()
            self.register_parameter(name, nn.Parameter(stacked))
        self.register_buffer("support", support, persistent=False)

    def values(self, observation: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Returns the values ``[2, ...]``. ``frozen`` parameters get no gradients. Of distributions, they are means."""
        outputs = self._outputs(observation, action, frozen)
        if self.support is not None:
            outputs = self.means(outputs.softmax(1).mT)
        return outputs.reshape(2, *action.shape[:-1])

    def log_probabilities(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns the logarithms of the atoms' probabilities, ``[2, B, N]``."""
        return self._outputs(observation, action, False).mT.contiguous().log_softmax(-1)

    def means(self, probabilities: Tensor) -> Tensor:
        """Returns the means ``[...]`` of distributions ``[..., N]``."""
        # A matrix product would round to bfloat16 in mixed precision.
        return (probabilities * self.support).sum(-1)

    def _outputs(self, observation: Tensor, action: Tensor, frozen: bool) -> Tensor:
        # The outputs [2, O, B] of all rows
        inputs = torch.cat([observation, action], dim=-1).flatten(0, -2)
        layers = self.layers(frozen=frozen)
        norms = layers[self._num_linear :]
        *hidden, (last_weight, last_bias) = layers[: self._num_linear]
        if norms:  # Rows are normalized in two thirds of the time of columns.
            rows = inputs.expand(2, -1, -1)
            for (weight, bias), (scale, shift) in zip(hidden, norms, strict=True):
                rows = layer_norm(torch.baddbmm(bias.unsqueeze(1), rows, weight.mT), bias.shape[1:])
                rows = torch.relu_(torch.addcmul(shift.unsqueeze(1), rows, scale.unsqueeze(1)))
            return torch.baddbmm(last_bias.unsqueeze(-1), last_weight, rows.mT)
        # Activations are [2, O, B]: the gradients of the weights then come out in the weights' own layout, without a
        # copy. This is as fast as two separate critics, whose optimizer has twice as many tensors.
        columns = inputs.t().expand(2, -1, -1)
        for weight, bias in hidden:
            columns = torch.relu_(torch.baddbmm(bias.unsqueeze(-1), weight, columns))
        return torch.baddbmm(last_bias.unsqueeze(-1), last_weight, columns)

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns the values of the first critic ``[..., 1]``, or means ``[...]``. Parameters get no gradients."""
        layers = [(weight[0], bias[0]) for weight, bias in self.layers(frozen=True)]
        inputs = torch.cat([observation, action], dim=-1)
        outputs = perceive(layers[: self._num_linear], inputs, layers[self._num_linear :])
        return outputs if self.support is None else self.means(outputs.softmax(-1))


def project(probabilities: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """Returns :func:`~lightning_replay.retention.surprise.categorical_projection` in memory that grows with ``[B, N]``.

    For 8,192 rows and 101 atoms it takes 6 ms on one core, and the product there takes 635 ms. On a GPU, the last
    digits may differ between calls.
    """
    low, high = support[0], support[-1]
    moved = reward.unsqueeze(1) + discount.unsqueeze(1) * support
    place = (moved.clamp(low, high) - low) * ((len(support) - 1) / (high - low))
    before = place.floor().clamp_(max=len(support) - 2)  # The last atom is the upper neighbor of the last but one.
    upper = probabilities * (place - before)
    index = before.long()
    return torch.zeros_like(upper).scatter_add_(1, index, probabilities - upper).scatter_add_(1, index + 1, upper)


def with_noise() -> set_exploration_type:
    """Returns a context in which noisy layers use the noise of the last ``reset_noise``, not only the mean weights."""
    return set_exploration_type(ExplorationType.RANDOM)


class ImageNetwork(nn.Module):
    """Values of all actions of images divided by their largest pixel value: ``[B, *output_shape]``.

    Convolutions, one hidden layer, and one output per action (and atom). With ``dueling``
    (https://arxiv.org/abs/1511.06581), outputs are the sum of a state's value and its actions' advantages, whose mean
    is 0.

    Args:
        output_shape: ``(actions,)``, or ``(atoms, actions)`` for logits of distributions.
        noise_deviation: σ₀ of factorized noise in the fully connected layers (https://arxiv.org/abs/1706.10295).
            ``None`` for plain layers.

    The other arguments are the arguments of :class:`~lightning_replay.agents.Rainbow`.
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
        # Initializes TorchRL's lazy layers. torch refuses kernels that are larger than the image.
        self(torch.zeros(1, *observation_shape, dtype=torch.uint8))

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the values ``[B, *output_shape]`` of images ``[B, C, H, W]``."""
        return self.body(observation * self.scale)


class RecurrentNetwork(nn.Module):
    """Values of all actions along sequences of features: linear layers with ReLU, an LSTM, values and advantages."""

    def __init__(self, observation_size: int, num_actions: int, hidden_sizes: Sequence[int], state_size: int) -> None:
        super().__init__()
        sizes = [observation_size, *hidden_sizes]
        layers = [(nn.Linear(fan_in, fan_out), nn.ReLU()) for fan_in, fan_out in itertools.pairwise(sizes)]
        self.encoder: nn.Sequential = nn.Sequential(*itertools.chain(*layers))
        self.memory: nn.LSTM = nn.LSTM(sizes[-1], state_size, batch_first=True)
        self.values: nn.Linear = nn.Linear(state_size, 1 + num_actions)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the values ``[B, T, A]`` at observations ``[B, T, O]`` from a state on, and the state after them."""
        hidden, cell = state.unsqueeze(0).unbind(2)
        outputs, (hidden, cell) = self.memory(self.encoder(observation), (hidden.contiguous(), cell.contiguous()))
        value, advantages = self.values(outputs).tensor_split([1], -1)
        return value + advantages - advantages.mean(-1, keepdim=True), torch.stack([hidden[0], cell[0]], 1)


class ActorCritic(nn.Module):
    """Logits of discrete actions and the value of an observation, both linear in the trunk's last hidden layer.

    Weights are orthogonal at first, and small in the policy, so that all actions are about equally likely. The
    arguments are the arguments of :class:`~lightning_replay.agents.PPO`.

    Attributes:
        trunk: Observations ``[B, ...]`` to hidden units ``[B, H]``.
        policy: Hidden units to logits ``[B, num_actions]``.
        value: Hidden units to values ``[B, 1]``.

    Raises:
        ValueError: There is no hidden layer, there are categories or residual blocks for flat observations, or there is
            no convolution for images.
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
        residual: bool,
    ) -> None:
        super().__init__()
        if not hidden_sizes:
            raise ValueError("hidden_sizes is empty; the policy and the value need at least one hidden layer.")
        if (residual or categories is not None) and len(observation_shape) != 3:
            raise ValueError(
                f"categories is {categories}, residual {residual}, and observations have the shape "
                f"{tuple(observation_shape)}; both are for images (height, width, channels). Leave them out."
            )
        layers: list[nn.Module] = []
        size = observation_shape[0]
        if len(observation_shape) == 3:
            if not channels or not (residual or len(channels) == len(kernel_sizes) == len(strides)):
                raise ValueError(
                    f"channels {list(channels)}, kernel_sizes {list(kernel_sizes)} and strides {list(strides)} must "
                    "have one number for each convolution, of which images need at least one."
                )
            planes = ImagePlanes(observation_shape[2], observation_high, categories)
            layers = [planes]
            for place, (before, after) in enumerate(itertools.pairwise([planes.count, *channels])):
                if residual:  # a section of IMPALA's network (Espeholt et al. 2018, figure 3)
                    sizes = (before, *[after] * 4)
                    first, *inner = (_orthogonal(nn.Conv2d(size, after, 3, padding=1), 1.0) for size in sizes)
                    blocks = (ResidualBlock(nn.ReLU(), inner[one], nn.ReLU(), inner[one + 1]) for one in (0, 2))
                    layers += [first, nn.MaxPool2d(3, 2, padding=1), *blocks]
                else:
                    convolution = nn.Conv2d(before, after, kernel_sizes[place], strides[place])
                    layers += [_orthogonal(convolution, math.sqrt(2.0)), nn.ReLU()]
            layers += [nn.ReLU(), nn.Flatten()] if residual else [nn.Flatten()]
            # Torch refuses kernels that are larger than the image.
            size = nn.Sequential(*layers)(torch.zeros(1, *observation_shape)).shape[1]
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
    C ``channels``, they are one-hot encoded instead. Examples are MiniGrid's object, color, and state of a cell (11, 6,
    and 4). A value beyond the categories is 0 in all planes.
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
        """Returns planes, float32 ``[B, P, H, W]``."""
        if self.is_one_hot:
            return (observation[..., self.channel] == self.category).float().movedim(-1, 1)
        return (observation * self.scale).movedim(-1, 1)


class ResidualBlock(nn.Sequential):
    """``x + conv(relu(conv(relu(x))))``."""

    def forward(self, planes: Tensor) -> Tensor:
        """Returns planes of the same shape."""
        return planes + super().forward(planes)


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    assert layer.bias is not None
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
