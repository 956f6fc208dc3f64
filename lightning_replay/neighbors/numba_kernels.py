# SPDX-License-Identifier: Apache-2.0
"""Compiled updates of neighbour lists, in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_replay.compiled import compiled


@compiled
def pick(index, uniform, choices, slot, picked):  # type: ignore[no-untyped-def]
    """Picks one of the first ``choices[i]`` of the list of each slot i by a number in [0, 1).

    Args:
        index: int64 ``[B]``.
        uniform: float32 ``[B]``.
        choices: float32 ``[L]``, rows to draw from.
        slot: int32 ``[L, M]``.
        picked: int64 ``[B]``, the result.
    """
    for number in range(index.size):
        row = index[number]
        picked[number] = slot[row, np.int64(uniform[number] * choices[row])]


@compiled
def drop(slot, distance, choices, leaving, lowest, highest, num_neighbors):  # type: ignore[no-untyped-def]
    """Removes marked slots from lists; the others keep their order and move to the front.

    Args:
        slot, distance: lists int32 and float32 ``[L, M]``, nearest first; empty places are the slot ``capacity``.
        choices: float32 ``[L]``, rows to draw from.
        leaving: bool ``[capacity + 1]``, the marks; ``capacity`` is unmarked.
        lowest, highest: int32, bounds of the marked slots.
        num_neighbors: most rows to draw from.
    """
    lists, length = slot.shape
    empty, span = np.int32(leaving.size - 1), np.uint32(highest - lowest)
    for row in range(lists):
        # Without a branch, so that the loop is vectorised: most lists have no slot between the bounds.
        within: Any = np.bool_(False)
        for place in range(length):
            within |= np.uint32(slot[row, place] - lowest) <= span
        if not within:
            continue
        kept = 0
        for place in range(length):
            other = slot[row, place]
            if other != empty and not leaving[other]:
                slot[row, kept] = other
                distance[row, kept] = distance[row, place]
                kept += 1
        slot[row, kept:] = empty
        distance[row, kept:] = np.inf
        choices[row] = min(kept, num_neighbors)


@compiled
def enter(  # type: ignore[no-untyped-def]
    slot, distance, choices, radius, points, closest, arriving, queries, empty, num_neighbors
):
    """Enters rows into the lists whose radius reaches them; the radius of a list that has no room for all shrinks.

    Args:
        slot, distance, choices: as in :func:`drop`.
        radius: float32 ``[L]``.
        points: float32 ``[L, >= d]``, the rows that the lists belong to, in their first d columns.
        closest: float32 ``[L]``, squared distance of each to the closest of ``arriving``, as it was found by a product.
        arriving: int32 ``[q]``, the slots of the rows.
        queries: float32 ``[d, q]``, their points.
        empty: int32, the slot in empty places.
        num_neighbors: most rows to draw from.
    """
    length, (width, count) = slot.shape[1], queries.shape
    squares = np.empty(count, dtype=np.float32)
    for row in range(slot.shape[0]):
        reach = radius[row]
        if not max(closest[row], np.float32(0)) < reach:
            continue
        squares[:] = 0
        for feature in range(width):
            value = points[row, feature]
            for number in range(count):
                difference = value - queries[feature, number]
                squares[number] += difference * difference
        stored = 0
        while stored < length and slot[row, stored] != empty:
            stored += 1
        is_overfull = False
        for number in range(count):
            square = squares[number]
            if not square < reach:
                continue
            if stored == length:
                is_overfull = True
                if not square < distance[row, length - 1]:
                    continue
            else:
                stored += 1
            place = stored - 1
            while place > 0 and square < distance[row, place - 1]:
                distance[row, place] = distance[row, place - 1]
                slot[row, place] = slot[row, place - 1]
                place -= 1
            distance[row, place] = square
            slot[row, place] = arriving[number]
        choices[row] = min(stored, num_neighbors)
        if is_overfull:
            radius[row] = distance[row, length - 1]
