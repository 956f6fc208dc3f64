# SPDX-License-Identifier: Apache-2.0
"""Eviction order: the lowest priority first, of equal ones the oldest."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_replay.memory import check_free

SHIFT = 6
FAN_OUT = 1 << SHIFT
WIDEST_TOP = 1024  # searched as one row
ARRIVAL_BITS = 32
ABSENT = np.iinfo(np.int64).max
_ARRIVALS = (1 << ARRIVAL_BITS) - 1
_SIGN = 0x7FFF_FFFF


class LeavingOrder:
    """A flat tree of minima over ``capacity`` slots, which finds the slot that is evicted first; on the CPU.

    The key of a slot is one int64, its float32 priority in the upper half and its arrival in the lower, so that keys
    compare by priority and then by age. They are all different.

    Example:
        >>> order = LeavingOrder(4)
        >>> order.place(np.array([0, 1, 2]), np.array([2.0, 1.0, 1.0], dtype=np.float32), np.array([0, 1, 2]))
        >>> order.lowest(2)
        array([1, 2])
        >>> order.set(np.array([1]), np.array([9.0], dtype=np.float32)); order.lowest(1)
        array([2])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        check_free(8 * capacity, f"the order in which rows leave, of {capacity:,} slots")
        counts = [_rounded_up(capacity)]
        while len(counts) == 1 or counts[-1] > WIDEST_TOP:
            counts.append(_rounded_up(counts[-1] // FAN_OUT))
        #: All levels one after the other, int64, and where each begins, with the end; for compiled loops.
        self.nodes: np.ndarray = np.full(sum(counts), ABSENT)
        self.starts: np.ndarray = np.cumsum([0, *counts])
        self._levels = self._views()

    def _views(self) -> list[np.ndarray]:
        return np.split(self.nodes, self.starts[1:-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._levels = self._views()  # copies are views no more

    @property
    def nbytes(self) -> int:
        return self.nodes.nbytes

    def place(self, slots: np.ndarray, priority: np.ndarray, arrival: np.ndarray) -> None:
        """Adds rows in different ``slots`` with priorities float32 ``[n]``, not NaN, and arrivals below ``2**32``."""
        self._write(slots, key_of(priority, arrival))

    def set(self, slots: np.ndarray, priority: np.ndarray) -> None:
        """Sets priorities of rows that keep their arrival; of several for one slot the last counts."""
        self._write(slots, key_of(priority, self.arrival(slots)))

    def remove(self, slots: np.ndarray) -> None:
        self._write(slots, np.full(len(slots), ABSENT))

    def lowest(self, count: int) -> np.ndarray:
        """Returns the ``count`` slots that are evicted first, in that order; fewer where fewer are present."""
        slots = np.arange(len(self._levels[-1]))
        for level in reversed(self._levels):
            slots = slots[level[slots] < ABSENT]
            if count < len(slots):  # the lowest keys lie under the nodes with the lowest minima
                slots = slots[np.argpartition(level[slots], count - 1)[:count]]
            if level is not self._levels[0]:
                slots = (slots[:, None] * FAN_OUT + np.arange(FAN_OUT)).reshape(-1)
        return slots[np.argsort(self._levels[0][slots])]

    def keys(self, slots: np.ndarray | slice) -> np.ndarray:
        """Keys, int64 ``[n]``: slots of lower ones leave first."""
        return self._levels[0][slots]

    def priority(self, slots: np.ndarray | slice) -> np.ndarray:
        return priority_of(self._levels[0][slots])

    def arrival(self, slots: np.ndarray | slice) -> np.ndarray:
        return self._levels[0][slots] & _ARRIVALS

    def load(self, keys: np.ndarray) -> None:
        """Sets the keys of the first slots; the others become empty."""
        self.clear()
        self._write(np.arange(len(keys)), keys)

    def clear(self) -> None:
        self.nodes.fill(ABSENT)

    def _write(self, slots: np.ndarray, keys: np.ndarray) -> None:
        self._levels[0][slots] = keys  # NumPy writes in order: the last duplicate stays
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            slots = slots >> SHIFT
            blocks = below.reshape(-1, FAN_OUT)
            if len(slots) < len(blocks):
                level[slots] = blocks[slots].min(1)
            else:
                level[: len(blocks)] = blocks.min(1)


def key_of(priority: np.ndarray, arrival: np.ndarray) -> np.ndarray:
    """Returns int64 keys that compare by priority, then by arrival."""
    bits = (priority + np.float32(0.0)).view(np.int32).astype(np.int64)  # adding 0 turns -0.0 into 0.0
    # As integers, the bits of positive floats ascend with the floats, and those of negative ones descend.
    bits ^= (bits >> 63) & _SIGN
    return (bits << ARRIVAL_BITS) | arrival


def priority_of(keys: np.ndarray) -> np.ndarray:
    bits = keys >> ARRIVAL_BITS
    bits ^= (bits >> 63) & _SIGN
    return bits.astype(np.int32).view(np.float32)


def _rounded_up(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT
