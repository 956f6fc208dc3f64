# SPDX-License-Identifier: Apache-2.0
"""Resharding: rows of saved replays dealt out to another number of shards, whole episodes with their priorities."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.episodes.links import TRAJECTORY_KEYS
from lightning_replay.episodes.returns import NStepTransitions
from lightning_replay.episodes.running import read_trajectory
from lightning_replay.parts import as_replay_sampler, as_replay_writer
from lightning_replay.replay import Replay
from lightning_replay.sharded.rows import Router
from lightning_replay.storage.packed import PackedStorage

_ROWS_AT_ONCE = 4096


class ReshardedRows:
    """One new shard's rows of saved replays, which are dealt out to several.

    Each episode goes to the shard with the fewest rows so far. Call :meth:`add` with every saved replay, in the same
    order for every shard, then :meth:`store`. Rows keep their priorities and their order within an episode; of rows of
    different replays the age is compared by their place in the replay. Rows between which others have left, as out of
    event tables, are dealt out as different episodes.

    Episodes keep the numbers of their trajectories. Where an earlier one has the same, they get negative numbers, which
    no process gives.
    """

    def __init__(self, number: int, num_shards: int) -> None:
        self._number, self._router = number, Router(num_shards)
        self._names: set[int] = set()
        self._lowest = 0  # of these and 0
        self._rows: list[TensorDictBase] = []
        self._priorities: list[Tensor] = []
        self._places: list[np.ndarray] = []
        self._largest = -1.0

    def add(self, replay: Replay) -> None:
        """Adds the rows of a replay, which may be discarded then; refuses rows that only as many shards can keep."""
        delaying = [type(one).__name__ for one in replay.transform if isinstance(one, NStepTransitions)]
        if delaying or as_replay_writer(replay.writer).may_refuse:
            what = "rows kept by importance"
            if delaying:
                what = f"returns that {delaying[0]} formed before they were stored"
            raise ValueError(
                f"the save holds {what}, and its rows can be restored into as many shards as were saved alone. "
                "Give num_shards the number of the save"
            )
        slots = replay.oldest_first()
        if not len(slots):
            return
        episode, given = episodes_of(replay, slots)
        _, first, inverse, lengths = np.unique(episode, return_index=True, return_inverse=True, return_counts=True)
        shard, names = np.empty(len(first), dtype=np.int64), given[first]
        # Every shard deals out all episodes in the same order, and keeps its own.
        for one in np.argsort(first).tolist():
            shard[one] = self._router.shard_of(one, int(lengths[one]), ended=True)
            if int(names[one]) in self._names:
                names[one] = self._lowest - 1
            self._lowest = min(self._lowest, int(names[one]))
            self._names.add(int(names[one]))
        kept = torch.from_numpy(np.flatnonzero(shard[inverse] == self._number))
        rows = replay.storage.get(slots[kept]).exclude("index", "generation")
        key = next((key for key in TRAJECTORY_KEYS if rows.get(key, None) is not None), TRAJECTORY_KEYS[0])
        column = rows.get(key, None)
        rows.set(key, torch.from_numpy(names[inverse])[kept].reshape(len(kept) if column is None else column.shape))
        self._rows.append(rows)
        self._places.append(kept.numpy() / len(slots))
        priority = as_replay_sampler(replay.sampler).priority_of(slots[kept])
        if priority is not None:
            self._priorities.append(priority)
            self._largest = max(self._largest, replay.group_totals().max_priority)

    @property
    def next_trajectory(self) -> int:  # above those of all episodes, of other shards too
        return max(self._names, default=-1) + 1

    def store(self, replay: Replay) -> TensorDictBase | None:
        """Stores the rows in a new replay, which keeps the newest, and returns all of them; ``None`` without any."""
        if not self._rows:
            return None
        # By place in their replays, so that the oldest rows of all come first.
        order = torch.from_numpy(np.argsort(np.concatenate(self._places), kind="stable"))
        rows = torch.cat(self._rows)[order]
        # Without any feedback so far, new rows get the same priority as these.
        priority = torch.cat(self._priorities)[order] if self._largest >= 0 else None
        at_once = min(_ROWS_AT_ONCE, replay.capacity if replay.tables is None else int(replay.tables.capacity.min()))
        for start in range(0, len(rows), at_once):
            # No more than fit at once: the slots of all are known, and get their priorities.
            replay.extend(rows[start : start + at_once], update_priority=False)
            if priority is not None:
                slots, stored, _ = replay.last_insertion
                replay.sampler.update_priority(slots, priority[start : start + at_once][stored], storage=replay.storage)
        if self._largest >= 0:
            replay.raise_max_priority(self._largest)
        return rows


def episodes_of(replay: Replay, slots: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the episode of each row, int64 ``[N]``, numbered here, and the number of its trajectory (0 without)."""
    storage, count = replay.storage, len(slots)
    assert isinstance(storage, PackedStorage), "recipes have no other"
    trajectory, done = read_trajectory(storage, slots), storage.column(("next", "done"), slots)
    given = np.zeros(count, dtype=np.int64) if trajectory is None else trajectory.reshape(-1).cpu().long().numpy()
    ended = np.zeros(count, dtype=bool) if done is None else done.reshape(count, -1).any(1).cpu().numpy()
    order = np.argsort(given, kind="stable")
    # An episode begins with another trajectory, after an end, and where rows between have left.
    begins = (given[order][1:] != given[order][:-1]) | ended[order][:-1]
    successor = replay.successors(slots)
    if successor is not None:
        begins |= successor.cpu().numpy()[order][:-1] != slots.cpu().numpy()[order][1:]
    episode = np.empty(count, dtype=np.int64)
    episode[order] = np.cumsum(np.concatenate(([False], begins)))
    return episode, given
