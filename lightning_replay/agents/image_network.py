# SPDX-License-Identifier: Apache-2.0
"""Convolutional action values of images, from TorchRL's parts: dueling, noisy and distributional, or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ConvNet, DuelingCnnDQNet, NoisyLinear

from lightning_replay.agents.networks import checked_sides


def with_noise() -> set_exploration_type:
    """The context in which noisy layers add their noise; outside of it they use the mean weights alone.

    The noise is that of the last ``torchrl.modules.reset_noise``; a forward pass draws none.
    """
    return set_exploration_type(ExplorationType.RANDOM)


class ImageNetwork(nn.Module):
    """Values of all actions of images divided by their largest pixel value: ``[B, *output_shape]``.

    Convolutions, one hidden layer and one output per action (and atom); with ``dueling`` the sum of a state's value
    and its actions' advantages, whose mean is 0.

    Args:
        observation_shape: channels, height, width.
        observation_high: largest pixel value.
        output_shape: ``(actions,)``, or ``(atoms, actions)`` for logits of distributions.
        channels: of the convolutions, one number each; likewise ``kernel_sizes`` and ``strides``.
        kernel_sizes: side of each convolution's kernel.
        strides: of each convolution.
        hidden_size: units of the hidden layer (of each of both streams with ``dueling``).
        dueling: a stream for the state's value beside that of the advantages (https://arxiv.org/abs/1511.06581).
        noise_deviation: σ₀ of factorised noise in the fully connected layers (https://arxiv.org/abs/1706.10295);
            ``None`` for plain layers.

    Raises:
        ValueError: the convolutions are not given alike, or leave nothing of so small an image.
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
        self(torch.zeros(1, *observation_shape, dtype=torch.uint8))  # TorchRL's layers read their sizes off a batch

    def forward(self, observation: Tensor) -> Tensor:
        """Values or logits of images ``[B, C, H, W]``."""
        return self.body(observation * self.scale)
