# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of observations that are kept once: links from rows to the next rows, and last observations by hash.

A place of a next observation above 0 is 1 more than the slot whose observation it is. Below 0 it is the negative number
of a last observation. 0 is none. Row 0 of the last observations holds zeros and is never in use.
"""

from numba import njit

from lightning_replay.jit import compiled
from lightning_replay.storage.frame_kernels import hash_words, same_words

# Rows of the chains, int32 [4, L]. They hold the following and the previous last observation of a bucket, and the slot
# of the row that ends with one. The last row holds the numbers of the free ones as a stack.
FOLLOWING, BEFORE, OWNER, FREE = range(4)


@njit(inline="always")
def _enter(number, key, hashes, heads, chains):  # type: ignore[no-untyped-def]
    bucket = key & (heads.size - 1)
    head = heads[bucket]
    hashes[number] = key
    chains[FOLLOWING, number] = head
    chains[BEFORE, number] = 0
    if head:
        chains[BEFORE, head] = number
    heads[bucket] = number


@njit(inline="always")
def _remove(number, hashes, heads, chains):  # type: ignore[no-untyped-def]
    before, after = chains[BEFORE, number], chains[FOLLOWING, number]
    if before:
        chains[FOLLOWING, before] = after
    else:
        heads[hashes[number] & (heads.size - 1)] = after
    if after:
        chains[BEFORE, after] = before


@njit(inline="always")
def _keep(number, slot, observation, last, hashes, heads, chains):  # type: ignore[no-untyped-def]
    stored = last[number]
    for word in range(observation.size):
        stored[word] = observation[word]
    chains[OWNER, number] = slot
    _enter(number, hash_words(observation), hashes, heads, chains)


@compiled
def enter_all(count, last, hashes, heads, chains):  # type: ignore[no-untyped-def]
    """Makes the first ``count`` last observations, from number 1 on, findable."""
    for number in range(1, count + 1):
        _enter(number, hash_words(last[number]), hashes, heads, chains)


@compiled
def link(slots, first, second, rows, start, places, before, last, hashes, heads, chains, num_free):  # type: ignore[no-untyped-def]
    """Finds a place for the next observation of each new row, before the new rows are written.

    Of the rows in ``slots``, int64 ``[N]``, ``first`` are the observations and ``second`` the next ones, words
    ``[N, W]``. The observations of stored ``rows``, words ``[capacity, words]``, begin at the word ``start``. By
    ``before``, a slot refers to the row whose next observation it keeps, 1 more than its slot. Returns the number of
    free last observations.
    """
    width = first.shape[1]
    for slot in slots:
        place, user = places[slot], before[slot] - 1
        if place < 0:
            _remove(-place, hashes, heads, chains)
            chains[FREE, num_free] = -place
            num_free += 1
        elif place > 0:
            before[place - 1] = 0
        if user >= 0:
            # The row before may stay, and its next observation leaves with this slot.
            num_free -= 1
            number = chains[FREE, num_free]
            _keep(number, user, rows[slot, start : start + width], last, hashes, heads, chains)
            places[user] = -number
        places[slot] = before[slot] = 0
    continues = False
    for row in range(slots.size):
        slot = slots[row]
        user = slots[row - 1] if continues else -1
        if not continues:
            key = hash_words(first[row])
            number = heads[key & (heads.size - 1)]
            while number and not (hashes[number] == key and same_words(first[row], last[number])):
                number = chains[FOLLOWING, number]
            if number:
                user = chains[OWNER, number]
                _remove(number, hashes, heads, chains)
                chains[FREE, num_free] = number
                num_free += 1
        if user >= 0:
            places[user] = slot + 1
            before[slot] = user + 1
        continues = row + 1 < slots.size and same_words(second[row], first[row + 1])
        if not continues:
            num_free -= 1
            number = chains[FREE, num_free]
            _keep(number, slot, second[row], last, hashes, heads, chains)
            places[slot] = -number
    return num_free


@compiled
def gather(slots, rows, start, places, last, found):  # type: ignore[no-untyped-def]
    """Copies the next observation of each slot, int64 ``[N]``, to the end of words ``[N, ...]`` in ``found``.

    If ``found`` is wider than an observation, the beginning of the row comes first. Returns whether all slots exist.
    """
    width = last.shape[1]
    before = found.shape[1] - width
    for row in range(slots.size):
        slot, copy = slots[row], found[row]
        if not 0 <= slot < rows.shape[0]:
            return False
        place = places[slot]
        own = rows[slot]
        for word in range(before):
            copy[word] = own[word]
        source = rows[place - 1, start : start + width] if place > 0 else last[-place]
        for word in range(width):
            copy[before + word] = source[word]
    return True
