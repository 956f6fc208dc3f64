# SPDX-License-Identifier: Apache-2.0
"""The order in which rows leave: the lowest priority first, of equal ones the oldest."""

from __future__ import annotations

import struct

import numpy as np

from lightning_replay.memory import check_free

SHIFT = 6
FAN_OUT = 1 << SHIFT
WIDEST_TOP = 1024  # searched as one row
ARRIVAL_BITS = 32
ABSENT = np.iinfo(np.int64).max
_ARRIVALS = (1 << ARRIVAL_BITS) - 1
_SIGN = 0x7FFF_FFFF
_FLOAT32, _INT32 = struct.Struct("f"), struct.Struct("i")


class LeavingOrder:
    """A flat tree of minima over slots, with the slot that leaves first at its root; on the CPU, in NumPy.

    A slot's key is one int64, its float32 priority above and its arrival below, so that one comparison finds the lowest
    and, of equals, the oldest. Keys differ from each other, so the order is total.

    Args:
        capacity: slots.

    Example:
        >>> order = LeavingOrder(4)
        >>> order.place(np.array([0, 1, 2]), np.array([2.0, 1.0, 1.0], dtype=np.float32), np.array([0, 1, 2]))
        >>> order.first(), order.lowest(2)
        (1, array([1, 2]))
        >>> order.set(np.array([1]), np.array([9.0], dtype=np.float32)); order.first()
        2
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        check_free(8 * capacity, f"the order in which rows leave, of {capacity:,} slots")
        self._levels = [np.full(_rounded_up(capacity), ABSENT)]
        while len(self._levels) == 1 or len(self._levels[-1]) > WIDEST_TOP:
            self._levels.append(np.full(_rounded_up(len(self._levels[-1]) // FAN_OUT), ABSENT))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and minima."""
        return sum(level.nbytes for level in self._levels)

    def place(self, slots: np.ndarray, priority: np.ndarray, arrival: np.ndarray) -> None:
        """New rows, all in different slots.

        Args:
            slots: int64 ``[n]``.
            priority: float32 ``[n]``, not NaN.
            arrival: int64 ``[n]``, from 0 to ``2**32 - 1``; a larger one is younger.
        """
        self._write(slots, key_of(priority, arrival))

    def place_one(self, slot: int, key: int) -> None:
        """:meth:`place` for a single row, by its key."""
        self._levels[0][slot] = key
        self._refresh_one(slot)

    def set(self, slots: np.ndarray, priority: np.ndarray) -> None:
        """New priorities of rows that keep their arrival; of several for one slot the last counts."""
        self._write(slots, key_of(priority, self.arrival(slots)))

    def remove(self, slots: np.ndarray) -> None:
        """Takes slots out of the order."""
        self._write(slots, np.full(len(slots), ABSENT))

    def first(self) -> int:
        """The slot that leaves first; some slot when none is present."""
        slot = int(self._levels[-1].argmin())
        for level in reversed(self._levels[:-1]):
            start = slot << SHIFT
            slot = start + int(level[start : start + FAN_OUT].argmin())
        return slot

    def lowest(self, count: int) -> np.ndarray:
        """The ``count`` slots that leave first, in that order; fewer where fewer are present."""
        slots = np.arange(len(self._levels[-1]))
        for level in reversed(self._levels):
            slots = slots[level[slots] < ABSENT]
            if count < len(slots):  # what is looked for lies under as many nodes, those with the lowest minima
                slots = slots[np.argpartition(level[slots], count - 1)[:count]]
            if level is not self._levels[0]:
                slots = (slots[:, None] * FAN_OUT + np.arange(FAN_OUT)).reshape(-1)
        return slots[np.argsort(self._levels[0][slots])]

    def key(self, slot: int) -> int:
        """The key of one slot."""
        return int(self._levels[0][slot])

    def keys(self, slots: np.ndarray | slice) -> np.ndarray:
        """Keys, int64 ``[n]``: slots of lower ones leave first."""
        return self._levels[0][slots]

    def priority(self, slots: np.ndarray | slice) -> np.ndarray:
        """Priorities, float32 ``[n]``, of slots that are present."""
        return priority_of(self._levels[0][slots])

    def arrival(self, slots: np.ndarray | slice) -> np.ndarray:
        """Arrivals, int64 ``[n]``, of slots that are present."""
        return self._levels[0][slots] & _ARRIVALS

    def load(self, keys: np.ndarray) -> None:
        """Takes over the keys of the first slots; the others are empty."""
        self.clear()
        self._write(np.arange(len(keys)), keys)

    def clear(self) -> None:
        """Takes every slot out."""
        for level in self._levels:
            level.fill(ABSENT)

    def _write(self, slots: np.ndarray, keys: np.ndarray) -> None:
        self._levels[0][slots] = keys  # NumPy writes in order: the last duplicate stays
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            slots = slots >> SHIFT
            blocks = below.reshape(-1, FAN_OUT)
            if len(slots) < len(blocks):
                level[slots] = blocks[slots].min(1)
            else:
                level[: len(blocks)] = blocks.min(1)

    def _refresh_one(self, slot: int) -> None:
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            slot >>= SHIFT
            start = slot << SHIFT
            level[slot] = np.minimum.reduce(below[start : start + FAN_OUT])  # what min() calls, after asking around


def key_of(priority: np.ndarray, arrival: np.ndarray) -> np.ndarray:
    """Priorities and arrivals as int64 that compare like them."""
    bits = (priority + np.float32(0.0)).view(np.int32).astype(np.int64)  # adding 0 turns -0.0 into 0.0
    # The bits of floats grow with them where the sign is plus, and shrink where it is minus.
    bits ^= (bits >> 63) & _SIGN
    return (bits << ARRIVAL_BITS) | arrival


def single_key(priority: float, arrival: int) -> int:
    """:func:`key_of` in plain numbers, ten times faster for a single one."""
    bits = _INT32.unpack(_FLOAT32.pack(priority + 0.0))[0]
    return (bits ^ ((bits >> 31) & _SIGN)) << ARRIVAL_BITS | arrival


def priority_of(keys: np.ndarray) -> np.ndarray:
    """The priorities in keys, float32."""
    bits = keys >> ARRIVAL_BITS
    bits ^= (bits >> 63) & _SIGN
    return bits.astype(np.int32).view(np.float32)


def _rounded_up(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT
