# SPDX-License-Identifier: Apache-2.0
"""Loops of the pair of trees for rows whose probability falls with their age, compiled."""

import numpy as np

from lightning_replay.jit import compiled
from lightning_replay.priority_tree.numba_kernels import find, refresh

_NOTHING = np.float32(0.0)


@compiled
def write_values(  # type: ignore[no-untyped-def]
    index, values, births, reference, rate, old_before, gone_before,
    decaying, decaying_sums, decaying_minima, old, old_sums, old_minima, starts, counts,
):  # fmt: skip
    """Writes the value of each slot to the tree of its age, and 0 to the other tree; slots of -1 are skipped."""
    changed, changed_old = np.full(index.size, -1), np.full(index.size, -1)
    for position in range(index.size):
        slot = index[position]
        if slot < 0:
            continue
        value, value_old = _NOTHING, _NOTHING
        if births[slot] >= gone_before:
            if births[slot] < old_before:
                value_old = values[slot]
            else:
                value = np.float32(values[slot] * 2.0 ** ((births[slot] - reference) * rate))
        if decaying[slot] != value:
            decaying[slot] = value
            changed[position] = slot
        if old[slot] != value_old:
            old[slot] = value_old
            changed_old[position] = slot
    refresh(changed, decaying, decaying_sums, decaying_minima, starts, counts)
    refresh(changed_old, old, old_sums, old_minima, starts, counts)


@compiled
def find_aged(  # type: ignore[no-untyped-def]
    points, index, share, scale, floor,
    decaying, decaying_sums, decaying_minima, old, old_sums, old_minima, starts, counts,
):  # fmt: skip
    """Writes the slots at points ``[n]`` in [0, 1) of the whole mass to ``index``, and their shares to ``share``."""
    root = starts[counts.size - 1]
    mass = decaying_sums[root] * scale
    total = mass + old_sums[root] * floor
    is_decaying = points * total < mass
    number = int(is_decaying.sum())
    found, found_old = np.empty(number, np.int64), np.empty(index.size - number, np.int64)
    find(points[is_decaying] * (total / scale), found, decaying, decaying_sums, starts, counts)
    if number < index.size:
        find((points[~is_decaying] * total - mass) / floor, found_old, old, old_sums, starts, counts)
    taken, taken_old = 0, 0
    for position in range(index.size):
        if is_decaying[position]:
            index[position] = found[taken]
            share[position] = decaying[found[taken]] * (scale / total)
            taken += 1
        else:
            index[position] = found_old[taken_old]
            share[position] = old[found_old[taken_old]] * (floor / total)
            taken_old += 1


@compiled
def draw_aged(  # type: ignore[no-untyped-def]
    uniform, exponent, over_batch, index, weight, scale, floor,
    decaying, decaying_sums, decaying_minima, old, old_sums, old_minima, starts, counts,
):  # fmt: skip
    """Draws slots like :func:`find_aged`; ``weight`` is ``(share / smallest share) ** exponent``."""
    share = np.empty(index.size)
    find_aged(
        uniform, index, share, scale, floor,
        decaying, decaying_sums, decaying_minima, old, old_sums, old_minima, starts, counts,
    )  # fmt: skip
    root = starts[counts.size - 1]
    total = decaying_sums[root] * scale + old_sums[root] * floor
    if over_batch:
        smallest = share.min()
    else:
        # The quotient comes first, because NumPy multiplies a number in float32 if the loops are not compiled.
        smallest = decaying_minima[root] * (scale / total)
        if floor > 0:
            smallest = min(smallest, old_minima[root] * (floor / total))
    for position in range(index.size):
        weight[position] = (share[position] / smallest) ** exponent


@compiled
def ages_at(points, decaying, stored, rate, floor, ages, newest, capacity, slots):  # type: ignore[no-untyped-def]
    """Writes the ages and slots at points in [0, 1) of the mass of ``stored`` rows of ages 0, 1, ... in a ring.

    The first ``decaying`` rows have the weights ``2 ** (-age * rate)``, the others ``floor``. Returns the mass.
    """
    slope = rate * np.log(2.0)
    # The mass of the first n rows is a geometric series, (1 - exp(-slope * n)) / loss. Its inverse is a logarithm.
    loss = -np.expm1(-slope) if slope > 0 else 1.0
    mass = -np.expm1(-slope * decaying) / loss if slope > 0 else np.float64(decaying)
    total = mass + floor * (stored - decaying)
    for position in range(points.size):
        point = points[position] * total
        if point < mass:
            age = -np.log1p(-point * loss) / slope if slope > 0 else point
            ages[position] = min(int(age), decaying - 1)
        else:
            ages[position] = min(decaying + int((point - mass) / floor), stored - 1)
        slots[position] = newest - ages[position]
        if slots[position] < 0:
            slots[position] += capacity
    return total
