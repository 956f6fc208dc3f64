# SPDX-License-Identifier: Apache-2.0
"""Networks of several runs as one module, so that small networks do not cost mostly overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn

Initialise = Callable[[int, int, bool, Generator], tuple[Tensor, Tensor]]


def kaiming(inputs: int, outputs: int, is_last: bool, generator: Generator) -> tuple[Tensor, Tensor]:
    """Returns normal weights of the scale for ReLU, of the last layer near zero, and zero biases."""
    scale = 0.01 if is_last else (2.0 / inputs) ** 0.5
    return scale * torch.randn(inputs, outputs, generator=generator), torch.zeros(1, outputs)


def uniform_fan_in(inputs: int, outputs: int, is_last: bool, generator: Generator) -> tuple[Tensor, Tensor]:
    """Returns weights and biases uniform in ±1 / sqrt(inputs), the default of ``torch.nn.Linear``."""
    drawn = (2.0 * torch.rand(inputs + 1, outputs, generator=generator) - 1.0) * inputs**-0.5
    return drawn[:-1], drawn[-1:]


class StackedLinear(nn.Module):
    """A linear layer of each run: ``[R, N, inputs]`` to ``[R, N, outputs]``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns each run's rows through its own layer."""
        return torch.baddbmm(self.bias, rows, self.weight)


class StackedNetwork(nn.Module):
    """Perceptrons of R runs, ``[R * N, inputs]`` to ``[R * N, outputs]``, the first N rows the first run's.

    Rows ``[R, N, inputs]`` become ``[R, N, outputs]``.

    Args:
        sizes: of the input, the hidden layers and the output.
        seeds: of the weights, one for each run.
        activation: between the layers; leaky ReLU by default, as in the agent MP-DQN.
        initialise: weights ``[inputs, outputs]`` and bias ``[1, outputs]`` of one layer of one run.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seeds: Sequence[int],
        activation: Callable[[], nn.Module] = nn.LeakyReLU,
        initialise: Initialise = kaiming,
    ) -> None:
        super().__init__()
        self.runs = len(seeds)
        generators = [Generator().manual_seed(seed) for seed in seeds]
        layers: list[nn.Module] = []
        for layer, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            drawn = [initialise(inputs, outputs, layer == len(sizes) - 1, generator) for generator in generators]
            weights, biases = zip(*drawn, strict=True)
            layers += [StackedLinear(torch.stack(weights), torch.stack(biases)), activation()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, rows: Tensor) -> Tensor:
        """Returns every run's rows through its own network."""
        if rows.dim() == 3:
            return self.layers(rows)
        return self.layers(rows.reshape(self.runs, -1, rows.shape[-1])).flatten(0, 1)


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> None:
    """Limits the norm of the gradient of each run by itself."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum(dim=(1, 2)) for gradient in gradients]).sum(dim=0).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0).reshape(-1, 1, 1)
    torch._foreach_mul_(gradients, [scale] * len(gradients))
