# SPDX-License-Identifier: Apache-2.0
"""Small numpy models that the property tests compare with."""

from __future__ import annotations

import numpy as np
from torch import Tensor, float64


class PriorityOracle:
    """A priority tree without a tree: one array of values, NaN where absent, and cumulative sums when asked."""

    def __init__(self, capacity: int) -> None:
        self.values = np.full(capacity, np.nan)

    def set(self, index: list[int], value: list[float]) -> None:
        for slot, entry in zip(index, value, strict=True):
            self.values[slot] = np.float32(entry)

    def remove(self, index: list[int]) -> None:
        self.values[index] = np.nan

    @property
    def weights(self) -> np.ndarray:
        return np.nan_to_num(self.values)

    def total(self) -> float:
        return float(self.weights.sum())

    def min(self) -> float:
        return float(np.min(self.weights[self.weights > 0], initial=np.inf))

    def argmin(self) -> int:
        return -1 if np.isnan(self.values).all() else int(np.nanargmin(self.values))

    def find(self, prefix_sum: np.ndarray) -> np.ndarray:
        cumulative = np.cumsum(self.weights)
        last_positive = np.nonzero(self.weights > 0)[0][-1]
        return np.minimum(np.searchsorted(cumulative, prefix_sum, side="right"), last_positive)


def probabilities(priority: Tensor, priority_exponent: float, priority_offset: float) -> Tensor:
    """Equation 1 of prioritized experience replay in float64; Schaul et al. 2016."""
    powered = (priority.to(float64) + priority_offset) ** priority_exponent
    return powered / powered.sum()
