# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of a frame pool: reference counts, the hash index, the search for equal frames.

Frame 0 is no frame: a chain ends with it, and nothing counts it.
"""

import numpy as np
from numba import njit

from lightning_replay.jit import compiled, inlined

_BLOCK = 64  # words compared at once


@compiled
def count(frames, step, references):  # type: ignore[no-untyped-def]
    """Adds ``step`` references to each of ``frames``, int32 ``[M]``, several times to one that is named several times.

    Places that are not above 0 are skipped. Returns how many have no reference now.
    """
    freed = 0
    for place in range(frames.size):
        if frames[place] > 0:
            references[frames[place]] += step
            freed += references[frames[place]] == 0
    return freed


@compiled
def let_go(frames, references, free, num_free, hashes, heads, following):  # type: ignore[no-untyped-def]
    """Removes one reference to each frame, int32 ``[M]``. Frames without references become free."""
    mask = heads.size - 1
    for place in range(frames.size):
        frame = frames[place]
        if frame == 0:
            continue
        references[frame] -= 1
        if references[frame] > 0:
            continue
        bucket = hashes[frame] & mask
        # Chains are linked one way, so the frame before it is looked for.
        before, at = 0, heads[bucket]
        while at != frame:
            before, at = at, following[at]
        if before == 0:
            heads[bucket] = following[frame]
        else:
            following[before] = following[frame]
        free[num_free] = frame
        num_free += 1
    return num_free


@compiled
def enter(frames, new_hashes, hashes, heads, following):  # type: ignore[no-untyped-def]
    """Makes frames, int32 ``[M]``, findable by their hashes, int64 ``[M]``."""
    mask = heads.size - 1
    for place in range(frames.size):
        frame = frames[place]
        bucket = new_hashes[place] & mask
        hashes[frame] = new_hashes[place]
        following[frame] = heads[bucket]
        heads[bucket] = frame


@inlined
def same_words(one, other):  # type: ignore[no-untyped-def]
    words = one.size
    start = 0
    while start < words:
        stop = min(start + _BLOCK, words)
        # No branch within a block, so that it is compared by vector instructions.
        different = one[start] ^ other[start]
        for word in range(start + 1, stop):
            different |= one[word] ^ other[word]
        if different != 0:
            return False
        start = stop
    return True


@njit(inline="always")
def _turned(value):  # type: ignore[no-untyped-def]
    return (value << np.uint64(29)) | (value >> np.uint64(35))


@inlined
def hash_words(frame):  # type: ignore[no-untyped-def]
    """Mixes words into four chains, each turned so that its high bits count and multiplied."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    a, b = np.uint64(1), np.uint64(2)
    c, d = np.uint64(3), np.uint64(4)
    words = frame.size
    whole = words - words % 4
    for word in range(0, whole, 4):
        a = _turned(a ^ np.uint64(frame[word])) * factor
        b = _turned(b ^ np.uint64(frame[word + 1])) * factor
        c = _turned(c ^ np.uint64(frame[word + 2])) * factor
        d = _turned(d ^ np.uint64(frame[word + 3])) * factor
    for word in range(whole, words):
        a = _turned(a ^ np.uint64(frame[word])) * factor
    mixed = (_turned((_turned((_turned(a) ^ b) * factor) ^ c) * factor) ^ d) * factor
    return np.int64(mixed ^ (mixed >> np.uint64(32)))


@compiled
def hash_each(frames):  # type: ignore[no-untyped-def]
    hashed = np.empty(frames.shape[0], dtype=np.int64)
    for place in range(frames.shape[0]):
        hashed[place] = hash_words(frames[place])
    return hashed


@compiled
def find(first, second, pool, hashes, heads, following):  # type: ignore[no-untyped-def]
    """Finds the equal frame in the pool for every frame of two stacks, or numbers a new one.

    Stacks are unsigned words ``[N, k, W]``, the pool is unsigned words ``[F, W]``. Returns ``frames``, ``sources`` and
    ``hashes`` of :class:`~lightning_replay.storage.frame_pool.Found`.
    """
    rows, depth = first.shape[0], first.shape[1]
    most = rows * 2 * depth
    size = 16
    while size < 2 * most:
        size *= 2
    own = np.zeros(size, dtype=np.int32)  # open addressing: number of a new frame, plus 1
    frames = np.empty((rows, 2 * depth), dtype=np.int32)
    sources = np.empty(most, dtype=np.int64)
    new_hashes = np.empty(most, dtype=np.int64)
    new = 0
    mask = heads.size - 1
    for row in range(rows):
        for place in range(2 * depth):
            given = first[row, place] if place < depth else second[row, place - depth]
            # Usual source of the frames of a stack, before anything is hashed.
            if place > 0 and place < depth and same_words(given, first[row, place - 1]):
                frames[row, place] = frames[row, place - 1]
                continue
            if place < depth and row > 0 and same_words(given, second[row - 1, place]):
                frames[row, place] = frames[row - 1, depth + place]
                continue
            if place >= depth and place + 1 < 2 * depth and same_words(given, first[row, place - depth + 1]):
                frames[row, place] = frames[row, place - depth + 1]
                continue
            key = hash_words(given)
            found = heads[key & mask]
            while found != 0:
                if hashes[found] == key and same_words(given, pool[found]):
                    break
                found = following[found]
            if found != 0:
                frames[row, place] = found
                continue
            # Not in the pool, and perhaps the same as a new frame found before it.
            at = (key >> 7) & (size - 1)
            while own[at] != 0:
                number = own[at] - 1
                if new_hashes[number] == key:
                    source = sources[number]
                    other = source % (2 * depth)
                    if other < depth:
                        if same_words(given, first[source // (2 * depth), other]):
                            break
                    elif same_words(given, second[source // (2 * depth), other - depth]):
                        break
                at = (at + 1) & (size - 1)
            if own[at] == 0:
                own[at] = new + 1
                sources[new] = row * 2 * depth + place
                new_hashes[new] = key
                new += 1
            frames[row, place] = -own[at]
    return frames, sources[:new].copy(), new_hashes[:new].copy()


@compiled
def store(frames, sources, first, second, pool):  # type: ignore[no-untyped-def]
    depth = first.shape[1]
    for number in range(frames.size):
        row, place = sources[number] // (2 * depth), sources[number] % (2 * depth)
        if place < depth:
            pool[frames[number]] = first[row, place]
        else:
            pool[frames[number]] = second[row, place - depth]


@njit(inline="always")
def _steps_apart(frames, depth):  # type: ignore[no-untyped-def]
    """Returns how many frames after the first stack of a row the second begins, or k if they have no frame together."""
    apart = same = 0
    while apart + same < depth:
        if frames[apart + same] == frames[depth + same]:
            same += 1
        else:
            apart += 1
            same = 0
    return apart


@compiled
def gather(rows, frames, pool, stacks):  # type: ignore[no-untyped-def]
    """Copies the frames, unsigned words ``[F, W]``, of rows, int64 ``[N]``, into their two stacks ``[2 * N * k * W]``.

    A frame at the end of one and the start of the other is read once.
    """
    depth, words = frames.shape[1] // 2, pool.shape[1]
    both = stacks.reshape(2, rows.size, depth, words)
    for place in range(rows.size):
        of_row, first, second = frames[rows[place]], both[0, place], both[1, place]
        # Reading costs more than writing: what both stacks show is read once.
        apart = _steps_apart(of_row, depth)
        for step in range(depth + apart):
            if step < apart:
                source, copy = pool[of_row[step]], first[step]
                for word in range(words):
                    copy[word] = source[word]
            elif step < depth:
                source, copy, other = pool[of_row[step]], first[step], second[step - apart]
                for word in range(words):
                    copy[word] = other[word] = source[word]
            else:
                source, copy = pool[of_row[depth + step - apart]], second[step - apart]
                for word in range(words):
                    copy[word] = source[word]
