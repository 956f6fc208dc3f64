# SPDX-License-Identifier: Apache-2.0
"""Multilayer perceptrons over flat observations, and the output sizes of convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn


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

    Raises:
        ValueError: no convolution, not one number of each kind for each, or too small an image.
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
        self.perceptron = perceptron(observation_size, hidden_sizes, len(low))
        self.register_buffer("center", (high + low) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2, persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns actions, ``[B, A]``."""
        return self.center + self.half_range * torch.tanh(self.perceptron(observation))


class StateActionCritic(nn.Module):
    """Value of an observation with an action, ``[B, 1]``."""

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.perceptron = perceptron(observation_size + action_size, hidden_sizes, 1)

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
        self.perceptron = perceptron(observation_size, hidden_sizes, num_actions)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the values."""
        return self.perceptron(observation)
