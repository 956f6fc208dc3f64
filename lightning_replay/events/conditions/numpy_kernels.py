# SPDX-License-Identifier: Apache-2.0
"""What ``numba_kernels`` computes, in NumPy, where numba is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lightning_replay.events.conditions.comparisons import Combinations, Comparisons


def evaluate(numbers: np.ndarray, comparisons: Comparisons, combinations: Combinations, held: np.ndarray) -> None:
    """Fills bool ``[C + K, N]``: which of C comparisons hold for float64 ``[columns, N]``, then which combinations."""
    count, given = len(comparisons.column), numbers[comparisons.column]
    held[:count] = (given >= comparisons.low[:, None]) & (given <= comparisons.high[:, None])
    for place, is_every in enumerate(combinations.is_every.tolist()):
        parts = held[combinations.parts[combinations.start[place] : combinations.start[place + 1]]]
        held[count + place] = parts.all(0) if is_every else parts.any(0)
