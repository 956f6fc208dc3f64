# SPDX-License-Identifier: Apache-2.0
"""Convolutional action values of images, optionally dueling, noisy and distributional, from TorchRL's parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ConvNet, DuelingCnnDQNet, NoisyLinear

from lightning_replay.agents.networks import checked_sides


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
