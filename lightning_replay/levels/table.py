# SPDX-License-Identifier: Apache-2.0
"""Scores and staleness of levels, and draws by both, without an import of TorchRL."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable
from itertools import repeat
from typing import Any

import numpy as np
import torch

from lightning_replay.levels.prioritization import Prioritization, Rank, ReplayConcentration, SumTree, effective_number
from lightning_replay.options import check_kind, checked_share
from lightning_replay.state import seeded_generator, uniform

REFUSED = -1


class LevelTable:
    """Ids, scores and timestamps of the levels that have a score, one level a row.

    :class:`~lightning_replay.levels.LevelSampler` documents the draws.
    """

    def __init__(
        self,
        prioritization: Prioritization | None = None,
        score_temperature: float = 1.0,
        staleness_weight: float = 0.3,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        kinds = "Rank(), Proportional(), Greedy() or Boltzmann() of lightning_replay.levels, or None"
        check_kind("prioritization", prioritization, Prioritization | None, kinds)
        self.staleness_weight: float = checked_share("staleness_weight", staleness_weight)
        self._order = (prioritization or Rank()).bind(score_temperature)
        self.weights: np.ndarray | None = None  #: Prior, by the id of each level.
        self.generator: torch.Generator = seeded_generator(seed)  #: Of all draws.
        self.episodes: int = 0  #: Number of episodes begun on any level, the clock of staleness.
        self.refused: int = 0  #: Number of levels that were not stored.
        self.replaced: int = 0  #: Number of levels that were evicted.
        self.dropped: int = 0  #: Number of scores that came after their level had left its row.
        self.level_ids: list[int] = []  #: Id of the level in each row.
        self._rows: dict[int, int] = {}
        # The arrays may have more rows than levels. The first len(self) rows hold a level.
        self._scores = np.zeros(0)
        self._timestamps = np.zeros(0, np.int64)
        self._generations = np.zeros(0, np.int64)
        self._count = 0
        self._sums = SumTree()  # sums over timestamps
        self._is_behind = False  # Whether the next draw of one row must rebuild trees and sorted lists.
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
        """Episode in which each level was last drawn, int64 ``[L]``."""
        return self._timestamps[: self._count]

    @property
    def staleness(self) -> np.ndarray:
        """Episodes since each level was last drawn, int64 ``[L]``."""
        return self.episodes - self.timestamps

    def mark(self) -> str:
        """Returns a short text that differs if other levels were drawn, or have a score.

        :meta private:
        """
        drawn = hashlib.sha256(self.generator.get_state().numpy().tobytes()).hexdigest()
        return f"{self.episodes} {self._count} {drawn}"

    def row_of(self, level_id: int) -> int:
        """Returns the row of a level, or -1.

        :meta private:
        """
        return self._rows.get(level_id, REFUSED)

    def place(self, level_id: int, score: float, timestamp: int, capacity: int) -> tuple[int, int | None]:
        """Sets the score of a level begun in episode ``timestamp``. Returns its row (-1: refused), and the evicted."""
        row = self._rows.get(level_id)
        if row is not None:
            # Another actor may have begun the level since this episode did.
            self.put(row, score, max(timestamp, int(self._timestamps[row])))
            return row, None
        row = self._count
        evicted = None
        if row < capacity:
            self.level_ids.append(level_id)
        else:
            row = self.least_probable()
            if not self.scores[row] < score:  # algorithm 2 of the paper: only a better level takes the row
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
        """Sets the score of a row, or adds the next row.

        :meta private:
        """
        is_added = row == self._count
        if is_added:
            self._reserve(row + 1)
            self._count += 1
            self._generations[row] = 0
        elif is_another_level:
            self._generations[row] += 1  # feedback for the level before is dropped
        before = self._timestamps[row]
        self._scores[row] = score
        self._timestamps[row] = timestamp
        if self._is_behind:
            return
        if is_added or before != timestamp:  # equal if the level is scored for its newest episode
            self._sums[row] = timestamp
        self._order.put(row, score, timestamp)

    def rows_of(self, level_ids: Iterable[int]) -> np.ndarray:
        """Returns the row of each level, int64 ``[n]``, -1 for a level without a row.

        :meta private:
        """
        return np.fromiter(map(self._rows.get, level_ids, repeat(REFUSED)), np.int64)

    def rows_among(self, level_ids: Iterable[int]) -> np.ndarray:
        """Returns the rows of the levels among these that have one."""
        rows = self.rows_of(level_ids)
        return rows[rows != REFUSED]

    def place_all(self, level_ids: list[int], rows: np.ndarray, scores: np.ndarray, started: np.ndarray) -> list[int]:
        """Sets scores ``[n]`` of different levels, in further rows if ``rows`` is -1, and returns those levels."""
        is_new = rows == REFUSED
        new = list(itertools.compress(level_ids, is_new))
        added = range(self._count, self._count + len(new))
        rows[is_new] = added
        self.level_ids += new
        self._rows.update(zip(new, added, strict=True))
        started[~is_new] = np.maximum(started[~is_new], self._timestamps[rows[~is_new]])
        self.put_all(rows, scores, started)
        return new

    def defer(self, changes: int) -> None:
        """Lets the next draw rebuild trees and sorted lists, if that is quicker than to change them."""
        self._is_behind |= changes > 1 and 16 * changes > self._count  # a change takes as long as 16 rows of a new tree

    def put_all(self, rows: np.ndarray, scores: np.ndarray, timestamps: np.ndarray) -> None:
        """As :meth:`put` one by one, of different rows. Added rows keep their order."""
        self.defer(len(rows))
        if len(rows) <= 1 or not self._is_behind:
            for row, score, timestamp in zip(rows.tolist(), scores.tolist(), timestamps.tolist(), strict=True):
                self.put(row, score, timestamp)
            return
        count = max(self._count, int(rows.max()) + 1)
        self._reserve(count)
        self._generations[self._count : count] = 0
        self._scores[rows], self._timestamps[rows] = scores, timestamps
        self._count = count

    def _reserve(self, rows: int) -> None:
        if rows > len(self._scores):
            size = max(2 * rows, 64)  # an unbounded set may be large
            self._scores = np.resize(self._scores, size)
            self._timestamps = np.resize(self._timestamps, size)
            self._generations = np.resize(self._generations, size)

    def begin_episode(self, row: int = REFUSED) -> int:
        """Counts an episode, on the level of ``row`` if it has one, which then has staleness 0. Returns its number."""
        self.episodes += 1
        if row != REFUSED:
            self.put(row, float(self._scores[row]), self.episodes)
        return self.episodes

    def clear(self) -> None:
        """Removes all levels. The number of episodes stays."""
        state = self.state_dict()
        self.load_state_dict(state | {key: state[key][:0] for key in ("score", "timestamp", "generation")})
        self.level_ids, self._rows = [], {}

    def remove(self, level_ids: Collection[int]) -> None:
        """Removes the rows of levels. The others keep their order."""
        rows = self.rows_among(level_ids)
        if not len(rows):
            return
        kept = np.delete(np.arange(self._count), rows)
        self._scores = self._scores[kept]
        self._timestamps = self._timestamps[kept]
        self._generations = self._generations[kept]
        self.level_ids = np.delete(self.level_ids, rows).tolist()
        self._rows = {level_id: row for row, level_id in enumerate(self.level_ids)}
        self._count = len(self.level_ids)
        # Trees, and what was drawn, have rows of other levels.
        self._is_behind = True
        self._concentration = ReplayConcentration(self._order)

    def least_probable(self) -> int:
        """Returns the row of least replay probability, and of equal rows, the lowest score.

        :meta private:
        """
        probabilities = self.probabilities()
        least = np.flatnonzero(probabilities == probabilities.min())
        return int(least[np.argmin(self.scores[least])])  # equal scores: the lowest row

    def draw_all(self, count: int, in_flight: Collection[int] = ()) -> np.ndarray:
        """Draws ``count`` different rows, int64 ``[count]``, as one by one, and rows of probability 0 last."""
        least = np.full(self._count, 1e-200)
        least[self.rows_among(in_flight)] = 1e-300  # the very last
        return draw_different(np.maximum(self.probabilities(in_flight), least), count, self.generator)

    def draw(self, in_flight: Collection[int] = ()) -> int:
        """Draws a row. Levels ``in_flight`` are drawn only for their staleness."""
        if self._count == 0:
            raise RuntimeError("no level has a score yet, so none can be replayed; play new levels first")
        self._catch_up()
        # A mixture of two draws: by staleness with this probability, else by score.
        if self.staleness_weight > 0.0 and uniform(self.generator) < self.staleness_weight:
            total = int(self.episodes * self._count - self._sums.total)
            # In integers, without rounding, and uniform while no level is stale.
            drawn = int(torch.randint(total or self._count, (), generator=self.generator, device="cpu"))
            row = self._sums.find_below(self.episodes, self._count, drawn) if total else drawn
        elif in_flight or self.weights is not None:
            # Linear in the number of levels: each set in flight leaves other levels, with other ranks.
            cumulative = np.cumsum(self._by_score(in_flight))
            row = int(np.searchsorted(cumulative, uniform(self.generator) * cumulative[-1], side="right"))
            row = min(row, self._count - 1)
        else:
            row = self._order.draw(self.generator)
        self._concentration.add((row, int(self._generations[row])), self._count)
        return row

    def _catch_up(self) -> None:
        if self._is_behind:
            self._order.fill(self.scores, self.timestamps)
            self._sums.fill([*self.timestamps.tolist()])
            self._is_behind = False

    def _by_score(self, in_flight: Collection[int]) -> np.ndarray:
        rows = self.rows_among(in_flight)
        if not len(rows) or len(rows) == self._count:  # if all levels are in flight, none is left out
            by_score = self._order.probabilities(self.scores, self.timestamps)
        else:
            is_idle = np.ones(self._count, np.bool_)
            is_idle[rows] = False
            by_score = np.zeros(self._count)
            by_score[is_idle] = self._order.probabilities(self.scores[is_idle], self.timestamps[is_idle])
        if self.weights is not None:
            by_score = by_score * self.weights[self.level_ids]
            by_score /= by_score.sum()
        return by_score

    def probabilities(self, in_flight: Collection[int] = ()) -> np.ndarray:
        """Returns the replay probability of each row, float64 ``[L]``. By score, levels ``in_flight`` have none."""
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
        """Metrics to log, empty while no level is stored.

        ``score_mean``, ``score_max``, ``staleness_mean`` in episodes, ``probability_max``, the replay probability of
        the likeliest level, and ``effective_levels``, how many equally likely levels would repeat as often.
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
        """Returns scores, timestamps, and the generator."""
        return {
            "episodes": self.episodes,
            "score": torch.from_numpy(self.scores.copy()),
            "timestamp": torch.from_numpy(self.timestamps.copy()),
            "generation": torch.from_numpy(self._generations[: self._count].copy()),
            "prioritization": {} if self._is_behind else self._order.state_dict(),
            "generator": self.generator.get_state(),
            "dropped": self.dropped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`. Trees are built before the next draw."""
        self.episodes, self.dropped = int(state_dict["episodes"]), int(state_dict["dropped"])
        self._scores = state_dict["score"].cpu().numpy().astype(np.float64)
        self._timestamps = state_dict["timestamp"].cpu().numpy().astype(np.int64)
        self._generations = state_dict["generation"].cpu().numpy().astype(np.int64)
        self._count = len(self._scores)
        # Trees and sorted lists follow from scores and timestamps, and are rebuilt.
        self._is_behind = True
        if state_dict["prioritization"]:
            self._catch_up()
            self._order.load_state_dict(state_dict["prioritization"])
        self.generator.set_state(state_dict["generator"].cpu())

    def stored_levels(self) -> dict[str, Any]:
        """Returns the state of a writer: ids in the order of their rows, and counters.

        :meta private:
        """
        return {
            "level_id": torch.tensor(self.level_ids, dtype=torch.int64, device="cpu"),
            "refused": self.refused,
            "replaced": self.replaced,
        }

    def set_stored_levels(self, state: dict[str, Any]) -> None:
        """Restores :meth:`stored_levels`.

        :meta private:
        """
        self.level_ids = state["level_id"].tolist()
        self._rows = {level_id: row for row, level_id in enumerate(self.level_ids)}
        self.refused, self.replaced = int(state["refused"]), int(state["replaced"])


def different_places(count: int, drawn: int, generator: torch.Generator) -> list[int]:
    """Draws ``drawn`` different numbers below ``count`` uniformly."""
    if 8 * drawn > count:
        return torch.randperm(count, generator=generator, device="cpu")[:drawn].tolist()
    found: dict[int, None] = {}
    while len(found) < drawn:
        more = torch.randint(count, (drawn - len(found),), generator=generator, device="cpu").tolist()
        found.update(dict.fromkeys(more))
    return list(found)


def draw_different(weights: np.ndarray, count: int, generator: torch.Generator) -> np.ndarray:
    """Draws ``count`` different places in proportion to weights above 0, as one by one from the places left."""
    # The first of exponential waiting times come in that order (Efraimidis and Spirakis 2006, "Weighted random
    # sampling with a reservoir").
    times = torch.empty(len(weights), dtype=torch.float64, device="cpu").exponential_(generator=generator).numpy()
    times /= weights
    first = np.argpartition(times, count - 1)[:count]
    return first[np.argsort(times[first])]
