# SPDX-License-Identifier: Apache-2.0
"""Teacher-student curriculum learning, which plays levels whose returns change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch

from lightning_replay.levels.buffer import LevelBuffer
from lightning_replay.levels.prioritization import Greedy
from lightning_replay.validation import ABOVE_ZERO, check_option, checked_number, checked_share

__all__ = ["LearningProgress", "tscl"]


class LearningProgress:
    """``|Q|`` of a level, where Q follows the slope of its last returns over the episodes of all levels.

    ``Q <- step_size * slope + (1 - step_size) * Q``, the slope by least squares over the last ``window`` episodes on
    the level. A level with fewer than two has slope 1, so that with the default ``initial_value`` unseen levels come
    first. The window variant of Matiisen et al. 2017, "Teacher-Student Curriculum Learning",
    https://arxiv.org/abs/1707.00183.

    Give it as the ``score`` of a :class:`~lightning_replay.levels.LevelBuffer` with a known set of levels; all of them
    then have a score from the start. :func:`tscl` puts the usual parts together.

    Args:
        window: returns kept of each level, K; at least 2.
        step_size: α, in (0, 1].
        initial_value: Q of a level before its first episode, of either sign; its magnitude is the level's score until
            then. With less than 1 a level that was played once comes before those never played.

    Attributes:
        initial_score: ``abs(initial_value)``.
    """

    def __init__(self, window: int = 10, step_size: float = 1.0, initial_value: float = 1.0) -> None:
        check_option("window", window, Integral, "a whole number of at least 2, which a slope needs", lowest=2)
        checked_share("step_size", step_size, lowest=ABOVE_ZERO)
        self.window = window
        self.step_size = step_size
        self.initial_value: float = checked_number("initial_value", initial_value)
        self.initial_score: float = abs(self.initial_value)
        self._returns: dict[int, deque[tuple[int, float]]] = {}
        self._q: dict[int, float] = {}

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        """Computes the level's new score from an episode's number among those of all levels, and its return."""
        if not math.isfinite(episode_return):
            raise ValueError(f"the return of an episode on level {level_id} is {episode_return}; it must be finite")
        returns = self._returns.setdefault(level_id, deque(maxlen=self.window))
        returns.append((episode, episode_return))
        q = self.step_size * _slope(returns) + (1.0 - self.step_size) * self._q.get(level_id, self.initial_value)
        self._q[level_id] = q
        return abs(q)

    def values(self) -> dict[int, float]:
        """Returns Q with its sign, below 0 where returns fall, by the id of each level that was played."""
        return dict(self._q)

    def state_dict(self) -> dict[str, Any]:
        points = [point for returns in self._returns.values() for point in returns]
        return {
            "level_id": torch.tensor(list(self._returns), dtype=torch.int64, device="cpu"),
            "length": torch.tensor(
                [len(returns) for returns in self._returns.values()], dtype=torch.int64, device="cpu"
            ),
            "episode": torch.tensor([episode for episode, _ in points], dtype=torch.int64, device="cpu"),
            "episode_return": torch.tensor([value for _, value in points], dtype=torch.float64, device="cpu"),
            "q": torch.tensor([self._q[level_id] for level_id in self._returns], dtype=torch.float64, device="cpu"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        level_ids, lengths = state["level_id"].tolist(), state["length"].tolist()
        points = iter(zip(state["episode"].tolist(), state["episode_return"].tolist(), strict=True))
        self._returns = {
            level_id: deque((next(points) for _ in range(length)), maxlen=self.window)
            for level_id, length in zip(level_ids, lengths, strict=True)
        }
        self._q = dict(zip(level_ids, state["q"].tolist(), strict=True))


def tscl(
    levels: int | Iterable[int],
    window: int = 10,
    step_size: float = 1.0,
    epsilon: float = 0.5,
    staleness_weight: float = 0.0,
    seed: int | None = None,
    *,
    initial_value: float = 1.0,
) -> LevelBuffer:
    """Builds a teacher-student curriculum over a known set of levels, ε-greedy in learning progress.

    The defaults are the best ones in Jiang et al. 2021. For the Boltzmann variant build
    ``LevelBuffer(levels, score=LearningProgress(), prioritization=Boltzmann(), score_temperature=...)``.

    Args:
        levels: distinct ids, or their number for 0, 1, 2, ...
        window: returns kept of each level.
        step_size: of Q.
        epsilon: share of episodes on any level.
        staleness_weight: share of probability given to staleness.
        seed: of the choices.
        initial_value: Q of a level before its first episode.
    """
    return LevelBuffer(
        levels,
        score=LearningProgress(window, step_size, initial_value),
        prioritization=Greedy(epsilon),
        staleness_weight=staleness_weight,
        seed=seed,
    )


def _slope(points: deque[tuple[int, float]]) -> float:
    """Returns the slope of the least-squares line through (episode, return); 1 for fewer than two episodes."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0.0:
        return 1.0
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
