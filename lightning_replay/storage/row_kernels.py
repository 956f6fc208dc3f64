# SPDX-License-Identifier: Apache-2.0
"""The loop of a row block, compiled; imported only where numba is installed."""

from __future__ import annotations

from lightning_replay.compiled import compiled


@compiled
def copy_rows(rows, slots, block, generation, least):  # type: ignore[no-untyped-def]
    """Copies the first rows of a block into slots, all different, and raises the generation in each by one.

    Returns the highest slot.
    """
    highest = slots[0]
    for place in range(slots.size):
        slot = slots[place]
        before = rows[slot, generation]
        for word in range(block.shape[1]):
            rows[slot, word] = block[place, word]
        rows[slot, generation] = max(before, least) + 1
        highest = max(highest, slot)
    return highest
