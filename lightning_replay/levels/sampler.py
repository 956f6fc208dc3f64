# SPDX-License-Identifier: Apache-2.0
"""Draws stored levels by the rank of their scores and by how long ago they were played."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.levels.concentration import ReplayConcentration, effective_number
from lightning_replay.levels.prioritization import Prioritization, Rank
from lightning_replay.levels.rng import fraction, seeded_generator
from lightning_replay.levels.sum_tree import StalenessTree
from lightning_replay.saving import load_state, write_state
from lightning_replay.validation import checked_share

__all__ = ["LevelSampler"]


class LevelSampler(Sampler):
    """Draws level i with probability ``(1 - staleness_weight) P_S(i) + staleness_weight P_C(i)``.

    P_S comes from the scores, P_C is proportional to the staleness: the episodes since the level was last drawn. Each
    drawn level counts as one more episode and is fresh again. Give the same sampler to the buffer and to its
    :class:`~lightning_replay.levels.LevelWriter`, which tells it the scores of what it stores. Give a drawn level its
    new score by its id: set ``score`` of the batch and ``extend`` the buffer with its ``level_id``, ``score`` and
    ``timestamp``. Scores may be negative.

    Jiang et al. 2021, "Prioritized Level Replay", equations 2 to 4, https://arxiv.org/abs/2010.03934. Names:
    ``score_temperature`` is β, ``staleness_weight`` ρ.

    Args:
        prioritization: how scores become probabilities: ``Rank()`` if absent, ``Proportional()``, ``Greedy()``,
            ``Boltzmann()``.
        score_temperature: flattens the distribution of scores; above 0. With ``Rank()`` at 0.1, the paper's, the level
            of the highest score has 99.9 % of P_S, at 1 about 15 % among 400 levels.
        staleness_weight: share of probability given to staleness, in [0, 1].
        seed: of the sampler's own generator, whose state is part of :meth:`state_dict`; ``None`` seeds it from torch's
            global generator.

    Sampled keys:
        index: int64 ``[B]``.
        score: float64 ``[B]``.
        staleness: int64 ``[B]``, before the draw.
        timestamp: int64 ``[B]``, number of the episode that each level was drawn for.
        generation: int64 ``[B]``, how many levels each row had before.

    Raises:
        TypeError: a temperature, a weight or a seed that is no number, another prioritization.
        ValueError: a temperature or a weight out of its range.

    Warns:
        UserWarning: once, where of 1,000 replays more than one in five took the same level as the replay before, as if
            fewer than 5 levels were drawn, although 20 or more have a score. Never with ``Greedy``.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from lightning_replay.levels import LevelWriter
        >>> sampler = LevelSampler(staleness_weight=0.0, seed=0)
        >>> levels = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(2), sampler=sampler, writer=LevelWriter(sampler), batch_size=1)
        >>> levels.extend(TensorDict({"level_id": [7, 8, 9], "score": [0.5, 0.4, 0.3]}, [3])).tolist()
        [0, 1, -1]
        >>> levels.sample()["level_id"].item()
        7
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
        checked_share("staleness_weight", staleness_weight)
        self.staleness_weight = staleness_weight
        self.generator = seeded_generator(seed)
        self.episodes = 0
        self._order = (prioritization or Rank()).bind(score_temperature)
        self._staleness = StalenessTree()
        self._concentration = ReplayConcentration(self._order)
        self._scores = np.zeros(0)
        self._timestamps = np.zeros(0, np.int64)
        self._generations = np.zeros(0, np.int64)
        self._count = 0
        self.dropped = 0

    def __len__(self) -> int:
        """Levels that can be drawn."""
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
        """Called by the writer: a level has a new score, a row another level, or the next row its first.

        Args:
            row: at most :func:`len`.
            score: of the level, finite.
            timestamp: episode at which it was last played.
            is_another_level: than the row had before.
        """
        if row == self._count:
            self._make_room()
            self._count += 1
            self._generations[row] = 0
        elif is_another_level:
            self._generations[row] += 1
        self._scores[row], self._timestamps[row] = score, timestamp
        self._order.put(row, score, timestamp)
        self._staleness.put(row, timestamp)

    def touch(self, row: int) -> None:
        """The level of a row is played in the episode that began last."""
        self.put(row, float(self._scores[row]), self.episodes)

    def begin_episode(self) -> int:
        """One more episode of any level: all levels are one episode older; its number."""
        self.episodes += 1
        return self.episodes

    def draw(self) -> int:
        """A row by its replay probability; no level changes.

        Raises:
            RuntimeError: no level is stored.
        """
        if self._count == 0:
            raise RuntimeError("no level has a score yet, so none can be replayed; play new levels first")
        row = self._draw()
        self._concentration.add((row, int(self._generations[row])), self._count)
        return row

    def _draw(self) -> int:
        if self.staleness_weight > 0.0 and fraction(self.generator) < self.staleness_weight:
            total = self._staleness.total(self.episodes)
            if total == 0:
                return int(torch.randint(self._count, (), generator=self.generator))
            return self._staleness.find(self.episodes, int(torch.randint(total, (), generator=self.generator)))
        return self._order.draw(self.generator)

    def probabilities(self) -> np.ndarray:
        """Replay probability of each row, float64 ``[L]``."""
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
        """Figures for a log: means and maximum over the levels, and how broad the replay distribution is.

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
        """The row of the least replay probability; of equal ones that of the lowest score, then the lowest row."""
        probabilities = self.probabilities()
        least = np.flatnonzero(probabilities == probabilities.min())
        return int(least[np.argmin(self.scores[least])])

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws levels for ``batch_size`` episodes, one after another.

        Returns:
            Rows, int64 ``[B]``, and the scores and staleness they were drawn with.

        Raises:
            RuntimeError: no level is stored.
        """
        rows, staleness, episodes = [], [], []
        for _ in range(batch_size):
            row = self.draw()
            rows.append(row)
            staleness.append(self.episodes - int(self._timestamps[row]))
            episodes.append(self.begin_episode())
            self.touch(row)
        information = {
            "score": torch.from_numpy(self._scores[rows]),
            "staleness": torch.tensor(staleness),
            "timestamp": torch.tensor(episodes),
            "generation": torch.from_numpy(self._generations[rows]),
        }
        return torch.tensor(rows), information

    def extend(self, index: Any) -> None:
        """Called by the buffer after its writer, which has told the scores already.

        Raises:
            RuntimeError: a row without a score, because the writer is not a ``LevelWriter`` of this sampler.
        """
        newest = int(torch.as_tensor(index).max()) if len(index) else -1
        if newest >= self._count:
            raise RuntimeError(
                f"row {newest} was stored without a score; the buffer's writer must be LevelWriter(sampler) with this "
                "very sampler"
            )

    def add(self, index: int) -> None:
        """Called by the buffer after its writer; see :meth:`extend`."""
        self.extend([index])

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Ignored: a changed row keeps its score."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, generation: Any = None
    ) -> None:
        """New scores of the levels that rows hold, whose staleness stays.

        A row may have another level by now: give ``generation`` too, or scores by id with ``extend``.

        Args:
            index: rows ``[N]``; rows below 0, those of refused levels, are passed over.
            priority: scores ``[N]``, finite, of any sign.
            storage: ignored.
            generation: of the rows when they were drawn, ``[N]``; scores of levels that left since are dropped and
                counted as :attr:`dropped`.

        Raises:
            ValueError: scores of another number, NaN or infinite; nothing is changed.
            IndexError: a row that holds no level.
        """
        rows: Sequence[int] = torch.as_tensor(index).reshape(-1).tolist()
        scores = torch.as_tensor(priority, dtype=torch.float64).reshape(-1).tolist()
        if len(rows) != len(scores) or not all(map(math.isfinite, scores)):
            raise ValueError(f"{len(rows)} rows got the scores {scores}; give one finite score per row")
        if rows and max(rows) >= self._count:
            raise IndexError(f"row {max(rows)} holds no level; {self._count} do")
        drawn = None if generation is None else torch.as_tensor(generation).reshape(-1).tolist()
        for n, (row, score) in enumerate(zip(rows, scores, strict=True)):
            if row >= 0 and drawn is not None and drawn[n] != self._generations[row]:
                self.dropped += 1
            elif row >= 0:
                self.put(row, score, int(self._timestamps[row]))

    def state_dict(self) -> dict[str, Any]:
        """Scores, timestamps, clock and generator."""
        return {
            "episodes": self.episodes,
            "score": torch.from_numpy(self.scores.copy()),
            "timestamp": torch.from_numpy(self.timestamps.copy()),
            "generation": torch.from_numpy(self._generations[: self._count].copy()),
            "dropped": self.dropped,
            "prioritization": self._order.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the draws where :meth:`state_dict` was read."""
        self.episodes = int(state_dict["episodes"])
        self._scores = state_dict["score"].cpu().numpy().astype(np.float64)
        self._timestamps = state_dict["timestamp"].cpu().numpy().astype(np.int64)
        self._generations = state_dict["generation"].cpu().numpy().astype(np.int64)
        self.dropped = int(state_dict["dropped"])
        self._count = len(self._scores)
        self._order.fill(self._scores, self._timestamps)
        self._order.load_state_dict(state_dict.get("prioritization", {}))  # early saves have none
        self._staleness.fill(self._timestamps.tolist())
        self.generator.set_state(state_dict["generator"].cpu())

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into the directory ``path``."""
        write_state(path, self.state_dict(), of=type(self).__name__)

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        load_state(path, self.load_state_dict)

    def _empty(self) -> None:
        """Called by the buffer's ``empty``: forgets all levels, not the clock."""
        state = self.state_dict()
        self.load_state_dict(state | {key: state[key][:0] for key in ("score", "timestamp", "generation")})

    def _make_room(self) -> None:
        if self._count == len(self._scores):
            room = max(2 * self._count, 64)
            self._scores = np.resize(self._scores, room)
            self._timestamps = np.resize(self._timestamps, room)
            self._generations = np.resize(self._generations, room)
