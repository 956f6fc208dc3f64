# SPDX-License-Identifier: Apache-2.0
"""Networks of several runs as one module, so that small networks do not cost mostly overhead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import leaky_relu_

_FEW = 16


class StackedAgent(nn.Module):
    """Networks of R runs with what is saved beside them: optimisers, updates made, a generator of noise for each run.

    Subclasses set ``_optimizers`` and, where they draw noise, ``_noise``, and count ``_updates`` where these matter.
    """

    def __init__(self) -> None:
        super().__init__()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._noise: list[Generator] = []
        self._updates = 0

    def save(self, path: Path) -> None:
        """Writes networks, optimisers, updates and the states of the noise."""
        torch.save(
            {
                "networks": self.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "noise": [generator.get_state() for generator in self._noise],
                "updates": self._updates,
            },
            path,
        )

    def load(self, path: Path) -> None:
        """Reads what :meth:`save` wrote."""
        kept = torch.load(path)
        self.load_state_dict(kept["networks"])
        for optimizer, state in zip(self._optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for generator, state in zip(self._noise, kept["noise"], strict=True):
            generator.set_state(state)
        self._updates = kept["updates"]

    def _draw(self, shape: Sequence[int]) -> Tensor:
        """Returns normal noise ``[R, *shape]``, each run's from its own generator."""
        return torch.stack([torch.randn(*shape, generator=generator) for generator in self._noise])


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> None:
    """Limits the norm of the gradient of each run by itself."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum(dim=(1, 2)) for gradient in gradients]).sum(dim=0).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0).reshape(-1, 1, 1)
    torch._foreach_mul_(gradients, [scale] * len(gradients))


def stacked_parameters(sizes: Sequence[int], seeds: Sequence[int]) -> nn.ParameterList:
    """Returns weights ``[R, inputs, outputs]`` and biases ``[R, 1, outputs]`` of the layers of R perceptrons, in turn.

    Both are uniform in ±1 / sqrt(inputs), the default of ``torch.nn.Linear``.

    Args:
        sizes: of the input, the hidden layers and the output.
        seeds: one for each perceptron.
    """
    generators = [Generator().manual_seed(seed) for seed in seeds]
    parameters: list[Tensor] = []
    for inputs, outputs in pairwise(sizes):
        drawn = torch.stack([torch.rand(inputs + 1, outputs, generator=generator) for generator in generators])
        drawn = (2.0 * drawn - 1.0) * inputs**-0.5
        parameters += [drawn[:, :-1].clone(), drawn[:, -1:].clone()]
    return nn.ParameterList(parameters)


def twin_parameters(sizes: Sequence[int], seeds: Sequence[int]) -> nn.ParameterList:
    """Returns :func:`stacked_parameters` of two critics for each of R seeds: the first ones, then the second ones."""
    return stacked_parameters(sizes, [1_000_000 * critic + seed for critic in (1, 2) for seed in seeds])


def kaiming_parameters(sizes: Sequence[int], seeds: Sequence[int], output_scale: float = 0.01) -> nn.ParameterList:
    """Returns what :func:`stacked_parameters` returns, with normal weights of variance 2 / inputs and zero biases.

    ``output_scale`` is the standard deviation of the last layer's weights, as in the agent MP-DQN.
    """
    generators = [Generator().manual_seed(seed) for seed in seeds]
    parameters: list[Tensor] = []
    for layer, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        scale = output_scale if layer == len(sizes) - 1 else (2.0 / inputs) ** 0.5
        drawn = [scale * torch.randn(inputs, outputs, generator=generator) for generator in generators]
        parameters += [torch.stack(drawn), torch.zeros(len(seeds), 1, outputs)]
    return nn.ParameterList(parameters)


def soft_update(targets: Sequence[Tensor], sources: Sequence[Tensor], rate: float) -> None:
    """Moves the parameters of target networks towards their sources by this share of the way, in place."""
    torch._foreach_lerp_(targets, sources, rate)


# The gradients of networks this small are worked out by hand: torch's autograd takes a third longer.
def forward(parameters: Sequence[Tensor], rows: Tensor, slope: float = 0.0) -> list[Tensor]:
    """Returns the input and the output of every layer, ``[R, B, ...]``, of perceptrons with ReLU between the layers.

    ``slope`` is that of a leaky ReLU for negative numbers.
    """
    outputs = [rows]
    for layer in range(0, len(parameters), 2):
        rows = product(rows, parameters[layer]).add_(parameters[layer + 1])
        outputs.append(activated(rows, slope) if layer + 2 < len(parameters) else rows)
    return outputs


def activated(rows: Tensor, slope: float) -> Tensor:
    """Applies ReLU or, with a slope for negative numbers, leaky ReLU in place."""
    return leaky_relu_(rows, slope) if slope else rows.relu_()


def backward(
    parameters: Sequence[nn.Parameter], outputs: Sequence[Tensor], gradient: Tensor, slope: float = 0.0
) -> None:
    """Sets the gradients of all parameters from that of the output, ``[R, B, outputs]``."""
    for layer in reversed(range(len(parameters) // 2)):
        weight, bias = parameters[2 * layer], parameters[2 * layer + 1]
        weight.grad = product(outputs[layer].transpose(1, 2), gradient).contiguous()
        bias.grad = gradient.sum(1, keepdim=True)
        if layer:
            gradient = _before_relu(gradient, weight, outputs[layer], slope)


def input_gradient(
    parameters: Sequence[Tensor], outputs: Sequence[Tensor], gradient: Tensor, slope: float = 0.0
) -> Tensor:
    """Returns the gradient of the input from that of the output, ``[R, B, inputs]``."""
    for layer in reversed(range(1, len(parameters) // 2)):
        gradient = _before_relu(gradient, parameters[2 * layer], outputs[layer], slope)
    return torch.bmm(gradient, parameters[0].transpose(1, 2))


def before_activation(gradient: Tensor, output: Tensor, slope: float) -> Tensor:
    """Turns the gradient of an output of :func:`activated` into that of its input, in place."""
    if slope:
        return torch.ops.aten.leaky_relu_backward.grad_input(gradient, output, slope, True, grad_input=gradient)
    return torch.ops.aten.threshold_backward.grad_input(gradient, output, 0, grad_input=gradient)


def _before_relu(gradient: Tensor, weight: Tensor, output: Tensor, slope: float) -> Tensor:
    """Returns the gradient before the ReLU whose ``output`` is a layer's input, from that of the layer's output."""
    one = weight.shape[-1] == 1
    gradient = gradient * weight.transpose(1, 2) if one else torch.bmm(gradient, weight.transpose(1, 2))
    return before_activation(gradient, output, slope)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns ``left @ right``; where it has few columns its transpose, which is five times as fast, is computed."""
    if right.shape[-1] >= _FEW:
        return torch.bmm(left, right)
    return torch.bmm(right.transpose(1, 2), left.transpose(1, 2)).transpose(1, 2)
