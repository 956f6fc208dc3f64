# SPDX-License-Identifier: Apache-2.0
"""Loops along the links of episodes, compiled; step by step for all rows, so that their cache misses overlap."""

from __future__ import annotations

import numpy as np

from lightning_replay.compiled import compiled


@compiled
def chain(successor, index, length):  # type: ignore[no-untyped-def]
    """Returns the slots ``[B, length]`` that follow each slot, the last one repeated, and how many differ, ``[B]``."""
    slots, used = np.empty((index.size, length), np.int64), np.ones(index.size, np.int64)
    slots[:, 0] = index
    for step in range(1, length):
        for row in range(index.size):
            here = slots[row, step - 1]
            following = successor[here]
            used[row] += following >= 0
            slots[row, step] = following if following >= 0 else here
    return slots, used


@compiled
def walk(links, index, steps):  # type: ignore[no-untyped-def]
    """Returns the slots up to so many ``steps`` along links from each slot, as far as these go, and how many."""
    slots, gone = index.copy(), np.zeros(index.size, np.int64)
    for row in range(index.size):
        slot, count = slots[row], 0
        while count < steps[row] and links[slot] >= 0:
            slot = links[slot]
            count += 1
        slots[row], gone[row] = slot, count
    return slots, gone


@compiled
def number(predecessor, index, position):  # type: ignore[no-untyped-def]
    """Writes how many steps of its episode come before each new row, in insertion order, to ``position``."""
    for place in range(index.size):
        before = predecessor[place]
        position[index[place]] = 0 if before < 0 else position[before] + 1
