# SPDX-License-Identifier: Apache-2.0
"""Networks of several runs as one module, so that small networks do not cost mostly overhead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class StackedLinear(nn.Module):
    """A linear layer of each run: ``[R, N, inputs]`` to ``[R, N, outputs]``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(len(weight), 1, weight.shape[-1]))

    def forward(self, rows: Tensor) -> Tensor:
        """Each run's rows by its own layer."""
        return torch.baddbmm(self.bias, rows, self.weight)


class StackedNetwork(nn.Module):
    """Leaky ReLU networks of R runs: ``[R * N, inputs]`` to ``[R * N, outputs]``, the first N rows the first run's.

    Kaiming weights, zero biases and outputs near zero at first, as in the agent MP-DQN.

    Args:
        sizes: of the input, the hidden layers and the output.
        seeds: of the weights, one for each run.
    """

    def __init__(self, sizes: Sequence[int], seeds: Sequence[int]) -> None:
        super().__init__()
        self.runs = len(seeds)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        layers: list[nn.Module] = []
        for layer, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            scale = 0.01 if layer == len(sizes) - 1 else (2.0 / inputs) ** 0.5
            drawn = [scale * torch.randn(inputs, outputs, generator=generator) for generator in generators]
            layers += [StackedLinear(torch.stack(drawn)), nn.LeakyReLU(0.01)]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, rows: Tensor) -> Tensor:
        """Every run's rows by its own network."""
        return self.layers(rows.reshape(self.runs, -1, rows.shape[-1])).flatten(0, 1)


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> None:
    """Limits the norm of the gradient of each run by itself."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum(dim=(1, 2)) for gradient in gradients]).sum(dim=0).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0).reshape(-1, 1, 1)
    torch._foreach_mul_(gradients, [scale] * len(gradients))
