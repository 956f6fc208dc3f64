# SPDX-License-Identifier: Apache-2.0
"""Small numpy models that the property tests compare with."""

from __future__ import annotations

import numpy as np
from torch import Tensor, float64


class PriorityOracle:
    """A priority tree without a tree: one array of values, and cumulative sums when needed."""

    def __init__(self, capacity: int) -> None:
        self.values = np.zeros(capacity)

    def set(self, index: list[int], value: list[float]) -> None:
        for slot, entry in zip(index, value, strict=True):
            self.values[slot] = np.float32(entry)

    def total(self) -> float:
        return float(self.values.sum())

    def min(self) -> float:
        return float(np.min(self.values[self.values > 0], initial=np.inf))

    def find(self, prefix_sum: np.ndarray) -> np.ndarray:
        cumulative = np.cumsum(self.values)
        last_positive = np.nonzero(self.values > 0)[0][-1]
        return np.minimum(np.searchsorted(cumulative, prefix_sum, side="right"), last_positive)


def probabilities(priority: Tensor, priority_exponent: float, priority_offset: float) -> Tensor:
    """Equation 1 of prioritized experience replay in float64; Schaul et al. 2016."""
    powered = (priority.to(float64) + priority_offset) ** priority_exponent
    return powered / powered.sum()
