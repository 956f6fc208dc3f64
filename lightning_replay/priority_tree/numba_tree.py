# SPDX-License-Identifier: Apache-2.0
"""Sums and minima over slots in numba, for the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_replay.priority_tree import numba_kernels as kernels
from lightning_replay.priority_tree.numba_kernels import FAN_OUT

CACHE_LINE = 64
# Strided as generations in a batch and in packed rows are, so that kernels are compiled once.
_NO_GENERATIONS = np.zeros((2, 2), np.int64)[:, 0]


def _aligned(size: int, dtype: type) -> np.ndarray:
    """Returns zeros that begin on a cache line, so that a block of leaves lies in one."""
    wanted = size * np.dtype(dtype).itemsize
    raw = np.zeros(wanted + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + wanted].view(dtype)


class NumbaTree:
    """Back end of :class:`lightning_replay.priority_tree.PriorityTree` for the CPU; validates nothing.

    Node ``n`` of level ``l`` covers children ``16 n`` to ``16 n + 15`` of level ``l - 1``; level 0 are the leaves,
    the levels above lie one after the other in ``sums`` and ``minima``.
    """

    device: torch.device = torch.device("cpu")

    def __init__(self, capacity: int, device: torch.device) -> None:
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
        self._arrays = (self._leaves, self._sums, self._minima, self._starts, self._counts)
        self._one_slot = np.zeros(1, np.int64)
        self._root = int(self._starts[-1])
        self._capacity = capacity

    def set(self, index: Tensor, value: Tensor) -> None:
        kernels.set(index.numpy(), value.numpy(), *self._arrays)

    def set_checked(self, index: Tensor, priority: Tensor, offset: float, exponent: float, limit: int) -> float | None:
        largest, _ = kernels.update(
            index.numpy(),
            priority.numpy(),
            False,
            _NO_GENERATIONS,
            _NO_GENERATIONS,
            np.float32(offset),
            np.float32(exponent),
            limit,
            *self._arrays,
        )
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
        options = np.float32(offset), np.float32(exponent), limit
        largest, late = kernels.update(index, error, True, generation, stored, *options, *self._arrays)
        return None if largest == -2.0 else (largest, late)

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        if isinstance(index, int):
            slots = self._one_slot
            slots[0] = index
        else:
            slots = index.numpy()
        return kernels.fill_checked(slots, value, limit, *self._arrays)

    def get(self, index: Tensor) -> Tensor:
        return torch.from_numpy(self._leaves[index.numpy()])

    def find(self, prefix_sum: Tensor) -> Tensor:
        index = np.empty(prefix_sum.numel(), np.int64)
        kernels.find(np.maximum(prefix_sum.numpy(), 0.0), index, self._leaves, self._sums, self._starts, self._counts)
        return torch.from_numpy(index)

    def draw(self, uniform: Tensor, over_batch: bool, exponent: float) -> tuple[Tensor, Tensor]:
        index = np.empty(uniform.numel(), np.int64)
        weight = np.empty(uniform.numel(), np.float32)
        kernels.draw(uniform.numpy(), np.float32(exponent), over_batch, index, weight, *self._arrays)
        return torch.from_numpy(index), torch.from_numpy(weight)

    def draw_at(self, points: np.ndarray) -> tuple[Tensor, np.ndarray]:
        index, total = np.empty(len(points), np.int64), self._sums[self._root]
        kernels.find(points * total, index, self._leaves, self._sums, self._starts, self._counts)
        return torch.from_numpy(index), self._leaves[index] / total

    def total(self) -> Tensor:
        return torch.tensor(self._sums[self._root], dtype=torch.float64, device="cpu")

    def min(self) -> Tensor:
        return torch.tensor(self._minima[self._root], dtype=torch.float32, device="cpu")

    def bounds(self) -> tuple[float, float]:
        return float(self._sums[self._root]), float(self._minima[self._root])

    def has_mass(self) -> bool:
        return bool(self._sums[self._root] > 0)

    def leaves(self) -> Tensor:
        return torch.from_numpy(self._leaves[: self._capacity].copy())

    def load_leaves(self, leaves: Tensor) -> None:
        self._leaves[: self._capacity] = leaves.numpy()
        self._rebuild()

    def clear(self) -> None:
        self._leaves.fill(0.0)
        self._rebuild()

    def _rebuild(self) -> None:
        # As many entries as nodes above the leaves, over all slots, so that every level is recomputed whole.
        span = np.zeros(int(self._counts[1]) + 1, np.int64)
        span[-1] = self._capacity - 1
        kernels.refresh(span, *self._arrays)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)
