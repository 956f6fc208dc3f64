# SPDX-License-Identifier: Apache-2.0
"""Stacked perceptrons with layer normalization before each ReLU, with gradients worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.benchmarks.learning.learners.stacked_networks import before_activation, product, twin_parameters

_NO_GRADIENTS = [True, False, False]  # The gradient of the input is needed, and those of scale and shift are not.


class Layer(NamedTuple):
    """What the gradient of a hidden layer needs, ``[R, B, H]`` or ``[R, B, 1]``."""

    linear: Tensor  #: Outputs before the normalization.
    mean: Tensor
    inverse_deviation: Tensor
    normalized: Tensor
    output: Tensor  #: After the ReLU.


def twin_normalized(sizes: Sequence[int], seeds: Sequence[int]) -> nn.ParameterList:
    """Returns :func:`twin_parameters`, then the scale and the shift ``[2 R, 1, H]`` of each hidden layer."""
    layers = twin_parameters(sizes, seeds)
    for size in sizes[1:-1]:
        layers.append(nn.Parameter(torch.ones(2 * len(seeds), 1, size)))
        layers.append(nn.Parameter(torch.zeros(2 * len(seeds), 1, size)))
    return layers


def forward(parameters: Sequence[Tensor], rows: Tensor) -> tuple[Tensor, list[Layer]]:
    """Returns the outputs ``[R, B, outputs]`` of perceptrons, and what their gradients need."""
    hidden = (len(parameters) - 2) // 4
    layers = []
    for layer in range(hidden):
        linear = product(rows, parameters[2 * layer]).add_(parameters[2 * layer + 1])
        normalized, mean, inverse = torch.native_layer_norm(linear, linear.shape[-1:], None, None, 1e-5)
        scale, shift = parameters[2 * hidden + 2 + 2 * layer : 2 * hidden + 4 + 2 * layer]
        rows = torch.addcmul(shift, normalized, scale).relu_()
        layers.append(Layer(linear, mean, inverse, normalized, rows))
    return product(rows, parameters[2 * hidden]).add_(parameters[2 * hidden + 1]), layers


def _of_linear(parameters: Sequence[Tensor], layers: Sequence[Layer], layer: int, gradient: Tensor) -> Tensor:
    """Returns the gradient of a layer's linear outputs from that of its normalized ones after scale and shift."""
    hidden = len(layers)
    of_normalized = gradient * parameters[2 * hidden + 2 + 2 * layer]
    kept = layers[layer]
    given = of_normalized, kept.linear, kept.linear.shape[-1:], kept.mean, kept.inverse_deviation
    return torch.ops.aten.native_layer_norm_backward(*given, None, None, _NO_GRADIENTS)[0]


def backward(parameters: Sequence[nn.Parameter], rows: Tensor, layers: Sequence[Layer], gradient: Tensor) -> None:
    """Sets the gradients of all parameters from that of the outputs, ``[R, B, outputs]``."""
    hidden = len(layers)
    inputs = [rows, *(layer.output for layer in layers)]
    for number in reversed(range(hidden + 1)):
        weight, bias = parameters[2 * number], parameters[2 * number + 1]
        weight.grad = product(inputs[number].transpose(1, 2), gradient).contiguous()
        bias.grad = gradient.sum(1, keepdim=True)
        if number:
            gradient = _of_activated(gradient, weight, layers[number - 1].output)
            scale, shift = parameters[2 * hidden + 2 * number : 2 * hidden + 2 * number + 2]
            scale.grad = (gradient * layers[number - 1].normalized).sum(1, keepdim=True)
            shift.grad = gradient.sum(1, keepdim=True)
            gradient = _of_linear(parameters, layers, number - 1, gradient)


def input_gradient(parameters: Sequence[Tensor], layers: Sequence[Layer], gradient: Tensor) -> Tensor:
    """Returns the gradient of the inputs from that of the outputs, ``[R, B, inputs]``."""
    for number in reversed(range(1, len(layers) + 1)):
        gradient = _of_activated(gradient, parameters[2 * number], layers[number - 1].output)
        gradient = _of_linear(parameters, layers, number - 1, gradient)
    return torch.bmm(gradient, parameters[0].transpose(1, 2))


def _of_activated(gradient: Tensor, weight: Tensor, output: Tensor) -> Tensor:
    one = weight.shape[-1] == 1
    gradient = gradient * weight.transpose(1, 2) if one else torch.bmm(gradient, weight.transpose(1, 2))
    return before_activation(gradient, output, 0.0)
