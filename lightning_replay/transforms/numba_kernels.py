# SPDX-License-Identifier: Apache-2.0
"""Compiled mixing of packed rows."""

from __future__ import annotations

import numpy as np

from lightning_replay.compiled import compiled

_LINE_ELEMENTS = 16  # float32 in a cache line


@compiled
def mix_pairs(rows, flags, index, blocks, terminated, coefficient, mixed):  # type: ignore[no-untyped-def]
    """Gathers pairs of rows and mixes each into one row; returns whether all slots are rows, else nothing is mixed.

    Args:
        rows: float32 ``[N, elements]``, packed rows.
        flags: uint8 ``[N, bytes]``, the same rows.
        index: int64 ``[B, 2]``, slots of the pairs.
        blocks: int64 ``[K, 2]``, begin and end of the elements that are mixed; others are those of the first row.
        terminated: two ints, begin and end of the flags that leave a pair as its first row where one is set.
        coefficient: float32 ``[B]``, weights of the first rows; set to 1 where a pair is left as its first row.
        mixed: float32 ``[B, elements]``, the result.
    """
    begin, end = terminated
    # Rows are scattered in memory: loads of all their cache lines, which depend on nothing, overlap; copies hardly do.
    touched = np.float32(0)
    for pair in range(index.shape[0]):
        for place in range(2):
            if not 0 <= index[pair, place] < rows.shape[0]:
                return False
        for element in range(0, rows.shape[1], _LINE_ELEMENTS):
            touched += rows[index[pair, 0], element]
            touched += rows[index[pair, 1], element]
    mixed[0, 0] = touched  # overwritten below; without a use the loads would be left out
    for pair in range(index.shape[0]):
        first, second = index[pair, 0], index[pair, 1]
        is_left = first == second
        for place in range(begin, end):
            is_left |= (flags[first, place] | flags[second, place]) != 0
        for element in range(rows.shape[1]):
            mixed[pair, element] = rows[first, element]
        if is_left:
            coefficient[pair] = 1
            continue
        weight = coefficient[pair]
        rest = np.float32(1) - weight
        for block in range(blocks.shape[0]):
            for element in range(blocks[block, 0], blocks[block, 1]):
                one, other = rows[first, element], rows[second, element]
                # The nearer of the two is the start, as in torch.lerp: 1 returns the first exactly, 0 the second.
                step = one - other
                mixed[pair, element] = other + weight * step if weight < np.float32(0.5) else one - rest * step
    return True
