# SPDX-License-Identifier: Apache-2.0
"""Policy and value on a common trunk: perceptrons over flat observations, convolutions over images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_replay.agents.networks import checked_sides


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
        self.trunk = nn.Sequential(*layers)
        self.policy = _orthogonal(nn.Linear(hidden_sizes[-1], num_actions), 0.01)
        self.value = _orthogonal(nn.Linear(hidden_sizes[-1], 1), 1.0)

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
        self.is_one_hot = categories is not None
        counts = categories or [1] * channels
        self.count = sum(counts)
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
