# SPDX-License-Identifier: Apache-2.0
"""Loops along the links of episodes, compiled; step by step for all rows, so that their cache misses overlap."""

import numpy as np

from lightning_replay.jit import compiled


@compiled
def chain(successor, index, length):  # type: ignore[no-untyped-def]
    """Loop of :meth:`EpisodeLinks.chain`."""
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
def number(predecessor, index, position, length, stride):  # type: ignore[no-untyped-def]
    """Writes how many steps come before each new row to ``position``; returns whether any completes a sequence."""
    found = False
    for place in range(index.size):
        before = predecessor[place]
        steps = 0 if before < 0 else position[before] + 1
        position[index[place]] = steps
        found |= steps >= length - 1 and (steps + 1 - length) % stride == 0
    return found


@compiled
def name(predecessor, index, number, episode):  # type: ignore[no-untyped-def]
    """Writes the number of its episode for each new row, in insertion order; row k may begin ``number + k``."""
    for place in range(index.size):
        before = predecessor[index[place]]
        episode[index[place]] = number + place if before < 0 else episode[before]


@compiled
def path_back(predecessor, slot, most):  # type: ignore[no-untyped-def]
    """Returns a slot and those before it in its episode, latest first, at most so many."""
    slots, count = np.empty(most, np.int64), 0
    while slot >= 0 and count < most:
        slots[count] = slot
        slot, count = predecessor[slot], count + 1
    return slots[:count]


@compiled
def are_paths(successor, predecessor):  # type: ignore[no-untyped-def]
    """Returns whether each slot is on one path that begins at a slot without predecessor."""
    found = 0
    for first in range(successor.size):
        slot = first if predecessor[first] < 0 else -1
        while slot >= 0:
            found, following = found + 1, successor[slot]
            if following >= 0 and predecessor[following] != slot:
                return False
            slot = following
    return found == successor.size
