# SPDX-License-Identifier: Apache-2.0
"""Transforms of batches between storage and loss, and of steps between environment and storage."""

from __future__ import annotations

from lightning_replay.episodes.returns import NStepTransitions
from lightning_replay.transforms.goals import RelabelGoals
from lightning_replay.transforms.mixup import MixPairs, MixStates, mixup_coefficients
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
    "RelabelGoals",
    "mixup_coefficients",
]
