# SPDX-License-Identifier: Apache-2.0
"""What happens to a batch between the storage and the loss, or to steps between the environment and the storage."""

from __future__ import annotations

from lightning_replay.transforms.mixup import MixPairs, MixStates, mixup_coefficients
from lightning_replay.transforms.n_step import NStepTransitions
from lightning_replay.transforms.noise import GaussianNoise
from lightning_replay.transforms.shaping import ManhattanDistance, OneAt, PotentialShaping

__all__ = [
    "GaussianNoise",
    "ManhattanDistance",
    "MixPairs",
    "MixStates",
    "NStepTransitions",
    "OneAt",
    "PotentialShaping",
    "mixup_coefficients",
]
