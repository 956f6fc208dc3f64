# SPDX-License-Identifier: Apache-2.0
"""The decisions on new rows for full slots, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_replay.compiled import compiled
from lightning_replay.retention.eviction_order import ARRIVAL_BITS, FAN_OUT, SHIFT

_ARRIVALS = (1 << ARRIVAL_BITS) - 1
_SIGN = 0x7FFF_FFFF


# A call between compiled functions counts references to every array it passes.
_inlined = njit(inline="always")


@_inlined
def _least(nodes, first, count):  # type: ignore[no-untyped-def]
    least = nodes[first]
    for node in range(first + 1, first + count):
        least = min(least, nodes[node])
    return least


@_inlined
def _place_of(nodes, first, count, value):  # type: ignore[no-untyped-def]
    """Returns the place of a value; a search after :func:`_least` is faster than one loop for both."""
    place = 0
    while place < count - 1 and nodes[first + place] != value:
        place += 1
    return place


@_inlined
def _lowest(nodes, starts):  # type: ignore[no-untyped-def]
    """Returns the lowest key and its slot."""
    top = starts.size - 2
    width = starts[top + 1] - starts[top]
    key = _least(nodes, starts[top], width)
    slot = _place_of(nodes, starts[top], width, key)
    for level in range(top - 1, -1, -1):
        slot = (slot << SHIFT) + _place_of(nodes, starts[level] + (slot << SHIFT), FAN_OUT, key)
    return key, slot


@_inlined
def _set(slot, key, nodes, starts):  # type: ignore[no-untyped-def]
    nodes[slot] = key
    node = slot
    for level in range(1, starts.size - 1):
        node >>= SHIFT
        nodes[starts[level] + node] = _least(nodes, starts[level - 1] + (node << SHIFT), FAN_OUT)


@compiled
def evict_lowest(bits, begin, first_arrival, always_admits, ties_enter, slots, nodes, starts):  # type: ignore[no-untyped-def]
    """Gives slots to the rows from ``begin`` on that enter, one after the other; returns how many did.

    Args:
        bits: of their float32 priorities, int32 ``[M]``.
        begin: rows before it have a slot.
        first_arrival: of the first row; the others follow.
        always_admits: whether they enter whatever their priority.
        ties_enter: whether they evict rows of equal priority.
        slots: int64 ``[M]``, -1 where a row has none; written.
        nodes, starts: of the order of eviction, see :class:`~lightning_replay.retention.eviction_order.LeavingOrder`.
    """
    lowest, slot = _lowest(nodes, starts)
    evicted = 0
    for row in range(begin, bits.size):
        wide = np.int64(bits[row])
        mine, other = wide ^ ((wide >> 63) & _SIGN), lowest >> ARRIVAL_BITS
        if not (always_admits or mine > other or (ties_enter and mine == other)):
            continue
        earlier = (lowest & _ARRIVALS) - first_arrival
        if earlier >= 0:  # a row of this call leaves again
            slots[earlier] = -1
        slots[row] = slot
        _set(slot, (mine << ARRIVAL_BITS) | (first_arrival + row), nodes, starts)
        evicted += 1
        lowest, slot = _lowest(nodes, starts)
    return evicted
