# SPDX-License-Identifier: Apache-2.0
"""Candidates for full slots: which of them enter, and which rows they evict."""

from __future__ import annotations

from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from lightning_replay.retention.eviction_order import ARRIVAL_BITS


class Decisions(NamedTuple):
    """Outcome for new rows, decided on one after the other."""

    slots: np.ndarray  #: int64 ``[n]``, of the new rows that no later one evicted.
    entered: np.ndarray  #: Which rows these are, int64 ``[n]`` ascending.
    num_admitted: int  #: New rows that entered, also those that a later one evicted.
    num_evicted: int  #: Rows that left for them.


FIRST_ROW = np.zeros(1, dtype=np.int64)
REJECTED = Decisions(FIRST_ROW[:0], FIRST_ROW[:0], 0, 0)


def enters(key: int, lowest: int, always_admits: bool, ties_enter: bool) -> bool:
    """Returns whether a new row evicts the lowest, by their keys."""
    mine, other = key >> ARRIVAL_BITS, lowest >> ARRIVAL_BITS
    return always_admits or mine > other or (ties_enter and mine == other)


class Candidates(NamedTuple):
    """New rows that compete for slots."""

    priority: np.ndarray  #: float32 ``[M]``.
    arrival: np.ndarray  #: int64 ``[M]``.
    always_admits: bool  #: Whether they enter whatever their priority.
    ties_enter: bool  #: Whether they evict rows of equal priority.
    slots: np.ndarray  #: int64 ``[M]``, the slot of each, -1 where it has none.

    def enters(self, key: int, lowest: int) -> bool:
        """Returns whether one of them evicts the lowest row, by keys."""
        return enters(key, lowest, self.always_admits, self.ties_enter)


def resolve_evictions(
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
