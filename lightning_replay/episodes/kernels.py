# SPDX-License-Identifier: Apache-2.0
"""Compiled loops along the links of episodes. They step all rows together, so that their cache misses overlap."""

import numpy as np
from numba import njit

from lightning_replay.jit import compiled

# Columns of the table of running episodes, int64 [places, 4].
NAME = 0  #: Trajectory of the episode.
NEWEST = 1  #: Slot of the newest row, or -1 if the episode does not run, ``EMPTY`` if the place has no name.
SINCE = 2  #: Number of rows written before the newest row.
LAST = 3  #: Digest of the observation that the newest row ended with.
EMPTY = -2


@njit(inline="always")
def _place_of(table, name):  # type: ignore[no-untyped-def]
    """Returns the place of a name in the table of running episodes, or the empty place where it belongs."""
    last = table.shape[0] - 1
    # 32 names that count on are found one after the other in memory. More would fill long runs of places, and each
    # further name that belongs into one would be searched to its end: 4,096 rows took ten times as long.
    block = ((name >> 5) * np.int64(-7046029254386353131)) >> 32
    place = ((block << 5) | (name & 31)) & last
    while table[place, NEWEST] != EMPTY and table[place, NAME] != name:
        place = (place + 1) & last
    return place


@compiled
def follow(successor, predecessor, places, table, now, slots, names, done, digests, stopped):  # type: ignore[no-untyped-def]
    """Loop of :meth:`EpisodeLinks.write`.

    Fills in the slots of newest rows that nothing follows any more, and when these rows were written.

    Args:
        digests: Digests of the observations before and after each row's step, int64 ``[2, n]``. ``[2, 0]`` links rows
            by their names.
        stopped: Memory for the result, int64 ``[2 n, 2]``.

    Returns:
        Numbers of names that are new in the table, of stopped rows, of compared rows, and of rows that do not continue
        the row before.
    """
    num_new = num_stopped = num_compared = num_broken = 0
    for row in range(slots.size):
        slot = slots[row]
        # The row that was in this slot leaves. No episode may go through it.
        if predecessor[slot] >= 0:
            successor[predecessor[slot]] = -1
        if successor[slot] >= 0:
            predecessor[successor[slot]] = -1
        successor[slot] = -1
        predecessor[slot] = -1
        place = places[slot]
        if place >= 0:
            stopped[num_stopped, 0] = slot
            stopped[num_stopped, 1] = table[place, SINCE]
            num_stopped += 1
            table[place, NEWEST] = -1
            places[slot] = -1
    compares = digests.size > 0
    for row in range(slots.size):
        slot = slots[row]
        place = _place_of(table, names[row])
        before = table[place, NEWEST]
        if before == EMPTY:
            table[place, NAME] = names[row]
            num_new += 1
        if before >= 0:
            places[before] = -1
            num_compared += 1
            if compares and table[place, LAST] != digests[0, row]:
                num_broken += 1
                # A new row that nothing continues is no row of before.
                if table[place, SINCE] < now:
                    stopped[num_stopped, 0] = before
                    stopped[num_stopped, 1] = table[place, SINCE]
                    num_stopped += 1
            else:
                successor[before] = slot
                predecessor[slot] = before
        table[place, NEWEST] = -1
        if not done[row]:
            table[place, NEWEST] = slot
            table[place, SINCE] = now + row
            places[slot] = place
            if compares:
                table[place, LAST] = digests[1, row]
    return num_new, num_stopped, num_compared, num_broken


@compiled
def remember(places, table, running):  # type: ignore[no-untyped-def]
    """Enters running episodes, in the order in which their newest rows were written, into an empty table."""
    for row in range(running.shape[0]):
        place = _place_of(table, running[row, NAME])
        table[place, NAME] = running[row, NAME]
        table[place, NEWEST] = running[row, NEWEST]
        table[place, SINCE] = row - running.shape[0]
        table[place, LAST] = running[row, LAST]
        places[running[row, NEWEST]] = place


@compiled
def stop(places, table, slots, names):  # type: ignore[no-untyped-def]
    """Ends the running episodes whose newest rows are in these slots, and the running episodes of these names."""
    for slot in slots:
        if places[slot] >= 0:
            table[places[slot], NEWEST] = -1
            places[slot] = -1
    for name in names:
        place = _place_of(table, name)
        if table[place, NEWEST] >= 0:
            places[table[place, NEWEST]] = -1
            table[place, NEWEST] = -1


@compiled
def add_digests(words, factors, digests):  # type: ignore[no-untyped-def]
    """Adds words ``[N, n]``, times factors of 64 bits ``[n]``, to digests ``[N]``."""
    for row in range(words.shape[0]):
        digest = np.uint64(0)
        for word in range(words.shape[1]):
            digest += np.uint64(words[row, word]) * factors[word]
        digests[row] += digest


@compiled
def add_digests_at(own, following, slots, factors, digests):  # type: ignore[no-untyped-def]
    """Adds the words of two columns ``[capacity, n]`` in these slots to digests ``[2, N]``, as :func:`add_digests`."""
    for row in range(slots.size):
        slot = slots[row]
        digest = np.uint64(0)
        for word in range(own.shape[1]):
            digest += np.uint64(own[slot, word]) * factors[word]
        digests[0, row] += digest
        digest = np.uint64(0)
        for word in range(following.shape[1]):
            digest += np.uint64(following[slot, word]) * factors[word]
        digests[1, row] += digest


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
    """Writes how many steps come before each new row to ``position``, and returns whether any completes a sequence."""
    found = False
    for place in range(index.size):
        before = predecessor[place]
        steps = 0 if before < 0 else position[before] + 1
        position[index[place]] = steps
        found |= steps >= length - 1 and (steps + 1 - length) % stride == 0
    return found


@compiled
def starts(predecessor, position, last, num_new, length, overlap, min_steps):  # type: ignore[no-untyped-def]
    """Returns the first slots of the sequences that end with ``num_new`` new rows and then with ends of episodes."""
    found, count = np.empty(last.size, np.int64), 0
    for place in range(last.size):
        slot = last[place]
        # The last sequence of an episode has at least one step that the previous sequence lacks.
        steps = position[slot]
        if steps >= length - 1:
            steps = overlap + (steps - overlap) % (length - overlap)
        if steps < (length if place < num_new else min_steps) - 1:
            continue
        while steps > 0 and slot >= 0:
            slot = predecessor[slot]
            steps -= 1
        # Sequences of which rows are no longer stored are left out.
        if slot >= 0:
            found[count] = slot
            count += 1
    return found[:count]


@compiled
def name(predecessor, index, number, episode):  # type: ignore[no-untyped-def]
    """Writes the number of its episode for each new row, in insertion order. Row k may begin ``number + k``."""
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
