# SPDX-License-Identifier: Apache-2.0
"""Keeps the levels most worth replaying: when the storage is full, the one of the least replay probability leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter

from lightning_replay.levels.level_sampler import LevelSampler
from lightning_replay.state_files import read_state, write_state

__all__ = ["REFUSED", "LevelWriter"]

REFUSED = -1


class LevelWriter(TensorDictRoundRobinWriter):
    """Stores levels with their scores. A level is known by its id: a known one gets its new score in the row it has.

    A new level takes a free row. In a full storage it replaces the level of the least replay probability, if that
    one's score is lower than its own; otherwise it is refused, and its row is -1.

    Algorithm 2 of Jiang et al. 2021, "Prioritized Level Replay", appendix, https://arxiv.org/abs/2010.03934.

    Args:
        sampler: of the same buffer; it knows the replay probabilities.

    Rows given to ``extend``, ``TensorDict [N]``, in the order in which the episodes ended:
        level_id: int64 ``[N]``, not negative.
        score: floating ``[N]``, finite.
        timestamp: int64 ``[N]``, the sampler's ``episodes`` when the level was begun; absent, each row is one more
            episode.
        Everything else is stored as it is.

    Raises:
        ValueError: in ``extend``, ids or scores that are missing, negative, NaN or of another shape. Nothing is stored.
    """

    def __init__(self, sampler: LevelSampler) -> None:
        super().__init__()
        if not isinstance(sampler, LevelSampler):
            raise TypeError(f"sampler is a {type(sampler).__name__}; give the LevelSampler of the same buffer")
        self.sampler = sampler
        self.level_ids: list[int] = []
        self.refused = 0
        self.replaced = 0
        self._rows: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Most levels that are stored."""
        return int(self._storage.max_size)

    def row_of(self, level_id: int) -> int:
        """The row of a stored level, -1 of others."""
        return self._rows.get(level_id, REFUSED)

    def place(self, level_id: int, score: float, timestamp: int) -> int:
        """Gives a level its score, and a row if it has none and may have one; the storage is not written.

        Args:
            level_id: not negative.
            score: finite.
            timestamp: episode in which the level was begun.

        Returns:
            The row, or -1.
        """
        row = self._rows.get(level_id)
        if row is not None:
            self.sampler.put(row, score, max(timestamp, int(self.sampler.timestamps[row])))
            return row
        row = len(self.level_ids)
        if row < self.capacity:
            self.level_ids.append(level_id)
        else:
            row = self.sampler.least_probable()
            if not self.sampler.scores[row] < score:
                self.refused += 1
                return REFUSED
            self.replaced += 1
            del self._rows[self.level_ids[row]]
            self.level_ids[row] = level_id
        self._rows[level_id] = row
        self.sampler.put(row, score, timestamp)
        return row

    def extend(self, data: TensorDictBase) -> Tensor:
        """Stores levels ``[N]``, one after another.

        Returns:
            Row of each level that is stored afterwards, and -1 for the others, int64 ``[N]``.

        Raises:
            ValueError: see the class.
        """
        level_ids, scores = _levels(data), _scores(data)
        given = data.get("timestamp", None)
        timestamps = None if given is None else given.reshape(-1).tolist()
        newest: dict[int, int] = {}
        placed = []
        for n, (level_id, score) in enumerate(zip(level_ids, scores, strict=True)):
            episode = self.sampler.begin_episode() if timestamps is None else timestamps[n]
            placed.append(self.place(level_id, score, episode))
            newest[placed[n]] = n
        newest.pop(REFUSED, None)
        if newest:
            rows, positions = torch.tensor(sorted(newest.items())).unbind(-1)
            self._storage.set(rows, data.select(*self._stored_keys(data))[positions])
        index = [row if self.row_of(level_ids[n]) == row else REFUSED for n, row in enumerate(placed)]
        return torch.tensor(index)

    def add(self, data: Any) -> int:
        """Stores one level; its row, or -1."""
        return int(self.extend(data.unsqueeze(0)))

    def state_dict(self) -> dict[str, Any]:
        """Ids in the order of their rows, and counters."""
        return {
            "level_id": torch.tensor(self.level_ids, dtype=torch.int64),
            "refused": self.refused,
            "replaced": self.replaced,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.level_ids = state_dict["level_id"].tolist()
        self._rows = {level_id: row for row, level_id in enumerate(self.level_ids)}
        self.refused, self.replaced = int(state_dict["refused"]), int(state_dict["replaced"])

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into the directory ``path``."""
        write_state(path, self.state_dict())

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        self.load_state_dict(read_state(path))

    def _empty(self, empty_write_count: bool = True) -> None:
        """Called by the buffer's ``empty``."""
        self.level_ids.clear()
        self._rows.clear()

    def _stored_keys(self, data: TensorDictBase) -> list[Any]:
        """All but those the sampler keeps."""
        return [key for key in sorted(data.keys()) if key not in ("score", "timestamp")]


def _levels(data: TensorDictBase) -> list[int]:
    level_id = data.get("level_id", None)
    if level_id is None or level_id.numel() != data.shape[0] or level_id.is_floating_point():
        raise ValueError(
            f"rows {sorted(map(str, data.keys()))} of shape {list(data.shape)} have no 'level_id' of one whole number "
            "each; give int64 [N]"
        )
    ids: list[int] = level_id.reshape(-1).tolist()
    if ids and min(ids) < 0:
        raise ValueError(f"level ids must not be negative; got {min(ids)}")
    return ids


def _scores(data: TensorDictBase) -> list[float]:
    score = data.get("score", None)
    if score is None or score.numel() != data.shape[0]:
        raise ValueError(f"rows of shape {list(data.shape)} need a 'score' each, floating [N]")
    scores: list[float] = score.reshape(-1).to(torch.float64).tolist()
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"scores must be finite; got {next(one for one in scores if not math.isfinite(one))}")
    return scores
