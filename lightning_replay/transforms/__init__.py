# SPDX-License-Identifier: Apache-2.0
"""Transforms of batches between storage and loss, and of steps between environment and storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

if TYPE_CHECKING:
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

__getattr__: Getter = lazy_names(
    __name__,
    {
        "lightning_replay.episodes.returns": ("NStepTransitions",),
        ".augmentation": ("AUGMENTATIONS", "MixMinibatch", "UCBAugmentation"),
        ".goals": ("RelabelGoals",),
        ".mixup": ("MixPairs", "MixStates", "mixup_coefficients"),
        ".noise": ("GaussianNoise",),
        ".shaping": ("ManhattanDistance", "OneAt", "PotentialShaping"),
    },
)
