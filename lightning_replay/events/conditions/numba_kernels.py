# SPDX-License-Identifier: Apache-2.0
"""Comparisons of conditions, compiled; imported only where numba is installed. Twin of ``numpy_kernels``."""

from __future__ import annotations

from lightning_replay.compiled import compiled


@compiled
def evaluate(numbers, comparisons, combinations, held):  # type: ignore[no-untyped-def]
    """Fills bool ``[C + K, N]``: which of C comparisons hold for float64 ``[columns, N]``, then which combinations."""
    number_of_comparisons, count = comparisons.column.size, numbers.shape[1]
    for test in range(number_of_comparisons):
        column, low, high = comparisons.column[test], comparisons.low[test], comparisons.high[test]
        for row in range(count):
            held[test, row] = (numbers[column, row] >= low) & (numbers[column, row] <= high)
    for combination in range(combinations.is_every.size):
        result, is_every = number_of_comparisons + combination, combinations.is_every[combination]
        held[result] = is_every
        for place in range(combinations.start[combination], combinations.start[combination + 1]):
            part = combinations.parts[place]
            for row in range(count):
                if is_every:
                    held[result, row] &= held[part, row]
                else:
                    held[result, row] |= held[part, row]
