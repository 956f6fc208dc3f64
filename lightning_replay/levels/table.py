# SPDX-License-Identifier: Apache-2.0
"""Scores and staleness of levels, draws by both, and the TorchRL sampler and writer over them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage, TensorDictRoundRobinWriter

from lightning_replay.levels.prioritization import Prioritization, Rank, ReplayConcentration, SumTree, effective_number
from lightning_replay.options import check_kind, checked_share
from lightning_replay.parts import BufferHooks, PartHooks
from lightning_replay.state import seeded_generator, uniform
from lightning_replay.torchrl_compat import attached_buffers

__all__ = ["LevelSampler", "LevelWriter"]
REFUSED = -1


class LevelTable:
    """Ids, scores and timestamps of the levels that have a score, one level a row; see :class:`LevelSampler`."""

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
        """Sets the score of a level begun in episode ``timestamp``; returns its row (-1: refused), and the evicted."""
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
        """Returns the rows of those of the levels that have one."""
        rows = self.rows_of(level_ids)
        return rows[rows != REFUSED]

    def place_all(self, level_ids: list[int], rows: np.ndarray, scores: np.ndarray, started: np.ndarray) -> list[int]:
        """Sets scores ``[n]`` of different levels, in further rows where ``rows`` is -1; returns those levels."""
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
        """As :meth:`put` one by one, of different rows, those that are added in their order."""
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
        """Counts an episode, on the level of ``row`` if it has one, which then has staleness 0; returns its number."""
        self.episodes += 1
        if row != REFUSED:
            self.put(row, float(self._scores[row]), self.episodes)
        return self.episodes

    def clear(self) -> None:
        """Removes all levels; the number of episodes stays."""
        state = self.state_dict()
        self.load_state_dict(state | {key: state[key][:0] for key in ("score", "timestamp", "generation")})
        self.level_ids, self._rows = [], {}

    def remove(self, level_ids: Collection[int]) -> None:
        """Removes the rows of levels; the others keep their order."""
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
        """Returns the row of least replay probability; of equal rows, the lowest score.

        :meta private:
        """
        probabilities = self.probabilities()
        least = np.flatnonzero(probabilities == probabilities.min())
        return int(least[np.argmin(self.scores[least])])  # equal scores: the lowest row

    def draw_all(self, count: int, in_flight: Collection[int] = ()) -> np.ndarray:
        """Draws ``count`` different rows, int64 ``[count]``, as one by one, and those of probability 0 last."""
        least = np.full(self._count, 1e-200)
        least[self.rows_among(in_flight)] = 1e-300  # the very last
        return draw_different(np.maximum(self.probabilities(in_flight), least), count, self.generator)

    def draw(self, in_flight: Collection[int] = ()) -> int:
        """Draws a row; levels ``in_flight`` are drawn only for their staleness."""
        if self._count == 0:
            raise RuntimeError("no level has a score yet, so none can be replayed; play new levels first")
        self._catch_up()
        # A mixture of two draws: by staleness with this probability, else by score.
        if self.staleness_weight > 0.0 and uniform(self.generator) < self.staleness_weight:
            total = int(self.episodes * self._count - self._sums.total)
            # In integers, without rounding; uniform while no level is stale.
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
        """Returns the replay probability of each row, float64 ``[L]``; by score levels ``in_flight`` have none."""
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
        """Restores :meth:`state_dict`; trees are built before the next draw."""
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
    """Draws ``count`` different places in proportion to weights above 0, as one by one from those that are left."""
    # The first of exponential waiting times come in that order (Efraimidis and Spirakis 2006, "Weighted random
    # sampling with a reservoir").
    times = torch.empty(len(weights), dtype=torch.float64, device="cpu").exponential_(generator=generator).numpy()
    times /= weights
    first = np.argpartition(times, count - 1)[:count]
    return first[np.argsort(times[first])]


class LevelSampler(LevelTable, PartHooks, Sampler):
    """Draws level i with probability ``(1 - staleness_weight) P_S(i) + staleness_weight P_C(i)``.

    P_S comes from the scores, which may be negative; P_C is proportional to the staleness: the number of episodes since
    the level was last drawn. Each drawn level counts as one episode and then has staleness 0. Give the same sampler to
    the buffer and to its :class:`~lightning_replay.levels.LevelWriter`. To update the score of a drawn level, set
    ``score`` of the batch and ``extend`` the buffer with its ``level_id``, ``score`` and ``timestamp``.

    Jiang et al. 2021, "Prioritized Level Replay", equations 2 to 4, https://arxiv.org/abs/2010.03934. Names:
    ``score_temperature`` is β, ``staleness_weight`` ρ.

    Args:
        prioritization: how scores become probabilities: ``Rank()`` if absent, ``Proportional()``, ``Greedy()``,
            ``Boltzmann()``.
        score_temperature: flattens the distribution of scores; above 0. With ``Rank()`` at 0.1, the paper's, the level
            of the highest score has 99.9 % of P_S, at 1 about 15 % among 400 levels.
        staleness_weight: share of probability given to staleness, in [0, 1].
        seed: Seed for the generator, whose state is part of :meth:`state_dict`; ``None`` seeds it from torch's
            global generator.

    Sampled keys:
        index: int64 ``[B]``.
        score: float64 ``[B]``.
        staleness: int64 ``[B]``, before the draw.
        timestamp: int64 ``[B]``, number of the episode that each level was drawn for.
        generation: int64 ``[B]``, number of levels each row held before.

    Raises:
        TypeError: an option of another kind.
        ValueError: a temperature that is not above 0, or a share outside of [0, 1].
        RuntimeError: at the draw, while no level has a score.

    Warns:
        UserWarning: once, if of 1,000 replays more than one in five repeat the level of the replay before, as if fewer
            than 5 levels were drawn, although 20 or more have a score. Never with ``Greedy``.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from lightning_replay.levels import LevelWriter
        >>> sampler = LevelSampler(score_temperature=0.1, staleness_weight=0.0, seed=0)
        >>> levels = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(2), sampler=sampler, writer=LevelWriter(sampler), batch_size=1)
        >>> levels.extend(TensorDict({"level_id": [7, 8, 9], "score": [0.5, 0.4, 0.3]}, [3])).tolist()
        [0, 1, -1]
        >>> levels.sample()["level_id"].item()
        7
    """

    dropped: int  # declared again, since pyright reads the assignment below as another attribute of TorchRL's Sampler

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws levels for ``batch_size`` episodes, one after another; returns rows ``[B]`` and the sampled keys."""
        rows, staleness, episodes = [], [], []
        for _ in range(batch_size):
            row = self.draw()
            rows.append(row)
            staleness.append(self.episodes - int(self._timestamps[row]))
            episodes.append(self.begin_episode(row))
        information = {
            "score": torch.from_numpy(self._scores[rows]),
            "staleness": torch.tensor(staleness, device="cpu"),
            "timestamp": torch.tensor(episodes, device="cpu"),
            "generation": torch.from_numpy(self._generations[rows]),
        }
        return torch.tensor(rows, device="cpu"), information

    def extend(self, index: Any) -> None:
        """Checks that the writer, a ``LevelWriter`` of this sampler, has set the scores of stored rows."""
        newest = int(torch.as_tensor(index, device="cpu").max()) if len(index) else -1
        if newest >= self._count:
            raise RuntimeError(f"row {newest} was stored without a score; the writer must be LevelWriter(sampler)")

    def add(self, index: int) -> None:
        """Checks one stored row, see :meth:`extend`."""
        self.extend([index])

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Does nothing: a changed row keeps its score."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, generation: Any = None
    ) -> None:
        """Sets the scores of the levels that rows hold; their staleness is unchanged.

        Args:
            index: Rows ``[N]``; rows below 0, of refused levels, are skipped.
            priority: Scores ``[N]``, finite, of any sign.
            storage: ignored.
            generation: Generations ``[N]`` of the drawn rows. Scores of levels evicted since are dropped and
                counted in ``dropped``. Without it a score may go to another level that took the row.
        """
        rows: Sequence[int] = torch.as_tensor(index, device="cpu").reshape(-1).tolist()
        scores = torch.as_tensor(priority, dtype=torch.float64, device="cpu").reshape(-1).tolist()
        if len(rows) != len(scores) or not all(map(math.isfinite, scores)):
            raise ValueError(f"{len(rows)} rows got the scores {scores}; give one finite score per row")
        if rows and max(rows) >= self._count:
            raise IndexError(f"row {max(rows)} holds no level; {self._count} do")
        drawn = None if generation is None else torch.as_tensor(generation, device="cpu").reshape(-1).tolist()
        for n, (row, score) in enumerate(zip(rows, scores, strict=True)):
            if row >= 0 and drawn is not None and drawn[n] != self._generations[row]:
                self.dropped += 1
            elif row >= 0:
                self.put(row, score, int(self._timestamps[row]))

    def _empty(self) -> None:
        self.clear()


class LevelWriter(PartHooks, TensorDictRoundRobinWriter):
    """Stores levels with their scores; a stored level gets its new score in the row it has.

    A new level takes a free row. In a full storage it replaces the level of least replay probability if that level's
    score is lower than its own; otherwise it is refused, and its row is -1.

    Algorithm 2 of Jiang et al. 2021, "Prioritized Level Replay", appendix, https://arxiv.org/abs/2010.03934.

    Args:
        sampler: Sampler of the same buffer, which has the scores.

    ``extend`` takes rows, ``TensorDict [N]``, in the order in which the episodes ended. Further columns are stored
    unchanged; later rows must have the same keys, shapes and dtypes.

    Stored keys:
        level_id: int64 ``[N]``, not negative.
        score: floating ``[N]``, finite.
        timestamp: int64 ``[N]``, number of the episode in which the level was begun, at most the sampler's
            ``episodes``; absent, each row is one more episode.

    Raises:
        ValueError: in ``extend``, ids, scores or timestamps that are missing, negative, NaN or of another shape, and
            data that does not fit what is stored. Nothing is stored then.
    """

    def __init__(self, sampler: LevelSampler) -> None:
        super().__init__()
        check_kind("sampler", sampler, LevelSampler, "the LevelSampler of the same buffer")
        self.sampler = sampler

    def register_storage(self, storage: Storage) -> None:
        """Attaches a storage; that of a ``Replay``, whose feedback is TD errors and no scores, is a ``TypeError``.

        :meta private:
        """
        if any(isinstance(buffer, BufferHooks) for buffer in attached_buffers(storage)):
            raise TypeError(
                "LevelSampler and LevelWriter keep scores of levels, and a Replay returns TD errors of rows; use "
                "torchrl.data.TensorDictReplayBuffer(storage=..., sampler=..., writer=...), or a LevelBuffer"
            )
        super().register_storage(storage)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Stores levels ``[N]``, one after another, and returns the row of each, int64 ``[N]``, -1 if not stored."""
        level_ids = _column(data, "level_id", is_whole=True)
        scores = _column(data, "score", is_whole=False)
        timestamps = None if data.get("timestamp", None) is None else _column(data, "timestamp", is_whole=True)
        if level_ids and min(level_ids) < 0:
            raise ValueError(f"level ids must not be negative; got {min(level_ids)}")
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"scores must be finite; got {next(one for one in scores if not math.isfinite(one))}")
        if timestamps and not 0 <= min(timestamps) <= max(timestamps) <= self.sampler.episodes:
            raise ValueError(f"timestamps are {timestamps}; give numbers of episodes, 0 to {self.sampler.episodes}")
        stored = data.select(*(key for key in sorted(data.keys()) if key not in ("score", "timestamp")))
        if len(self._storage) and len(data):
            _check_fits(self._storage.get(0), stored[0])
        newest: dict[int, int] = {}
        placed = []
        for n, (level_id, score) in enumerate(zip(level_ids, scores, strict=True)):
            episode = self.sampler.begin_episode() if timestamps is None else timestamps[n]
            placed.append(self.sampler.place(level_id, score, episode, int(self._storage.max_size))[0])
            newest[placed[n]] = n
        newest.pop(REFUSED, None)
        if newest:  # one write: of a row that was placed twice the later level
            rows, positions = torch.tensor(sorted(newest.items()), device="cpu").unbind(-1)
            self._storage.set(rows, stored[positions])
        # A level placed first may have been evicted by a later one.
        index = [row if self.sampler.row_of(level_ids[n]) == row else REFUSED for n, row in enumerate(placed)]
        return torch.tensor(index, dtype=torch.int64, device="cpu")

    def add(self, data: TensorDictBase) -> int:
        """Stores one level and returns its row, or -1."""
        return int(self.extend(data.unsqueeze(0)))

    def state_dict(self) -> dict[str, Any]:
        """Ids in the order of their rows, and counters."""
        return self.sampler.stored_levels()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; refuses more levels than the storage has rows by a ``ValueError``."""
        count = len(state_dict["level_id"])
        if count > self._storage.max_size:
            raise ValueError(f"{count} levels are saved; the storage keeps {self._storage.max_size}")
        self.sampler.set_stored_levels(state_dict)

    def _empty(self, empty_write_count: bool = True) -> None:
        self.sampler.set_stored_levels(
            self.state_dict() | {"level_id": torch.zeros(0, dtype=torch.int64, device="cpu")}
        )


def _column(data: TensorDictBase, key: str, *, is_whole: bool) -> list[Any]:
    column = data.get(key, None)
    if column is None or column.numel() != data.shape[0] or (is_whole and column.is_floating_point()):
        found = "no" if column is None else f"a {column.dtype} {list(column.shape)}"
        accepted = "one whole number each, int64 [N]" if is_whole else "one number each, floating [N]"
        raise ValueError(f"rows of shape {list(data.shape)} have {found} {key!r}; give {accepted}")
    return list(column.reshape(-1).tolist())


def _check_fits(stored: TensorDictBase, given: TensorDictBase) -> None:
    before, now = (  # but for the buffer's own index
        {key: f"shape {list(leaf.shape)}, {leaf.dtype}" for key, leaf in row.items(True, True) if key != "index"}
        for row in (stored, given)
    )
    for key in sorted({*before, *now}, key=str):
        if before.get(key) != now.get(key):
            raise ValueError(
                f"levels are stored with {key!r} of {before.get(key, 'nothing')}, got {now.get(key, 'nothing')}; give "
                "the same keys, shapes and dtypes each time"
            )
