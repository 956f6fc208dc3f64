# SPDX-License-Identifier: Apache-2.0
"""New rows against those that are stored: who enters, and who leaves for it."""

from __future__ import annotations

from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from lightning_replay.retention.eviction_order import ARRIVAL_BITS


class Decisions(NamedTuple):
    """What became of new rows, which were decided on one after the other.

    ``slots``, int64 ``[n]``, of those that no later one drove out again, and which rows these are, ``entered``, int64
    ``[n]`` ascending; how many entered at all, and how many rows left for them.
    """

    slots: np.ndarray
    entered: np.ndarray
    num_admitted: int
    num_evicted: int


FIRST_ROW = np.zeros(1, dtype=np.int64)
REJECTED = Decisions(FIRST_ROW[:0], FIRST_ROW[:0], 0, 0)


def enters(key: int, lowest: int, always_admits: bool, ties_enter: bool) -> bool:
    """Whether a new row drives the lowest out, by keys, whose upper half is the priority."""
    mine, other = key >> ARRIVAL_BITS, lowest >> ARRIVAL_BITS
    return always_admits or mine > other or (ties_enter and mine == other)


class Candidates(NamedTuple):
    """New rows that resolve_evictions for slots.

    Priorities float32 and arrivals int64 ``[M]``; whether they enter in any case, and on equal terms; and the slot each
    has taken, int64 ``[M]``, -1 where none.
    """

    priority: np.ndarray
    arrival: np.ndarray
    always_admits: bool
    ties_enter: bool
    slots: np.ndarray

    def enters(self, key: int, lowest: int) -> bool:
        """Whether one of them drives the lowest row out, by keys."""
        return enters(key, lowest, self.always_admits, self.ties_enter)

    def take(self, slot: int, row: int) -> None:
        """Gives a slot to a row; another of them that had it is out again."""
        if len(self.slots) > 1:
            self.slots[self.slots == slot] = -1
        self.slots[row] = slot


def resolve_evictions(
    new: Candidates, keys: list[int], stored: list[int], slots: list[int], first: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns which slots new rows take, and which rows these are, one after the other; and how many rows left.

    By a heap of as many rows as can leave: nobody else is ever the lowest.
    """
    heap = list(zip(stored, slots, strict=True))  # sorted, which is a heap
    taken: dict[int, int] = {}
    evicted = 0
    for row, key in enumerate(keys, first):
        lowest, slot = heap[0]
        if new.enters(key, lowest):
            heapreplace(heap, (key, slot))
            taken[slot] = row
            evicted += 1
    return np.array(list(taken), dtype=np.int64), np.array(list(taken.values()), dtype=np.int64), evicted
