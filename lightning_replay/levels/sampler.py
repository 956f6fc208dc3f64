# SPDX-License-Identifier: Apache-2.0
"""Draws stored levels by their scores and staleness, as a TorchRL sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.levels.table import LevelTable
from lightning_replay.saving import load_state, write_state

__all__ = ["LevelSampler"]


class LevelSampler(LevelTable, Sampler):
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
        seed: of the sampler's own generator, whose state is part of :meth:`state_dict`; ``None`` seeds it from torch's
            global generator.

    Sampled keys:
        index: int64 ``[B]``.
        score: float64 ``[B]``.
        staleness: int64 ``[B]``, before the draw.
        timestamp: int64 ``[B]``, number of the episode that each level was drawn for.
        generation: int64 ``[B]``, number of levels each row held before.

    Raises:
        TypeError: a temperature, a weight or a seed that is not a number, or another prioritization.
        ValueError: a temperature or a weight out of its range.

    Warns:
        UserWarning: once, if of 1,000 replays more than one in five repeat the level of the replay before, as if fewer
            than 5 levels were drawn, although 20 or more have a score. Never with ``Greedy``.

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

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws levels for ``batch_size`` episodes, one after another; returns rows ``[B]`` and the sampled keys.

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
            "staleness": torch.tensor(staleness, device="cpu"),
            "timestamp": torch.tensor(episodes, device="cpu"),
            "generation": torch.from_numpy(self._generations[rows]),
        }
        return torch.tensor(rows, device="cpu"), information

    def extend(self, index: Any) -> None:
        """Checks that the writer has set the scores of stored rows.

        Raises:
            RuntimeError: a row without a score, because the writer is not a ``LevelWriter`` of this sampler.
        """
        newest = int(torch.as_tensor(index, device="cpu").max()) if len(index) else -1
        if newest >= self._count:
            raise RuntimeError(
                f"row {newest} was stored without a score; the buffer's writer must be LevelWriter(sampler) with this "
                "very sampler"
            )

    def add(self, index: int) -> None:
        self.extend([index])

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Does nothing: a changed row keeps its score."""

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, generation: Any = None
    ) -> None:
        """Sets the scores of the levels that rows hold; their staleness is unchanged.

        Args:
            index: rows ``[N]``; rows below 0, those of refused levels, are skipped.
            priority: scores ``[N]``, finite, of any sign.
            storage: ignored.
            generation: of the rows when they were drawn, ``[N]``; scores of levels evicted since are dropped and
                counted in ``dropped``. Without it a score may go to another level that took the row.

        Raises:
            ValueError: scores of another number, NaN or infinite; nothing is changed.
            IndexError: a row that holds no level.
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

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into the directory ``path``."""
        write_state(path, self.state_dict(), of=type(self).__name__)

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        load_state(path, self.load_state_dict)

    def _empty(self) -> None:
        state = self.state_dict()
        self.load_state_dict(state | {key: state[key][:0] for key in ("score", "timestamp", "generation")})
