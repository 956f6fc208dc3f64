# SPDX-License-Identifier: Apache-2.0
"""Scores and staleness of levels by row, and draws by both."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_replay.levels.concentration import ReplayConcentration, effective_number
from lightning_replay.levels.prioritization import Prioritization
from lightning_replay.levels.sum_tree import SumTree
from lightning_replay.seeded import uniform

__all__ = ["REFUSED", "LevelTable"]

REFUSED = -1


class StalenessTree:
    """Draws rows in proportion to the age of their timestamps, exactly, in integers."""

    def __init__(self) -> None:
        self._count = SumTree()
        self._timestamps = SumTree()
        self._rows = 0

    def put(self, row: int, timestamp: int) -> None:
        """Adds a row or changes its timestamp."""
        if row == self._rows:
            self._count[row] = 1
            self._rows += 1
        self._timestamps[row] = timestamp

    def fill(self, timestamps: list[int]) -> None:
        """Replaces all rows at once: row k has ``timestamps[k]``."""
        self._rows = len(timestamps)
        self._count.fill([1] * len(timestamps))
        self._timestamps.fill(list(timestamps))

    def total(self, now: int) -> int:
        """Returns the sum of ``now - timestamp`` over the rows."""
        return int(now * self._count.total - self._timestamps.total)

    def find(self, now: int, prefix: int) -> int:
        """Returns the row in whose part of :meth:`total` ``prefix`` lies; ``prefix`` is in [0, total)."""
        count, timestamps, node = self._count.nodes, self._timestamps.nodes, 1
        while node < self._count.first_leaf:
            node *= 2
            left = now * count[node] - timestamps[node]
            if prefix >= left:
                prefix -= int(left)
                node += 1
        return node - self._count.first_leaf


class Place(NamedTuple):
    """Row of a level, -1 if it was refused, and the id of the level that it evicted."""

    row: int
    evicted: int | None = None


class LevelTable:
    """Scores and timestamps of rows, each of which holds one level.

    Args:
        order: draws rows by their scores.
        staleness_weight: share of probability given to staleness.
        generator: of all draws.

    Attributes:
        episodes: number of episodes begun on any level, the clock of staleness.
        level_ids: id of the level in each row.
        refused: number of levels that were not stored.
        replaced: number of levels that were evicted.
    """

    def __init__(self, order: Prioritization, staleness_weight: float, generator: torch.Generator) -> None:
        self.staleness_weight = staleness_weight
        self.generator = generator
        self.episodes: int = 0
        self._order = order
        self._staleness = StalenessTree()
        self._concentration = ReplayConcentration(order)
        self._scores = np.zeros(0)
        self._timestamps = np.zeros(0, np.int64)
        self._generations = np.zeros(0, np.int64)
        self._count = 0
        self.level_ids: list[int] = []
        self.pending: dict[int, int] = {}  # ids by row, placed and not yet in the storage
        self.refused: int = 0
        self.replaced: int = 0
        self._rows: dict[int, int] = {}

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

    def row_of(self, level_id: int) -> int:
        """Returns the row of a stored level, -1 for others."""
        return self._rows.get(level_id, REFUSED)

    def score_of(self, level_id: int) -> float | None:
        """Returns the score of a stored level, ``None`` for others."""
        row = self._rows.get(level_id)
        return None if row is None else float(self._scores[row])

    def place(self, level_id: int, score: float, timestamp: int, capacity: int) -> Place:
        """Sets the score of a level, after assigning a row if it has none; the writer writes the storage later.

        Args:
            level_id: not negative.
            score: finite.
            timestamp: episode in which the level was begun.
            capacity: most rows; beyond it a level replaces the one of least replay probability, or is refused.
        """
        evicted = None
        row = self._rows.get(level_id)
        if row is not None:
            self.put(row, score, max(timestamp, int(self._timestamps[row])))
            return Place(row)
        row = len(self.level_ids)
        if row < capacity:
            self.level_ids.append(level_id)
        else:
            row = self.least_probable()
            if not self.scores[row] < score:
                self.refused += 1
                return Place(REFUSED)
            self.replaced += 1
            evicted = self.level_ids[row]
            del self._rows[evicted]
            self.level_ids[row] = level_id
        self._rows[level_id] = row
        self.pending[row] = level_id
        self.put(row, score, timestamp, is_another_level=True)
        return Place(row, evicted)

    def set_levels(self, level_ids: list[int]) -> None:
        """Replaces the ids of all rows; :meth:`load_state_dict` replaces their scores."""
        self.level_ids = level_ids
        self._rows = {level_id: row for row, level_id in enumerate(level_ids)}
        self.pending.clear()

    def put(self, row: int, score: float, timestamp: int, *, is_another_level: bool = False) -> None:
        """Sets the score of a row, or of the next free one, and the episode in which its level was last played.

        ``is_another_level``: whether the row had another level before.
        """
        is_added = row == self._count
        if is_added:
            if row == len(self._scores):
                rows = max(2 * row, 64)
                self._scores = np.resize(self._scores, rows)
                self._timestamps = np.resize(self._timestamps, rows)
                self._generations = np.resize(self._generations, rows)
            self._count += 1
            self._generations[row] = 0
        elif is_another_level:
            self._generations[row] += 1
        if is_added or self._timestamps[row] != timestamp:  # equal if the level is scored for its newest episode
            self._staleness.put(row, timestamp)
        self._scores[row], self._timestamps[row] = score, timestamp
        self._order.put(row, score, timestamp)

    def touch(self, row: int) -> None:
        """Marks the level of a row as played in the newest episode."""
        self.put(row, float(self._scores[row]), self.episodes)

    def begin_episode(self) -> int:
        """Advances the clock by one episode and returns the episode's number."""
        self.episodes += 1
        return self.episodes

    def draw(self, in_flight: Collection[int] = ()) -> int:
        """Draws a row by its replay probability; changes no level.

        Args:
            in_flight: ids of levels that a draw by score leaves out, see :meth:`probabilities`.

        Raises:
            RuntimeError: no level is stored.
        """
        if self._count == 0:
            raise RuntimeError("no level has a score yet, so none can be replayed; play new levels first")
        if self.staleness_weight > 0.0 and uniform(self.generator) < self.staleness_weight:
            total = self._staleness.total(self.episodes)
            drawn = int(torch.randint(total or self._count, (), generator=self.generator, device="cpu"))
            row = self._staleness.find(self.episodes, drawn) if total else drawn
        else:
            row = self._draw_idle(in_flight) if in_flight else self._order.draw(self.generator)
        self._concentration.add((row, int(self._generations[row])), self._count)
        return row

    def _draw_idle(self, in_flight: Collection[int]) -> int:
        """Draws a row by the scores of the levels that are not in flight."""
        cumulative = np.cumsum(self._by_score(in_flight))
        row = int(np.searchsorted(cumulative, uniform(self.generator) * cumulative[-1], side="right"))
        return min(row, self._count - 1)

    def _by_score(self, in_flight: Collection[int]) -> np.ndarray:
        """Returns the probability of each row by score; those in flight have none, unless all levels are."""
        rows = [row for row in map(self.row_of, in_flight) if row != REFUSED]
        if not rows or len(rows) == self._count:
            return self._order.probabilities(self.scores, self.timestamps)
        is_idle = np.ones(self._count, np.bool_)
        is_idle[rows] = False
        by_score = np.zeros(self._count)
        by_score[is_idle] = self._order.probabilities(self.scores[is_idle], self.timestamps[is_idle])
        return by_score

    def probabilities(self, in_flight: Collection[int] = ()) -> np.ndarray:
        """Returns the replay probability of each row, float64 ``[L]``.

        Args:
            in_flight: distinct ids of levels whose probability by score is 0; ranks are then those among the others.
                Staleness is not concerned. No effect if all levels are in flight.
        """
        if self._count == 0:
            return np.zeros(0)
        by_score = self._by_score(in_flight)
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
            of the likeliest level, and ``effective_levels``, see
            :func:`~lightning_replay.levels.concentration.effective_number`. Empty while no level is stored.
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
        """Restores :meth:`state_dict`; :meth:`set_levels` sets the ids."""
        self.episodes = int(state_dict["episodes"])
        self._scores = state_dict["score"].cpu().numpy().astype(np.float64)
        self._timestamps = state_dict["timestamp"].cpu().numpy().astype(np.int64)
        self._generations = state_dict["generation"].cpu().numpy().astype(np.int64)
        self._count = len(self._scores)
        self._order.fill(self._scores, self._timestamps)
        self._order.load_state_dict(state_dict["prioritization"])
        self._staleness.fill(self._timestamps.tolist())
        self.generator.set_state(state_dict["generator"].cpu())
