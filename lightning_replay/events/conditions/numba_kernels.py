# SPDX-License-Identifier: Apache-2.0
"""Comparisons of conditions, compiled."""

from __future__ import annotations

from lightning_replay.compiled import compiled


@compiled
def evaluate(numbers, columns, lows, highs, are_every, start, parts, held):  # type: ignore[no-untyped-def]
    """Fills bool ``[C + K, N]``: which of C comparisons hold for float64 ``[columns, N]``, then which combinations."""
    number_of_comparisons, count = columns.size, numbers.shape[1]
    for test in range(number_of_comparisons):
        column, low, high = columns[test], lows[test], highs[test]
        for row in range(count):
            held[test, row] = (numbers[column, row] >= low) & (numbers[column, row] <= high)
    for combination in range(are_every.size):
        result, is_every = number_of_comparisons + combination, are_every[combination]
        held[result] = is_every
        for place in range(start[combination], start[combination + 1]):
            part = parts[place]
            for row in range(count):
                if is_every:
                    held[result, row] &= held[part, row]
                else:
                    held[result, row] |= held[part, row]
