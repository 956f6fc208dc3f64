# SPDX-License-Identifier: Apache-2.0
"""Sums and minima over slots: compiled trees on a CPU, and cumulative sums in torch on devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.free_memory import check_free
from lightning_replay.options import checked_choice, checked_count
from lightning_replay.priority_tree.cumulative_sums import CumulativeSums
from lightning_replay.priority_tree.numba_tree import NumbaTree


class PriorityTree:
    """Flat tree of wide fan-out over slots: ``find(x)`` is the first slot whose cumulative sum exceeds ``x``.

    Leaves are float32. Every sum above them is float64 and recomputed from its children at each write. So no error
    accumulates, and small values can be drawn next to large sums. Trees of float32 sums lose such values. On devices
    there is no tree: each draw adds all values up, see
    :class:`~lightning_replay.priority_tree.cumulative_sums.CumulativeSums`. Values are validated by the samplers. Only
    :meth:`has_mass`, :meth:`bounds`, :meth:`set_checked`, and :meth:`fill_checked` wait for a device.

    Args:
        capacity: Number of slots.
        device: Device of the tree, indices, and values.
        backend: Back end: ``"numba"`` (CPU), ``"torch"`` (any device), or ``"auto"``: numba on the CPU, torch
            elsewhere. On the CPU, a draw with ``"torch"`` reads all values.
        ages: Object of :mod:`lightning_replay.ages` by which slots become less likely, on the CPU. ``None`` draws in
            proportion to the values.
        has_places: Whether slots of this tree are places in a table, whose rows :meth:`set_rows` sets.

    Example:
        >>> tree = PriorityTree(4, backend="torch")
        >>> tree.set(torch.tensor([0, 1, 3]), torch.tensor([1.0, 0.0, 2.0]))
        >>> tree.find(torch.tensor([0.0, 0.5, 1.0, 2.9, 3.0]))
        tensor([0, 0, 3, 3, 3])
        >>> tree.total(), tree.min()
        (tensor(3., dtype=torch.float64), tensor(1.))
    """

    def __init__(
        self,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        ages: Any = None,
        has_places: bool = False,
    ) -> None:
        self.capacity: int = checked_count("capacity", capacity, of="slots")
        self.device: torch.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.backend: Any = checked_choice("backend", backend, ("auto", "torch", "numba"))
        if backend == "numba" and self.device.type != "cpu":
            raise ValueError(f"backend='numba' runs on the CPU only; got device {self.device}. Use 'torch' there.")
        if self.device.type == "meta":
            raise ValueError("device is 'meta', which keeps no values; it must be one such as 'cpu' or 'cuda'")
        if backend == "auto":
            self.backend = "numba" if self.device.type == "cpu" else "torch"
        check_free(4 * self.capacity, f"a priority tree of {self.capacity:,} slots", self.device)
        self.is_aged: bool = ages is not None
        if ages is not None:
            from lightning_replay.priority_tree.aged_tree import AgedTree

            self._backend: Any = AgedTree(self.capacity, ages, np.zeros(self.capacity) if has_places else ages.births)
        else:
            self._backend = (NumbaTree if self.backend == "numba" else CumulativeSums)(self.capacity, self.device)

    def set(self, index: Tensor, value: Tensor | float) -> None:
        """Writes values ``[n]``, or one for all, finite and not negative, to slots, int64 ``[n]``.

        Of several for one slot the last stays. Slots of value 0, as at first, are never drawn.
        """
        index = self._as(index, torch.int64)
        if isinstance(value, Tensor):
            value = self._as(value, torch.float32)
            value = value.expand(index.shape).contiguous() if value.ndim else value
        elif self.device.type != "cpu":  # This avoids a copy from the host.
            value = torch.full(index.shape, value, dtype=torch.float32, device=self.device)
        if index.numel():
            self._backend.set(index, value)

    def remove(self, index: Tensor) -> None:
        """Writes 0 to slots."""
        self.set(index, 0.0)

    def get(self, index: Tensor) -> Tensor:
        """Returns values, float32 ``[n]``."""
        return self._backend.get(self._as(index, torch.int64))

    def total(self) -> Tensor:
        """Returns the sum of all values, a float64 scalar on the device."""
        return self._backend.total()

    def min(self) -> Tensor:
        """Returns the smallest positive value, a float32 scalar on the device, or infinity when there is none."""
        return self._backend.min()

    def bounds(self) -> tuple[float, float]:
        """Returns :meth:`total` and :meth:`min` as numbers."""
        return self._backend.bounds()

    def find(self, prefix_sum: Tensor) -> Tensor:
        """Returns the first slot whose cumulative sum exceeds ``prefix_sum``, int64 ``[n]``, none of value zero.

        At or past :meth:`total` it is the last slot that adds to the sum. Meaningless without :meth:`has_mass`.
        """
        return self._backend.find(self._as(prefix_sum, torch.float64))

    def set_kept(self, index: Tensor, value: Tensor, is_kept: Tensor) -> None:
        """Writes the values, float32 ``[n]``, that are kept, bool ``[n]``, as :meth:`set` (only with torch).

        :meta private:
        """
        self._backend.set_kept(index, value, is_kept)

    def draw(
        self, uniform: Tensor, *, over_batch: bool = False, exponent: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Draws in proportion to the values, by ``uniform``, float64 ``[n]`` in ``[0, 1)``.

        Returns slots int64 ``[n]``, and each drawn value over the smallest positive one of all slots (of the drawn ones
        with ``over_batch``), raised to ``exponent``, float32 ``[n]``.
        """
        return self._backend.draw(uniform, over_batch, exponent)

    def draw_at(self, points: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Returns the slots at points ``[n]`` in [0, 1) of the sum of all values, and their parts in it, float64.

        :meta private:
        """
        return self._backend.draw_at(points)

    def replace_rows(self, index: np.ndarray) -> None:
        """Writes the values of slots, int64 ``[n]``, by their present ages, and skips -1. With ages only.

        :meta private:
        """
        self._backend.replace_rows(index)

    def has_mass(self) -> bool:
        """Returns whether any value is positive.

        :meta private:
        """
        return self._backend.bounds()[0] > 0

    def set_checked(
        self, index: Tensor, priority: Tensor, limit: int, *, offset: float = 0.0, exponent: float = 1.0
    ) -> float | None:
        """Validates priorities, float32 ``[n]``, and writes ``(priority + offset) ** exponent`` as :meth:`set`.

        Slots, int64 ``[n]``, n > 0, are in ``[-1, limit)``. Slots of -1 are skipped. Returns the largest priority
        written, -1 when every entry was skipped, or ``None`` with nothing written when an entry is invalid: not finite,
        or negative.

        :meta private:
        """
        return self._backend.set_checked(index, priority, offset, exponent, limit)

    def update(
        self,
        index: np.ndarray,
        error: np.ndarray,
        generation: np.ndarray,
        stored: np.ndarray,
        limit: int,
        *,
        offset: float,
        exponent: float,
    ) -> tuple[float, int] | None:
        """Writes ``(|error| + offset) ** exponent`` for signed errors, float32 ``[n]``, contiguous (only with numba).

        Rows whose ``generation`` is not that ``stored`` for their slot are stale, and skipped. Returns the largest
        magnitude written, -1 when there was none, and the number of stale rows. Returns ``None``, with nothing written,
        when an error is not finite or a row that is not stale lies outside of ``limit``.
        """
        return self._backend.update(index, error, generation, stored, offset, exponent, limit)

    def set_rows(
        self, rows: np.ndarray, slot_of: np.ndarray, priority: np.ndarray, *, offset: float, exponent: float
    ) -> None:
        """Writes ``(priority[row] + offset) ** exponent`` to the slot of each row, int64 ``[n]`` (only with numba).

        The slot of a row is ``slot_of[row]``. A row with the slot -1 is skipped. Nothing is checked.

        :meta private:
        """
        self._backend.set_rows(rows, slot_of, priority, offset, exponent)

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        """Writes one value to every slot, or returns ``False`` for an invalid slot and writes nothing. Runs are fast.

        :meta private:
        """
        return self._backend.fill_checked(index, value, limit)

    def clear(self) -> None:
        """Writes 0 to every slot."""
        self._backend.load_leaves(torch.zeros(self.capacity, dtype=torch.float32, device="cpu"))

    def leaves(self) -> Tensor:
        """Returns a copy of all values, float32 ``[capacity]``."""
        return self._backend.leaves()

    def masses(self) -> Tensor:
        """Returns the values in proportion to which slots are drawn, float64 ``[capacity]``.

        :meta private:
        """
        return self._backend.drawn_by() if self.is_aged else self.leaves().double()

    def effective_slots(self) -> float:
        """Returns the slots of equal value of which two draws would be as often the same, in O(capacity).

        :meta private:
        """
        values = self.masses()
        square = float(values.square().sum())
        return float(values.sum()) ** 2 / square if square > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the leaves, which determine all else."""
        return {"leaves": self.leaves()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the leaves and recomputes the sums."""
        leaves = state_dict["leaves"]
        if leaves.shape != (self.capacity,):
            raise ValueError(f"{leaves.numel()} slots are saved, this tree has {self.capacity}; build it with as many")
        self._backend.load_leaves(leaves.to(torch.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of leaves, sums and minima."""
        return self._backend.nbytes

    def _as(self, values: Tensor | float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)
