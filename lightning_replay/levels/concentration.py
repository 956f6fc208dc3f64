# SPDX-License-Identifier: Apache-2.0
"""Effective number of levels of a replay distribution, from its probabilities or from draws."""

from __future__ import annotations

import warnings

import numpy as np

from lightning_replay.levels.prioritization import Prioritization

__all__ = ["ReplayConcentration", "effective_number"]

_WINDOW = 1_000  # replays, 16 rollouts of 64 environments; an estimate of 5 then has a standard error of 0.3
_FEWEST_EFFECTIVE = 5
_FEWEST_SCORED = 4 * _FEWEST_EFFECTIVE  # 5 effective levels out of fewer are no narrow replay


def effective_number(probabilities: np.ndarray) -> float:
    """Returns one over the sum of squared probabilities ``[L]``: L where all are equal, 1 where one level has all.

    Two independent draws take the same level with probability ``1 / effective_number``.
    """
    return float(1.0 / np.square(probabilities).sum())


class ReplayConcentration:
    """Warns once if replays repeat the previous replay's level too often.

    The inverse of the share of repeats estimates the effective number of levels, at a constant cost per replay. Unlike
    the probabilities it measures the levels that are played: levels of equal scores that alternate do not repeat,
    although each in turn has nearly all of the probability; a level whose score changes only at the end of a rollout
    repeats in every environment that starts an episode meanwhile.

    Args:
        prioritization: of the sampler; nothing is counted where the temperature has no effect on it.
    """

    def __init__(self, prioritization: Prioritization) -> None:
        self._prioritization = prioritization
        self._is_counting = prioritization.uses_temperature
        self._last: tuple[int, int] | None = None
        self._replays = 0
        self._repeats = 0

    def add(self, level: tuple[int, int], scored: int) -> None:
        """Counts a replay; warns at the end of the first 1,000 of which more than one in five are repeats.

        Args:
            level: row of the replayed level, and its generation.
            scored: levels with a score; replays out of fewer than 20 are not counted.
        """
        if not self._is_counting or scored < _FEWEST_SCORED:
            return
        self._replays += 1
        self._repeats += level == self._last
        self._last = level
        if self._replays < _WINDOW:
            return
        replays, repeats = self._replays, self._repeats
        self._replays = self._repeats = 0
        if replays >= _FEWEST_EFFECTIVE * repeats:
            return
        self._is_counting = False
        warnings.warn(
            f"of the last {replays:,} replays {repeats:,} took the same level as the replay before, as if only "
            f"{replays / repeats:.1f} levels were replayed, although {scored:,} have a score: "
            f"{type(self._prioritization).__name__}() at score_temperature="
            f"{self._prioritization.score_temperature:g} gives nearly all replays for the score to one level until "
            "its score changes. With many episodes per update that level takes most of a batch. Give a higher "
            "score_temperature, such as 1, or replay_in_flight=False of LevelBuffer, or ignore this if intended; see "
            "docs/levels-temperature.md",
            stacklevel=2,
        )
