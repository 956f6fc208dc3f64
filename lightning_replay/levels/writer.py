# SPDX-License-Identifier: Apache-2.0
"""Stores levels by their ids; a full storage evicts the level of least replay probability."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter

from lightning_replay.levels.sampler import LevelSampler
from lightning_replay.levels.table import REFUSED
from lightning_replay.saving import load_state, write_state

__all__ = ["LevelWriter"]


class LevelWriter(TensorDictRoundRobinWriter):
    """Stores levels with their scores; a stored level gets its new score in the row it has.

    A new level takes a free row. In a full storage it replaces the level of least replay probability if that level's
    score is lower than its own; otherwise it is refused, and its row is -1.

    Algorithm 2 of Jiang et al. 2021, "Prioritized Level Replay", appendix, https://arxiv.org/abs/2010.03934.

    Args:
        sampler: of the same buffer; it holds the scores.

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
        if not isinstance(sampler, LevelSampler):
            raise TypeError(f"sampler is a {type(sampler).__name__}; give the LevelSampler of the same buffer")
        self.sampler = sampler

    @property
    def capacity(self) -> int:
        """Most levels stored."""
        return int(self._storage.max_size)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Stores levels ``[N]``, one after another; see the class.

        Returns:
            Row of each level that is stored afterwards, and -1 for the others, int64 ``[N]``.
        """
        level_ids, scores = _column(data, "level_id", is_whole=True), _column(data, "score", is_whole=False)
        timestamps = None if data.get("timestamp", None) is None else _column(data, "timestamp", is_whole=True)
        if level_ids and min(level_ids) < 0:
            raise ValueError(f"level ids must not be negative; got {min(level_ids)}")
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"scores must be finite; got {next(one for one in scores if not math.isfinite(one))}")
        if timestamps and not 0 <= min(timestamps) <= max(timestamps) <= self.sampler.episodes:
            raise ValueError(
                f"timestamps are {min(timestamps)} to {max(timestamps)}; they are numbers of started episodes, 0 to "
                f"{self.sampler.episodes}"
            )
        stored = data.select(*(key for key in sorted(data.keys()) if key not in ("score", "timestamp")))
        if len(self._storage) and len(data):
            _check_fits(self._storage.get(0), stored[0])
        newest: dict[int, int] = {}
        placed = []
        for n, (level_id, score) in enumerate(zip(level_ids, scores, strict=True)):
            episode = self.sampler.begin_episode() if timestamps is None else timestamps[n]
            placed.append(self.sampler.place(level_id, score, episode, self.capacity)[0])
            newest[placed[n]] = n
        newest.pop(REFUSED, None)
        if newest:
            rows, positions = torch.tensor(sorted(newest.items()), device="cpu").unbind(-1)
            self._storage.set(rows, stored[positions])
        index = [row if self.sampler.row_of(level_ids[n]) == row else REFUSED for n, row in enumerate(placed)]
        return torch.tensor(index, dtype=torch.int64, device="cpu")

    def add(self, data: Any) -> int:
        """Stores one level and returns its row, or -1."""
        return int(self.extend(data.unsqueeze(0)))

    def state_dict(self) -> dict[str, Any]:
        """Ids in the order of their rows, and counters."""
        return self.sampler.stored_levels()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; refuses more levels than the storage has rows by a ``ValueError``."""
        if len(state_dict["level_id"]) > self.capacity:
            raise ValueError(f"{len(state_dict['level_id'])} levels are saved; the storage keeps {self.capacity}")
        self.sampler.set_stored_levels(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Writes :meth:`state_dict` into the directory ``path``."""
        write_state(path, self.state_dict(), of=type(self).__name__)

    def loads(self, path: str | Path) -> None:
        """Reads what :meth:`dumps` wrote."""
        load_state(path, self.load_state_dict)

    def _empty(self, empty_write_count: bool = True) -> None:
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.sampler.set_stored_levels(self.state_dict() | {"level_id": none})


def _column(data: TensorDictBase, key: str, *, is_whole: bool) -> list[Any]:
    column = data.get(key, None)
    if column is None or column.numel() != data.shape[0] or (is_whole and column.is_floating_point()):
        found = "no" if column is None else f"a {column.dtype} {list(column.shape)}"
        accepted = "one whole number each, int64 [N]" if is_whole else "one number each, floating [N]"
        raise ValueError(f"rows of shape {list(data.shape)} have {found} {key!r}; give {accepted}")
    values: list[Any] = column.reshape(-1).tolist()
    return values


def _check_fits(stored: TensorDictBase, given: TensorDictBase) -> None:
    """Compares the columns of two rows, but for the buffer's own ``index``."""
    before, now = (
        {key: f"shape {list(leaf.shape)}, {leaf.dtype}" for key, leaf in row.items(True, True) if key != "index"}
        for row in (stored, given)
    )
    for key in sorted({*before, *now}, key=str):
        if before.get(key) != now.get(key):
            raise ValueError(
                f"levels are stored with {key!r} of {before.get(key, 'nothing')}, got {now.get(key, 'nothing')}; give "
                "the same keys, shapes and dtypes each time"
            )
