# SPDX-License-Identifier: Apache-2.0
"""Candidates for full slots: which of them enter, and which rows they evict."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from lightning_replay.retention.eviction_order import ARRIVAL_BITS, LeavingOrder, key_of

NO_ROW = np.zeros(0, dtype=np.int64)
FIRST_ROW = np.zeros(1, dtype=np.int64)


class Decisions(NamedTuple):
    """Outcome for new rows, decided on one after the other."""

    slots: np.ndarray  #: int64 ``[n]``, of the new rows that no later one evicted.
    entered: np.ndarray  #: Which rows these are, int64 ``[n]`` ascending.
    num_admitted: int  #: New rows that entered, also those that a later one evicted.
    num_evicted: int  #: Rows that left for them.


def enters(key: int, lowest: int, always_admits: bool, ties_enter: bool) -> bool:
    """Returns whether a new row evicts the lowest, by their keys."""
    mine, other = key >> ARRIVAL_BITS, lowest >> ARRIVAL_BITS
    return always_admits or mine > other or (ties_enter and mine == other)


class Candidates(NamedTuple):
    """New rows that compete for slots."""

    priority: np.ndarray  #: float32 ``[M]``.
    first_arrival: int  #: Of the first; the others follow.
    always_admits: bool  #: Whether they enter whatever their priority.
    ties_enter: bool  #: Whether they evict rows of equal priority.
    slots: np.ndarray  #: int64 ``[M]``, the slot of each, -1 where it has none.

    def enters(self, key: int, lowest: int) -> bool:
        """Returns whether one of them evicts the lowest row, by keys."""
        return enters(key, lowest, self.always_admits, self.ties_enter)


EvictLowest = Callable[[LeavingOrder, Candidates, int], int]
ReplaceLowest = Callable[[LeavingOrder, int, bool, bool], int]


def evict_functions() -> tuple[EvictLowest, ReplaceLowest]:
    """Returns :func:`evict_lowest` and :func:`replace_lowest`, compiled."""
    return _evict_compiled, _replace_compiled


def replace_lowest(order: LeavingOrder, key: int, always_admits: bool, ties_enter: bool) -> int:
    """Puts one new row in the place of the lowest, by its key; returns the slot, -1 where it does not enter."""
    victim = order.first()
    if not enters(key, order.key(victim), always_admits, ties_enter):
        return -1
    order.place_one(victim, key)
    return victim


def _replace_compiled(order: LeavingOrder, key: int, always_admits: bool, ties_enter: bool) -> int:
    from lightning_replay.retention.numba_kernels import replace_lowest as replace

    slot: int = replace(key, always_admits, ties_enter, order.nodes, order.starts)
    return slot


def _evict_compiled(order: LeavingOrder, new: Candidates, fitting: int) -> int:
    from lightning_replay.retention.numba_kernels import evict_lowest as evict

    bits = (new.priority + np.float32(0.0)).view(np.int32)  # adding 0 turns -0.0 into 0.0
    flags = new.always_admits, new.ties_enter
    evicted: int = evict(bits, fitting, new.first_arrival, *flags, new.slots, order.nodes, order.starts)
    return evicted


def evict_lowest(order: LeavingOrder, new: Candidates, fitting: int) -> int:
    """Gives slots to the new rows from ``fitting`` on that enter, as if one at a time.

    Args:
        order: of the stored rows, and of the new ones before ``fitting``; updated.
        new: their ``slots`` are updated.
        fitting: new rows before it have free slots.

    Returns:
        the number of evicted rows.
    """
    arrival = np.arange(new.first_arrival, new.first_arrival + len(new.slots))
    keys = key_of(new.priority[fitting:], arrival[fitting:])
    slots = order.lowest(len(keys))
    stored = order.keys(slots)
    highest, lowest = int(stored[-1]), int(keys.min())
    if len(slots) == len(keys) and lowest > highest and new.enters(lowest, highest):
        # All enter and none evicts a new one: each takes the slot of the next lowest row.
        taken, rows, evicted = slots, np.arange(fitting, fitting + len(keys)), len(keys)
    else:
        taken, rows, evicted = _resolve_evictions(new, keys.tolist(), stored.tolist(), slots.tolist(), fitting)
    if len(taken):
        new.slots[np.isin(new.slots, taken)] = -1
        new.slots[rows] = taken
        order.place(taken, new.priority[rows], arrival[rows])
    return evicted


def _resolve_evictions(
    new: Candidates, keys: list[int], stored: list[int], slots: list[int], first: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Decides on the rows ``keys``, numbered from ``first`` on, against ``stored`` keys in ``slots``, lowest first.

    Returns the slots that new rows take, which rows these are, and how many rows were evicted.
    """
    heap = list(zip(stored, slots, strict=True))  # sorted, which is a heap; as many rows as can leave at most
    taken: dict[int, int] = {}
    evicted = 0
    for row, key in enumerate(keys, first):
        lowest, slot = heap[0]
        if new.enters(key, lowest):
            heapreplace(heap, (key, slot))
            taken[slot] = row
            evicted += 1
    return np.array(list(taken), dtype=np.int64), np.array(list(taken.values()), dtype=np.int64), evicted
