# SPDX-License-Identifier: Apache-2.0
"""Sums over slots in plain torch, on any device: every draw adds all values up, and nothing waits for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import threshold

_LARGEST_SUM = 2.0**62
_LEAST = 2.0**-149  # The least float32 above 0.


class CumulativeSums:
    """Back end of :class:`lightning_replay.priority_tree.PriorityTree` for any device. Validates only if stated.

    A draw scales all values by one power of 2 to whole numbers, whose sum is about 2**62, and adds them up in int64.
    Whole numbers are added without rounding, in any order. The cumulative sums are therefore monotone and the same at
    every run, and a value of 0 is never found. A value is exact from 2**-38 of the sum on. Smaller ones are rounded up
    to a multiple of 2**-62 of the sum.
    """

    # On a GPU, the time of a draw is that of starting its kernels. A tree needs several for each of its levels.

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = device
        self._capacity = capacity
        # Entries that are skipped are written to one extra slot.
        self._leaves = torch.zeros(capacity + 1, dtype=torch.float32, device=device)
        self._skipped = torch.full((), capacity, dtype=torch.int64, device=device)

    @property
    def _values(self) -> Tensor:
        return self._leaves[: self._capacity]

    def set(self, index: Tensor, value: Tensor | float) -> None:
        """Writes values ``[n]``, or one for all, to slots ``[n]``. The last of duplicates stays."""
        if isinstance(value, Tensor) and value.ndim:
            # Duplicates write one and the same value, in whatever order a device writes them.
            ordered, order = torch.sort(index, stable=True)
            value = value[order[torch.searchsorted(ordered, index, right=True) - 1]]
        self._leaves[index] = value

    def set_kept(self, index: Tensor, value: Tensor, is_kept: Tensor) -> None:
        """Writes the values ``[n]`` that are kept, bool ``[n]``, to their slots. The last of duplicates stays."""
        self.set(torch.where(is_kept, index, self._skipped), value)

    def set_checked(self, index: Tensor, priority: Tensor, offset: float, exponent: float, limit: int) -> float | None:
        """Writes checked priorities and returns the largest, or ``None`` if one is invalid. Waits for the device."""
        value = priority.add(offset).pow_(exponent)
        is_sound = (priority >= 0) & (value < torch.inf)
        is_kept = (index >= 0) & (index < limit) & is_sound
        if not bool((is_kept | ((index == -1) & is_sound)).all()):
            return None
        self.set_kept(index, value, is_kept)
        return float(torch.where(is_kept, priority, -1.0).amax())

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        """Writes one value to slots. Returns ``False`` if a slot is invalid. Waits for the device."""
        index = torch.as_tensor(index, device=self.device).reshape(-1)
        if bool(((index < -1) | (index >= limit)).any()):
            return False
        self.set(torch.where(index < 0, self._capacity, index), value)
        return True

    def get(self, index: Tensor) -> Tensor:
        """Returns the values of slots, float32 ``[n]``."""
        return self._leaves[index]

    def total(self) -> Tensor:
        """Returns the sum of all values, a float64 scalar on the device."""
        return self._values.sum(dtype=torch.float64)

    def min(self) -> Tensor:
        """Returns the smallest positive value, a float32 scalar on the device."""
        return threshold(self._values, 0.0, torch.inf).amin()

    def bounds(self) -> tuple[float, float]:
        """Returns the sum and the smallest positive value, and waits for the device."""
        return float(self.total()), float(self.min())

    def draw(self, uniform: Tensor, over_batch: bool, exponent: float | Tensor) -> tuple[Tensor, Tensor]:
        """Returns slots ``[n]`` at ``uniform`` ``[n]`` and their powered ratios to the minimum."""
        cumulative, _ = self._cumulative()
        index = _first_above(cumulative, (uniform * cumulative[-1]).long())
        value = self._leaves.index_select(0, index)
        return index, (value / (value.amin() if over_batch else self.min())).pow_(exponent)

    def draw_at(self, points: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Returns slots ``[n]`` at points in [0, 1) and their probabilities, float64 ``[n]``."""
        total = float(self.total())
        index = self.find(torch.from_numpy(points * total).to(self.device))
        return index, self.get(index).cpu().numpy().astype(np.float64) / total

    def find(self, prefix_sum: Tensor) -> Tensor:
        """Returns the first slots whose cumulative sums exceed ``prefix_sum``, int64 ``[n]``."""
        cumulative, scale = self._cumulative()
        return _first_above(cumulative, (prefix_sum * scale).clamp_(0.0, _LARGEST_SUM).long())

    def _cumulative(self) -> tuple[Tensor, Tensor]:
        """Returns the cumulative sums of scaled values, int64 ``[capacity]``, and the scale, a float64 scalar."""
        total = self.total().clamp_min_(_LEAST)
        # The sum is its mantissa times a power of 2. The quotients are powers of 2, and so without rounding.
        scale = _LARGEST_SUM / (total / torch.frexp(total).mantissa)
        scaled = self._values.double().mul_(scale).ceil_()
        return scaled.long().cumsum(0), scale

    def leaves(self) -> Tensor:
        """Returns a copy of all values, float32 ``[capacity]``."""
        return self._values.clone()

    def load_leaves(self, leaves: Tensor) -> None:
        """Replaces all values, float32 ``[capacity]``."""
        self._values.copy_(leaves)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self._leaves.nbytes


def _first_above(cumulative: Tensor, points: Tensor) -> Tensor:
    # At or past the sum, the last slot that adds to it is found. If all values are 0, it is the first slot.
    return torch.searchsorted(cumulative, torch.minimum(points, cumulative[-1] - 1), right=True)
