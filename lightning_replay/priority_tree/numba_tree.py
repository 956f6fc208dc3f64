# SPDX-License-Identifier: Apache-2.0
"""Back end of a priority tree for the CPU: a compiled tree of sums and minima."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_replay.priority_tree import numba_kernels as kernels
from lightning_replay.priority_tree.numba_kernels import FAN_OUT

CACHE_LINE = 64
# Strided as generations in a batch and in packed rows are, so that kernels are compiled once.
NO_GENERATIONS = np.zeros((2, 2), np.int64)[:, 0]


def _aligned(size: int, dtype: type) -> np.ndarray:
    # A block of leaves lies in one cache line.
    wanted = size * np.dtype(dtype).itemsize
    raw = np.zeros(wanted + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + wanted].view(dtype)


class NumbaTree:
    """Back end of :class:`lightning_replay.priority_tree.PriorityTree` for the CPU. It validates nothing."""

    # Node n of level l covers children 16 n to 16 n + 15 of level l - 1. Level 0 holds the leaves. The levels above lie
    # one after the other in sums and minima.

    device: torch.device = torch.device("cpu")

    def __init__(self, capacity: int, device: torch.device) -> None:
        # The number of nodes of each level, up to a single root.
        counts = [capacity]
        while counts[-1] > 1 or len(counts) == 1:
            counts.append(-(-counts[-1] // FAN_OUT))
        padded = [-(-count // FAN_OUT) * FAN_OUT for count in counts]
        starts = [0, *np.cumsum([0, *padded[1:-1]])]
        self._leaves = _aligned(padded[0], np.float32)
        self._sums = _aligned(sum(padded[1:]), np.float64)
        self._minima = _aligned(sum(padded[1:]), np.float32)
        self._minima.fill(np.inf)
        self._starts = np.array(starts, np.int64)
        self._counts = np.array(counts, np.int64)
        #: Arrays that the compiled loops take.
        self.arrays: tuple[np.ndarray, ...] = (self._leaves, self._sums, self._minima, self._starts, self._counts)
        # This array is reused for single rows.
        self._one_slot = np.zeros(1, np.int64)
        self._root = int(self._starts[-1])
        self._capacity = capacity

    def set(self, index: Tensor, value: Tensor | float) -> None:
        """Writes values ``[n]`` to slots ``[n]``. The last of duplicates stays."""
        self._leaves[index.numpy()] = np.asarray(value)  # numpy writes in order: the last duplicate stays
        kernels.refresh(index.numpy(), *self.arrays)

    def set_checked(self, index: Tensor, priority: Tensor, offset: float, exponent: float, limit: int) -> float | None:
        """Writes checked priorities and returns the largest, or ``None`` if one is invalid."""
        given = index.numpy(), priority.numpy(), False, NO_GENERATIONS, NO_GENERATIONS
        # The kernel answers -2 if it refuses.
        largest, _ = kernels.update(*given, np.float32(offset), np.float32(exponent), limit, *self.arrays)
        return None if largest == -2.0 else largest

    def update(
        self,
        index: np.ndarray,
        error: np.ndarray,
        generation: np.ndarray,
        stored: np.ndarray,
        offset: float,
        exponent: float,
        limit: int,
    ) -> tuple[float, int] | None:
        """Writes the priorities of signed errors and returns the largest with the number of stale rows."""
        options = np.float32(offset), np.float32(exponent), limit
        largest, stale = kernels.update(index, error, True, generation, stored, *options, *self.arrays)
        return None if largest == -2.0 else (largest, stale)

    def set_rows(
        self, rows: np.ndarray, slot_of: np.ndarray, priority: np.ndarray, offset: float, exponent: float
    ) -> None:
        """Writes the powered priorities of rows to their slots, without checks."""
        kernels.set_rows(rows, slot_of, priority, np.float32(offset), np.float32(exponent), *self.arrays)

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        """Writes one value to slots. Returns ``False`` if a slot is invalid."""
        if isinstance(index, int):
            slots = self._one_slot
            slots[0] = index
        else:
            slots = index.numpy()
        return kernels.fill_checked(slots, value, limit, *self.arrays)

    def get(self, index: Tensor) -> Tensor:
        """Returns the values of slots, float32 ``[n]``."""
        return torch.from_numpy(self._leaves[index.numpy()])

    def find(self, prefix_sum: Tensor) -> Tensor:
        """Returns the first slots whose cumulative sums exceed ``prefix_sum``, int64 ``[n]``."""
        index = np.empty(prefix_sum.numel(), np.int64)
        kernels.find(np.maximum(prefix_sum.numpy(), 0.0), index, self._leaves, self._sums, self._starts, self._counts)
        return torch.from_numpy(index)

    def draw(self, uniform: Tensor, over_batch: bool, exponent: float) -> tuple[Tensor, Tensor]:
        """Returns slots ``[n]`` at ``uniform`` ``[n]`` and their powered ratios to the minimum."""
        index = np.empty(uniform.numel(), np.int64)
        weight = np.empty(uniform.numel(), np.float32)
        kernels.draw(uniform.numpy(), np.float32(exponent), over_batch, index, weight, *self.arrays)
        return torch.from_numpy(index), torch.from_numpy(weight)

    def draw_at(self, points: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Returns slots ``[n]`` at points in [0, 1) and their probabilities, float64 ``[n]``."""
        index = np.empty(len(points), np.int64)
        total = self._sums[self._root]
        kernels.find(points * total, index, self._leaves, self._sums, self._starts, self._counts)
        return torch.from_numpy(index), self._leaves[index] / total

    def total(self) -> Tensor:
        """Returns the sum of all values, a float64 scalar."""
        return torch.tensor(self._sums[self._root], dtype=torch.float64, device="cpu")

    def min(self) -> Tensor:
        """Returns the smallest positive value, a float32 scalar."""
        return torch.tensor(self._minima[self._root], dtype=torch.float32, device="cpu")

    def bounds(self) -> tuple[float, float]:
        """Returns the sum and the smallest positive value as numbers."""
        return float(self._sums[self._root]), float(self._minima[self._root])

    def leaves(self) -> Tensor:
        """Returns a copy of all values, float32 ``[capacity]``."""
        return torch.from_numpy(self._leaves[: self._capacity].copy())

    def load_leaves(self, leaves: Tensor) -> None:
        """Replaces all values, float32 ``[capacity]``, and recomputes every level."""
        self._leaves[: self._capacity] = leaves.numpy()
        # The index has as many entries as nodes above the leaves, so that every level is recomputed whole.
        span = np.zeros(int(self._counts[1]) + 1, np.int64)
        span[-1] = self._capacity - 1
        kernels.refresh(span, *self.arrays)

    @property
    def nbytes(self) -> int:
        """Size of leaves, sums, and minima in bytes."""
        return sum(array.nbytes for array in self.arrays)
