# SPDX-License-Identifier: Apache-2.0
"""The levels that have a score: their ids, scores and staleness by row, and draws by both."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from lightning_replay.levels.concentration import ReplayConcentration, effective_number
from lightning_replay.levels.prioritization import Prioritization, Rank
from lightning_replay.levels.sum_tree import SumTree
from lightning_replay.seeded import seeded_generator, uniform
from lightning_replay.validation import checked_share

__all__ = ["REFUSED", "LevelTable"]

REFUSED = -1


class StalenessTree:
    """Draws rows in proportion to the age of their timestamps, exactly, in integers."""

    def __init__(self) -> None:
        self._timestamps = SumTree()
        self._rows = 0

    def put(self, row: int, timestamp: int) -> None:
        """Adds a row or changes its timestamp."""
        if row == self._rows:
            self._rows += 1
        self._timestamps[row] = timestamp

    def fill(self, timestamps: list[int]) -> None:
        """Replaces all rows at once: row k has ``timestamps[k]``."""
        self._rows = len(timestamps)
        self._timestamps.fill(list(timestamps))

    def total(self, now: int) -> int:
        """Returns the sum of ``now - timestamp`` over the rows."""
        return int(now * self._rows - self._timestamps.total)

    def find(self, now: int, prefix: int) -> int:
        """Returns the row in whose part of :meth:`total` ``prefix`` lies; ``prefix`` is in [0, total)."""
        nodes, node = self._timestamps.nodes, 1
        row, width = 0, self._timestamps.first_leaf  # the first row below a node, and the number of its leaves
        while width > 1:
            node, width = 2 * node, width // 2
            rows = self._rows - row  # those below the left child are at most its leaves
            left = now * (rows if rows < width else width) - nodes[node]
            if prefix >= left:
                prefix -= int(left)
                node, row = node + 1, row + width
        return row


class LevelTable:
    """Ids, scores and timestamps of the levels that have a score, one level a row.

    Arguments and errors are those of :class:`~lightning_replay.levels.LevelSampler`, the same table as a TorchRL
    sampler.
    """

    def __init__(
        self,
        prioritization: Prioritization | None = None,
        score_temperature: float = 0.1,
        staleness_weight: float = 0.1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if prioritization is not None and not isinstance(prioritization, Prioritization):
            raise TypeError(
                f"prioritization is {prioritization!r}; accepted are Rank(), Proportional(), Greedy() and Boltzmann() "
                "of lightning_replay.levels"
            )
        self.staleness_weight: float = checked_share("staleness_weight", staleness_weight)
        self._order = (prioritization or Rank()).bind(score_temperature)
        self.generator: torch.Generator = seeded_generator(seed)  #: Of all draws.
        self.episodes: int = 0  #: Number of episodes begun on any level, the clock of staleness.
        self.refused: int = 0  #: Number of levels that were not stored.
        self.replaced: int = 0  #: Number of levels that were evicted.
        self.dropped: int = 0  #: Number of scores that came after their level had left its row.
        self.level_ids: list[int] = []  #: Id of the level in each row.
        self._rows: dict[int, int] = {}
        # of as many rows as there is memory for; the first len(self) hold a level
        self._scores = np.zeros(0)
        self._timestamps = np.zeros(0, np.int64)
        self._generations = np.zeros(0, np.int64)
        self._count = 0
        self._staleness = StalenessTree()
        self._concentration = ReplayConcentration(self._order)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, level_id: object) -> bool:
        return level_id in self._rows

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

    def place(self, level_id: int, score: float, timestamp: int, capacity: int) -> tuple[int, int | None]:
        """Sets the score of a level, after assigning a row if it has none.

        Args:
            level_id: not negative.
            score: finite.
            timestamp: episode in which the level was begun.
            capacity: most rows; beyond it a level replaces the one of least replay probability, or is refused.

        Returns:
            The level's row, -1 if it was refused, and the id of the level that it evicted.
        """
        row = self._rows.get(level_id)
        if row is not None:
            self.put(row, score, max(timestamp, int(self._timestamps[row])))
            return row, None
        row, evicted = self._count, None
        if row < capacity:
            self.level_ids.append(level_id)
        else:
            row = self.least_probable()
            if not self.scores[row] < score:
                self.refused += 1
                return REFUSED, None
            self.replaced += 1
            evicted = self.level_ids[row]
            del self._rows[evicted]
            self.level_ids[row] = level_id
        self._rows[level_id] = row
        self.put(row, score, timestamp, is_another_level=True)
        return row, evicted

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
        """
        if self._count == 0:
            raise RuntimeError("no level has a score yet, so none can be replayed; play new levels first")
        if self.staleness_weight > 0.0 and uniform(self.generator) < self.staleness_weight:
            total = self._staleness.total(self.episodes)
            drawn = int(torch.randint(total or self._count, (), generator=self.generator, device="cpu"))
            row = self._staleness.find(self.episodes, drawn) if total else drawn
        elif in_flight:
            cumulative = np.cumsum(self._by_score(in_flight))
            row = int(np.searchsorted(cumulative, uniform(self.generator) * cumulative[-1], side="right"))
            row = min(row, self._count - 1)
        else:
            row = self._order.draw(self.generator)
        self._concentration.add((row, int(self._generations[row])), self._count)
        return row

    def _by_score(self, in_flight: Collection[int]) -> np.ndarray:
        """Returns the probability of each row by score; those in flight have none, unless all levels are."""
        rows = [self._rows[level_id] for level_id in in_flight if level_id in self._rows]
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

    def least_probable(self) -> int:
        """Returns the row of least replay probability; among equals the lowest score, then the lowest row."""
        probabilities = self.probabilities()
        least = np.flatnonzero(probabilities == probabilities.min())
        return int(least[np.argmin(self.scores[least])])

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

    def state_dict(self) -> dict[str, Any]:
        """Scores, timestamps, clock and generator; :meth:`stored_levels` has the ids."""
        return {
            "episodes": self.episodes,
            "score": torch.from_numpy(self.scores.copy()),
            "timestamp": torch.from_numpy(self.timestamps.copy()),
            "generation": torch.from_numpy(self._generations[: self._count].copy()),
            "prioritization": self._order.state_dict(),
            "generator": self.generator.get_state(),
            "dropped": self.dropped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; :meth:`set_stored_levels` restores the ids."""
        self.episodes, self.dropped = int(state_dict["episodes"]), int(state_dict["dropped"])
        self._scores = state_dict["score"].cpu().numpy().astype(np.float64)
        self._timestamps = state_dict["timestamp"].cpu().numpy().astype(np.int64)
        self._generations = state_dict["generation"].cpu().numpy().astype(np.int64)
        self._count = len(self._scores)
        self._order.fill(self._scores, self._timestamps)
        self._order.load_state_dict(state_dict["prioritization"])
        self._staleness.fill(self._timestamps.tolist())
        self.generator.set_state(state_dict["generator"].cpu())

    def stored_levels(self) -> dict[str, Any]:
        """Ids in the order of their rows, and counters: the state of the writer."""
        level_ids = torch.tensor(self.level_ids, dtype=torch.int64, device="cpu")
        return {"level_id": level_ids, "refused": self.refused, "replaced": self.replaced}

    def set_stored_levels(self, state: dict[str, Any]) -> None:
        """Restores :meth:`stored_levels`."""
        self.level_ids = state["level_id"].tolist()
        self._rows = {level_id: row for row, level_id in enumerate(self.level_ids)}
        self.refused, self.replaced = int(state["refused"]), int(state["replaced"])
