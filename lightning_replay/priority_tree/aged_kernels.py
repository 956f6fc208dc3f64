# SPDX-License-Identifier: Apache-2.0
"""Loops of the tree for rows whose probability falls with their age, compiled."""

import numpy as np

from lightning_replay.jit import compiled
from lightning_replay.priority_tree.numba_kernels import INFINITY, ZERO, find_scaled, refresh

_NOTHING = np.float32(0.0)
_LARGEST = float(np.finfo(np.float32).max)


@compiled
def write_values(  # type: ignore[no-untyped-def]
    index, values, births, reference, rate, old_before, gone_before, leaves, sums, minima, starts, counts
):
    """Writes the value of each slot to the half of its age, and 0 to the other half. Slots of -1 are skipped."""
    width = leaves.size // 2
    changed = np.full(2 * index.size, -1)
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
        if leaves[slot] != value:
            leaves[slot] = value
            changed[position] = slot
        if leaves[width + slot] != value_old:
            leaves[width + slot] = value_old
            changed[index.size + position] = width + slot
    refresh(changed, leaves, sums, minima, starts, counts)


@compiled
def bounds(scale, floor, leaves, sums, minima, starts, counts):  # type: ignore[no-untyped-def]
    """Returns the sum and the smallest positive of all values, with the halves times ``scale`` and ``floor``."""
    half = counts[-1] // 2
    mass, mass_old = ZERO, ZERO
    least, least_old = INFINITY, INFINITY
    for node in range(starts[counts.size - 1], starts[counts.size - 1] + half):
        mass += sums[node]
        mass_old += sums[node + half]
        least = min(least, minima[node])
        least_old = min(least_old, minima[node + half])
    # Without float64, NumPy multiplies in float32 if the loops are not compiled.
    smallest = min(np.float64(least) * scale, np.float64(least_old) * floor if floor > 0 else INFINITY)
    return mass * scale + mass_old * floor, smallest


@compiled
def find_aged(points, index, value, scale, floor, leaves, sums, minima, starts, counts):  # type: ignore[no-untyped-def]
    """Writes the slots at points ``[n]`` in [0, 1) of the sum to ``index``, and their values to ``value``."""
    total, smallest = bounds(scale, floor, leaves, sums, minima, starts, counts)
    find_scaled(points * total, index, scale, floor, leaves, sums, starts, counts)
    width = leaves.size // 2
    for position in range(index.size):
        is_old = index[position] >= width
        value[position] = np.float64(leaves[index[position]]) * (floor if is_old else scale)
        index[position] -= width if is_old else 0
    return total, smallest


@compiled
def draw_aged(  # type: ignore[no-untyped-def]
    uniform, exponent, over_batch, index, weight, scale, floor, leaves, sums, minima, starts, counts
):
    """Draws slots like :func:`find_aged`. ``weight`` is ``(value / smallest) ** exponent``."""
    value = np.empty(index.size)
    _, smallest = find_aged(uniform, index, value, scale, floor, leaves, sums, minima, starts, counts)
    if over_batch:
        smallest = value.min()
    for position in range(index.size):
        # A power in float32 shortens the loops by a fifth. Only with a floor of 0 can the quotient be too large for it.
        weight[position] = np.float32(min(value[position] / smallest, _LARGEST)) ** exponent


@compiled
def slots_at(points, slots, decaying, stored, rate, floor, newest, capacity):  # type: ignore[no-untyped-def]
    """Writes the slots at points in [0, 1) of the mass of ``stored`` rows of ages 0, 1, ... in a ring to ``slots``.

    The first ``decaying`` rows have the weights ``2 ** (-age * rate)``, the others ``floor``. Returns the mass.
    """
    slope = rate * np.log(2.0)
    # The mass of the first n rows is a geometric series, (1 - exp(-slope * n)) / loss. Its inverse is a logarithm.
    loss = -np.expm1(-slope) if slope > 0 else 0.0
    unit = loss / slope if slope > 0 else 1.0
    mass = -np.expm1(-slope * decaying) / loss if slope > 0 else np.float64(decaying)
    total = mass + floor * (stored - decaying)
    for position in range(points.size):
        point = points[position] * total
        if point < mass:
            # The quotient cancels the rounding of the difference, so this is log1p. The loop takes a fifth less time.
            left = 1.0 - point * loss
            age = min(int(point * unit * np.log(left) / (left - 1.0) if left < 1.0 else point), decaying - 1)
        else:
            age = min(decaying + int((point - mass) / floor), stored - 1)
        slots[position] = newest - age + (capacity if age > newest else 0)
    return total
