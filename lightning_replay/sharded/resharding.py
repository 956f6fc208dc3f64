# SPDX-License-Identifier: Apache-2.0
"""Deals rows of saved replays out to another number of shards, as whole episodes with their priorities."""

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
    """Collects the rows that a new shard gets from saved replays.

    Each episode goes to the shard with the fewest rows so far. Call :meth:`add` with every saved replay, in the same
    order for every shard, and then :meth:`store`. Rows keep their priorities and their order within an episode. The age
    of rows of different replays is compared by their places in the replays. If rows have left an episode, as from event
    tables, its parts are dealt out as different episodes.

    Episodes keep the numbers of their trajectories. If an earlier episode has the same number, an episode gets a
    negative number, because no process gives negative numbers.
    """

    def __init__(self, number: int, num_shards: int) -> None:
        self._number = number
        self._router = Router(num_shards)
        self._names: set[int] = set()
        self._lowest = 0
        self._rows: list[TensorDictBase] = []
        self._priorities: list[Tensor] = []
        self._places: list[np.ndarray] = []
        self._largest = -1.0

    def add(self, replay: Replay) -> None:
        """Adds the rows of a replay.

        Raises:
            ValueError: Only as many shards as were saved can hold the rows.
        """
        delaying = [type(one).__name__ for one in replay.transform if isinstance(one, NStepTransitions)]
        if delaying or as_replay_writer(replay.writer).may_refuse:
            what = "rows kept by importance"
            if delaying:
                what = f"returns that {delaying[0]} formed before they were stored"
            raise ValueError(
                f"the save holds {what}, and only as many shards as were saved can hold its rows. Give num_shards the "
                "number of the save"
            )
        slots = replay.oldest_first()
        if not len(slots):
            return
        episode, given = episodes_of(replay, slots)
        _, first, inverse, lengths = np.unique(episode, return_index=True, return_inverse=True, return_counts=True)
        shard = np.empty(len(first), dtype=np.int64)
        names = given[first]
        # Every shard deals out all episodes in the same order, and keeps its own.
        for number in np.argsort(first).tolist():
            shard[number] = self._router.shard_of(number, int(lengths[number]), ended=True)
            if int(names[number]) in self._names:
                names[number] = self._lowest - 1
            self._lowest = min(self._lowest, int(names[number]))
            self._names.add(int(names[number]))
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
    def next_trajectory(self) -> int:
        """A number above the numbers of all episodes, in every shard."""
        return max(self._names, default=-1) + 1

    def store(self, replay: Replay) -> TensorDictBase | None:
        """Stores the rows in a new replay, which keeps the newest. Returns all rows, or ``None`` without rows."""
        if not self._rows:
            return None
        # Rows are sorted by their place in their replay, so that the oldest rows of all replays come first.
        order = torch.from_numpy(np.argsort(np.concatenate(self._places), kind="stable"))
        rows = torch.cat(self._rows)[order]
        # Without any feedback so far, new rows get the same priority as these.
        priority = None
        if self._largest >= 0:
            priority = torch.cat(self._priorities)[order]
        # Each part must fit into every table, because the slots of all its rows get their priorities.
        at_once = min(_ROWS_AT_ONCE, replay.capacity)
        if replay.tables is not None:
            at_once = min(at_once, int(replay.tables.capacity.min()))
        for start in range(0, len(rows), at_once):
            replay.extend(rows[start : start + at_once], update_priority=False)
            if priority is not None:
                slots, stored, _ = replay.last_insertion
                replay.sampler.update_priority(slots, priority[start : start + at_once][stored], storage=replay.storage)
        if self._largest >= 0:
            replay.raise_max_priority(self._largest)
        return rows


def episodes_of(replay: Replay, slots: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the episode of each row, int64 ``[N]``, numbered here, and the number of its trajectory (0 without)."""
    storage = replay.storage
    count = len(slots)
    assert isinstance(storage, PackedStorage), "recipes have no other"
    given = np.zeros(count, dtype=np.int64)
    trajectory = read_trajectory(storage, slots)
    if trajectory is not None:
        given = trajectory.reshape(-1).cpu().long().numpy()
    ended = np.zeros(count, dtype=bool)
    done = storage.column(("next", "done"), slots)
    if done is not None:
        ended = done.reshape(count, -1).any(1).cpu().numpy()
    order = np.argsort(given, kind="stable")
    # An episode begins with another trajectory, after an end, and after rows that have left.
    begins = (given[order][1:] != given[order][:-1]) | ended[order][:-1]
    successor = replay.successors(slots)
    if successor is not None:
        begins |= successor.cpu().numpy()[order][:-1] != slots.cpu().numpy()[order][1:]
    episode = np.empty(count, dtype=np.int64)
    episode[order] = np.cumsum(np.concatenate(([False], begins)))
    return episode, given
