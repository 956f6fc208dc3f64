# SPDX-License-Identifier: Apache-2.0
"""Reference counts and the hash index of a frame pool, as loops over arrays; compiled where numba is installed.

Frame 0 is no frame: a chain ends with it, and nothing counts it.
"""

from __future__ import annotations

import numpy as np


def hold(frames: np.ndarray, references: np.ndarray) -> None:
    """Adds a reference to each of ``frames``, int32 ``[M]``, several to one that is named several times."""
    for place in range(frames.size):
        if frames[place] > 0:
            references[frames[place]] += 1


def let_go(
    frames: np.ndarray,
    references: np.ndarray,
    free: np.ndarray,
    num_free: int,
    hashes: np.ndarray,
    heads: np.ndarray,
    following: np.ndarray,
) -> int:
    """Removes a reference to each of ``frames``, int32 ``[M]``; those without any leave the index and become free.

    Returns:
        How many frames are free now.
    """
    mask = heads.size - 1
    for place in range(frames.size):
        frame = frames[place]
        if frame == 0:
            continue
        references[frame] -= 1
        if references[frame] > 0:
            continue
        bucket = hashes[frame] & mask
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


def enter(
    frames: np.ndarray, new_hashes: np.ndarray, hashes: np.ndarray, heads: np.ndarray, following: np.ndarray
) -> None:
    """Makes frames, int32 ``[M]``, findable by their hashes, int64 ``[M]``."""
    mask = heads.size - 1
    for place in range(frames.size):
        frame = frames[place]
        bucket = new_hashes[place] & mask
        hashes[frame] = new_hashes[place]
        following[frame] = heads[bucket]
        heads[bucket] = frame


def count_freed(held: np.ndarray, given_up: np.ndarray, references: np.ndarray) -> int:
    """Counts frames that would be free if ``held`` got a reference each and ``given_up`` lost one; changes nothing.

    Args:
        held: int32 ``[M]``, frames to which new rows refer; new ones are negative and not counted.
        given_up: int32 ``[M]``, frames of rows that leave.
        references: int32, of every frame.
    """
    freed = 0
    for place in range(held.size):
        if held[place] > 0:
            references[held[place]] += 1
    for place in range(given_up.size):
        frame = given_up[place]
        if frame > 0:
            references[frame] -= 1
            if references[frame] == 0:
                freed += 1
    for place in range(given_up.size):
        if given_up[place] > 0:
            references[given_up[place]] += 1
    for place in range(held.size):
        if held[place] > 0:
            references[held[place]] -= 1
    return freed
