# SPDX-License-Identifier: Apache-2.0
"""Uniform levels or a level buffer by the settings of an arm, and the difficulty of replayed levels."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels, scores


def levels_of(
    settings: dict[str, Any], levels: int | range, seed: int, *, discount: float, gae_lambda: float, **options: Any
) -> LevelSelector:
    """Returns uniform levels without a temperature, otherwise levels by the ranks of their scores.

    Args:
        settings: ``score_temperature`` and ``staleness_weight``.
        levels: the ids, or how many.
        seed: of the choices.
        discount: γ of the score.
        gae_lambda: λ of the score.
        options: further ones of the level buffer.
    """
    if settings["score_temperature"] is None:
        return UniformLevels(levels, seed=seed)
    return LevelBuffer(
        levels,
        score=scores.L1ValueLoss(discount=discount, gae_lambda=gae_lambda),
        score_temperature=settings["score_temperature"],
        staleness_weight=settings["staleness_weight"],
        seed=seed,
        **options,
    )


def expected_difficulty(levels: LevelSelector, difficulty: np.ndarray) -> float:
    """Returns the mean difficulty under the replay distribution, or of all levels where none has a score.

    Args:
        levels: with the replay distribution.
        difficulty: of each level by its id, ``[L]``.
    """
    distribution = levels.probabilities()
    if not len(distribution):
        return float(difficulty.mean())
    return float(distribution["probability"].double().numpy() @ difficulty[distribution["level_id"].numpy()])


def ignore_repeat_warning() -> None:
    """Silences the warning that replays concentrate on one level, which these experiments measure."""
    warnings.filterwarnings("ignore", message=".*took the same level as the replay before")
