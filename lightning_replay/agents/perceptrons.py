# SPDX-License-Identifier: Apache-2.0
"""Perceptrons from the parameters that TorchRL's losses hold, and targets that follow them, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn.utils import biased_softplus
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrl.modules import QValueModule, SafeProbabilisticModule

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
