# SPDX-License-Identifier: Apache-2.0
"""Back end of a priority tree whose rows become less likely as they age."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_replay.ages import RowAges
from lightning_replay.priority_tree import aged_kernels
from lightning_replay.priority_tree import numba_kernels as kernels
from lightning_replay.priority_tree.numba_kernels import FAN_OUT
from lightning_replay.priority_tree.numba_tree import NO_GENERATIONS, NumbaTree

# Nodes of each half at the level at which a search begins. Fewer nodes take one level more, and more nodes a longer
# first step.
MOST_NODES = 256


class AgedTree:
    """Back end of :class:`lightning_replay.priority_tree.PriorityTree` for an age. It validates nothing.

    The first half of the leaves has the decaying rows, whose weights grow with their births instead of falling with
    time. The second half has the rows at the floor. The levels end when no node has leaves of both halves, so one
    search from there serves both.

    Args:
        capacity: Number of slots.
        ages: Births of rows, shared by the trees of all tables.
        births: Births by slot of this tree, float64 ``[capacity]``: the births of ``ages``, or births by place in a
            table.
    """

    device: torch.device = torch.device("cpu")

    def __init__(self, capacity: int, ages: RowAges, births: np.ndarray) -> None:
        self._ages = ages
        self._births = births
        span = FAN_OUT
        while capacity > MOST_NODES * span:
            span *= FAN_OUT
        self._width = -(-capacity // span) * span
        self._tree = NumbaTree(2 * self._width, self.device)
        counts = self._tree.arrays[4]
        self._arrays = (*self._tree.arrays[:4], counts[counts >= 2 * self._width // span])
        # Values before any age.
        self._values = np.zeros(self._width, dtype=np.float32)
        # The loops that check and write values get this tree, which has no level above the leaves.
        self._leaves_only = (self._values, *self._arrays[1:4], self._arrays[4][:1])
        self._renewal = ages.renewals
        self._capacity = capacity

    def replace_rows(self, index: np.ndarray) -> None:
        """Writes the values of slots, ``[n]``, by their present ages, and skips -1."""
        if self._renewal != self._ages.renewals:
            self._renew()
        elif len(index):
            ages = self._ages
            readings = ages.reference, ages.rate, ages.old_before, ages.gone_before
            aged_kernels.write_values(index, self._values, self._births, *readings, *self._arrays)

    def _renew(self) -> None:
        ages = self._ages
        values = self._values[: self._capacity]
        is_decaying = self._births >= max(ages.old_before, ages.gone_before)
        is_old = ~is_decaying & (self._births >= ages.gone_before)
        factor = np.exp2((self._births - ages.reference) * ages.rate)
        leaves = np.zeros((2, self._width), dtype=np.float32)
        leaves[:, : self._capacity] = values * factor * is_decaying, values * is_old
        self._tree.load_leaves(torch.from_numpy(leaves.reshape(-1)))
        self._renewal = ages.renewals

    @property
    def _factors(self) -> tuple[float, float]:
        if self._renewal != self._ages.renewals:
            self._renew()
        return self._ages.scale, self._ages.age.floor

    def set(self, index: Tensor, value: Tensor | float) -> None:
        """Writes values ``[n]`` to slots ``[n]``. The last of duplicates stays."""
        self._values[index.numpy()] = np.asarray(value)
        self.replace_rows(index.numpy())

    def set_checked(self, index: Tensor, priority: Tensor, offset: float, exponent: float, limit: int) -> float | None:
        """Writes checked priorities and returns the largest, or ``None`` if one is invalid."""
        given = index.numpy(), priority.numpy(), False, NO_GENERATIONS, NO_GENERATIONS
        largest, _ = kernels.update(*given, np.float32(offset), np.float32(exponent), limit, *self._leaves_only)
        if largest == -2.0:
            return None
        self.replace_rows(index.numpy())
        return largest

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
        largest, stale = kernels.update(index, error, True, generation, stored, *options, *self._leaves_only)
        if largest == -2.0:
            return None
        self.replace_rows(index)
        return largest, stale

    def set_rows(
        self, rows: np.ndarray, slot_of: np.ndarray, priority: np.ndarray, offset: float, exponent: float
    ) -> None:
        """Writes the powered priorities of rows to their places, without checks."""
        kernels.set_rows(rows, slot_of, priority, np.float32(offset), np.float32(exponent), *self._leaves_only)
        places = slot_of[rows].astype(np.int64)
        is_held = places >= 0
        self._births[places[is_held]] = self._ages.births[rows[is_held]]
        self.replace_rows(places)

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        """Writes one value to slots. Returns ``False`` if a slot is invalid."""
        slots = np.array([index]) if isinstance(index, int) else index.numpy()
        if not kernels.fill_checked(slots, value, limit, *self._leaves_only):
            return False
        self.replace_rows(slots)
        return True

    def get(self, index: Tensor) -> Tensor:
        """Returns the values of slots before any age, float32 ``[n]``."""
        return torch.from_numpy(self._values[index.numpy()])

    def draw(self, uniform: Tensor, over_batch: bool, exponent: float) -> tuple[Tensor, Tensor]:
        """Returns slots ``[n]`` at ``uniform`` ``[n]`` and their powered ratios to the least likely slot."""
        index = np.empty(uniform.numel(), np.int64)
        weight = np.empty(uniform.numel(), np.float32)
        drawn = uniform.numpy(), np.float32(exponent), over_batch, index, weight
        aged_kernels.draw_aged(*drawn, *self._factors, *self._arrays)
        return torch.from_numpy(index), torch.from_numpy(weight)

    def draw_at(self, points: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Returns slots ``[n]`` at points in [0, 1) and their probabilities, float64 ``[n]``."""
        index = np.empty(len(points), np.int64)
        value = np.empty(len(points))
        total, _ = aged_kernels.find_aged(points, index, value, *self._factors, *self._arrays)
        return torch.from_numpy(index), value / total

    def bounds(self) -> tuple[float, float]:
        """Returns the sum and the smallest of all values at their present ages, as numbers."""
        return aged_kernels.bounds(*self._factors, *self._arrays)

    def leaves(self) -> Tensor:
        """Returns a copy of all values before any age, float32 ``[capacity]``."""
        return torch.from_numpy(self._values[: self._capacity].copy())

    def drawn_by(self) -> Tensor:
        """Returns the values in proportion to which slots are drawn, float64 ``[capacity]``."""
        scale, floor = self._factors
        decaying, old = self._tree.leaves().double().reshape(2, -1)[:, : self._capacity]
        return decaying * scale + old * floor

    def load_leaves(self, leaves: Tensor) -> None:
        """Replaces all values before any age, float32 ``[capacity]``."""
        self._values[: self._capacity] = leaves.numpy()
        self._renew()

    @property
    def nbytes(self) -> int:
        """Size of the tree and the values in bytes."""
        return self._tree.nbytes + self._values.nbytes
