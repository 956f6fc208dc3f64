# SPDX-License-Identifier: Apache-2.0
"""Scores of levels by row, how long ago each was played, and draws by both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_replay.levels.concentration import ReplayConcentration, effective_number
from lightning_replay.levels.prioritization import Prioritization
from lightning_replay.levels.rng import uniform
from lightning_replay.levels.sum_tree import StalenessTree

__all__ = ["LevelTable"]


class LevelTable:
    """Scores and timestamps of rows, each of which holds one level.

    Args:
        order: draws rows by their scores.
        staleness_weight: share of probability given to staleness.
        generator: of all draws.

    Attributes:
        episodes: number of episodes begun on any level, the clock of staleness.
    """

    def __init__(self, order: Prioritization, staleness_weight: float, generator: torch.Generator) -> None:
        self.staleness_weight = staleness_weight
        self.generator = generator
        self.episodes = 0
        self._order = order
        self._staleness = StalenessTree()
        self._concentration = ReplayConcentration(order)
        self._scores = np.zeros(0)
        self._timestamps = np.zeros(0, np.int64)
        self._generations = np.zeros(0, np.int64)
        self._count = 0

    def __len__(self) -> int:
        """Number of rows that hold a level."""
        return self._count

    @property
    def scores(self) -> np.ndarray:
        """Score of each row, float64 ``[L]``."""
        return self._scores[: self._count]

    @property
    def timestamps(self) -> np.ndarray:
        """Episode at which each row was last drawn, int64 ``[L]``."""
        return self._timestamps[: self._count]

    @property
    def staleness(self) -> np.ndarray:
        """Episodes since each row was last drawn, int64 ``[L]``."""
        return self.episodes - self.timestamps

    def put(self, row: int, score: float, timestamp: int, *, is_another_level: bool = False) -> None:
        """Sets the score of a row, or of the next free one.

        Args:
            row: at most :func:`len`.
            score: of the level, finite.
            timestamp: episode at which it was last played.
            is_another_level: whether the level is another than the row had before.
        """
        if row == self._count:
            if row == len(self._scores):
                room = max(2 * row, 64)
                self._scores = np.resize(self._scores, room)
                self._timestamps = np.resize(self._timestamps, room)
                self._generations = np.resize(self._generations, room)
            self._count += 1
            self._generations[row] = 0
        elif is_another_level:
            self._generations[row] += 1
        self._scores[row], self._timestamps[row] = score, timestamp
        self._order.put(row, score, timestamp)
        self._staleness.put(row, timestamp)

    def touch(self, row: int) -> None:
        """Marks the level of a row as played in the newest episode."""
        self.put(row, float(self._scores[row]), self.episodes)

    def begin_episode(self) -> int:
        """Advances the clock by one episode and returns the episode's number."""
        self.episodes += 1
        return self.episodes

    def draw(self) -> int:
        """Draws a row by its replay probability; changes no level.

        Raises:
            RuntimeError: no level is stored.
        """
        if self._count == 0:
            raise RuntimeError("no level has a score yet, so none can be replayed; play new levels first")
        row = self._draw()
        self._concentration.add((row, int(self._generations[row])), self._count)
        return row

    def _draw(self) -> int:
        if self.staleness_weight > 0.0 and uniform(self.generator) < self.staleness_weight:
            total = self._staleness.total(self.episodes)
            if total == 0:
                return int(torch.randint(self._count, (), generator=self.generator))
            return self._staleness.find(self.episodes, int(torch.randint(total, (), generator=self.generator)))
        return self._order.draw(self.generator)

    def probabilities(self) -> np.ndarray:
        """Returns the replay probability of each row, float64 ``[L]``."""
        if self._count == 0:
            return np.zeros(0)
        by_score = self._order.probabilities(self.scores, self.timestamps)
        if self.staleness_weight == 0.0:
            return by_score
        staleness = self.staleness.astype(np.float64)
        total = staleness.sum()
        by_staleness = staleness / total if total > 0 else np.full(self._count, 1.0 / self._count)
        return (1.0 - self.staleness_weight) * by_score + self.staleness_weight * by_staleness

    def stats(self) -> dict[str, float]:
        """Metrics to log: means and maximum over the levels, and how broad the replay distribution is.

        Returns:
            ``score_mean``, ``score_max``, ``staleness_mean`` in episodes, ``probability_max``, the replay probability
            of the likeliest level, and ``effective_levels``, one over the sum of all squared replay probabilities: 1
            where one level is replayed, ``len`` where all are alike. Empty while no level is stored.
        """
        if self._count == 0:
            return {}
        probabilities = self.probabilities()
        return {
            "score_mean": float(self.scores.mean()),
            "score_max": float(self.scores.max()),
            "staleness_mean": float(self.staleness.mean()),
            "probability_max": float(probabilities.max()),
            "effective_levels": effective_number(probabilities),
        }

    def least_probable(self) -> int:
        """Returns the row of least replay probability; among equals the lowest score, then the lowest row."""
        probabilities = self.probabilities()
        least = np.flatnonzero(probabilities == probabilities.min())
        return int(least[np.argmin(self.scores[least])])

    def state_dict(self) -> dict[str, Any]:
        """Scores, timestamps, clock and generator."""
        return {
            "episodes": self.episodes,
            "score": torch.from_numpy(self.scores.copy()),
            "timestamp": torch.from_numpy(self.timestamps.copy()),
            "generation": torch.from_numpy(self._generations[: self._count].copy()),
            "prioritization": self._order.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the draws from where :meth:`state_dict` was read."""
        self.episodes = int(state_dict["episodes"])
        self._scores = state_dict["score"].cpu().numpy().astype(np.float64)
        self._timestamps = state_dict["timestamp"].cpu().numpy().astype(np.int64)
        self._generations = state_dict["generation"].cpu().numpy().astype(np.int64)
        self._count = len(self._scores)
        self._order.fill(self._scores, self._timestamps)
        self._order.load_state_dict(state_dict.get("prioritization", {}))  # early saves have none
        self._staleness.fill(self._timestamps.tolist())
        self.generator.set_state(state_dict["generator"].cpu())
