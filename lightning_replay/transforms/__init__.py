# SPDX-License-Identifier: Apache-2.0
"""Transforms of batches between storage and loss, and of steps between environment and storage."""

from lightning_replay.episodes.returns import NStepTransitions
from lightning_replay.transforms.augmentation import AUGMENTATIONS, MixMinibatch, UCBAugmentation
from lightning_replay.transforms.goals import RelabelGoals
from lightning_replay.transforms.mixup import MixPairs, MixStates, mixup_coefficients
from lightning_replay.transforms.noise import GaussianNoise
from lightning_replay.transforms.shaping import ManhattanDistance, OneAt, PotentialShaping

__all__ = [
    "AUGMENTATIONS",
    "GaussianNoise",
    "ManhattanDistance",
    "MixMinibatch",
    "MixPairs",
    "MixStates",
    "NStepTransitions",
    "OneAt",
    "PotentialShaping",
    "RelabelGoals",
    "UCBAugmentation",
    "mixup_coefficients",
]
