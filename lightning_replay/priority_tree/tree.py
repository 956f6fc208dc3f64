# SPDX-License-Identifier: Apache-2.0
"""The priority index: sum and minimum over slots, and the slot where a cumulative sum is passed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_replay.extras import missing_extra
from lightning_replay.memory import check_free
from lightning_replay.priority_tree.torch_tree import TorchTree
from lightning_replay.validation import checked_choice, checked_count


def _choose_backend(backend: str, device: torch.device) -> str:
    checked_choice("backend", backend, ("auto", "torch", "numba"))
    has_numba = importlib.util.find_spec("numba") is not None
    if backend == "numba" and not has_numba:
        raise missing_extra("backend='numba'", "numba", "numba", "or use backend='torch'")
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend='numba' runs on the CPU only; got device {device}. Use backend='torch' there.")
    if device.type == "meta":
        raise ValueError("device is 'meta', which keeps no values; it must be one that does, such as 'cpu' or 'cuda'")
    if backend == "auto":
        return "numba" if has_numba and device.type == "cpu" else "torch"
    return backend


def _with_number(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class PriorityTree:
    """Flat tree of wide fan-out over slots: ``find(x)`` is the first slot whose cumulative sum exceeds ``x``.

    Leaves are float32; every sum above them is float64 and recomputed from its children at each write, so that
    no error adds up and small values stay reachable next to large sums, where trees of float32 sums lose them.
    Nothing is validated here, the samplers do that. On CUDA no method waits for the device except
    :meth:`has_mass`, :meth:`set_checked` and :meth:`fill_checked`.

    Args:
        capacity: slots.
        device: where the tree lives and where indices and values are expected.
        backend: ``"numba"`` (CPU), ``"torch"`` (any device), or ``"auto"``: numba on the CPU where it is installed.

    Example:
        >>> tree = PriorityTree(4, backend="torch")
        >>> tree.set(torch.tensor([0, 1, 3]), torch.tensor([1.0, 0.0, 2.0]))
        >>> tree.find(torch.tensor([0.0, 0.5, 1.0, 2.9, 3.0]))
        tensor([0, 0, 3, 3, 3])
        >>> tree.total(), tree.min(), tree.argmin()
        (tensor(3., dtype=torch.float64), tensor(1.), tensor(1))
    """

    def __init__(self, capacity: int, *, device: torch.device | str = "cpu", backend: str = "auto") -> None:
        self.capacity = checked_count("capacity", capacity, of="slots")
        self.device = _with_number(device)
        self.backend = _choose_backend(backend, self.device)
        check_free(4 * self.capacity, f"a priority tree of {self.capacity:,} slots", self.device)
        self._tree: Any
        if self.backend == "numba":
            from lightning_replay.priority_tree.numba_tree import NumbaTree

            self._tree = NumbaTree(self.capacity, self.device)
        else:
            self._tree = TorchTree(self.capacity, self.device)

    def set(self, index: Tensor, value: Tensor | float) -> None:
        """Writes values; of several for one slot the last stays. 0 means present but never drawn.

        Args:
            index: int64 ``[n]``.
            value: ``[n]`` or a number for all, finite and non-negative.
        """
        index = self._as(index, torch.int64)
        # Adding 0 turns -0.0, which marks an absent slot, into a present zero.
        if isinstance(value, Tensor):
            value = self._as(value, torch.float32).expand(index.shape) + 0.0
        else:
            value = torch.full(index.shape, value + 0.0, dtype=torch.float32, device=self.device)
        if index.numel():
            self._tree.set(index, value)

    def remove(self, index: Tensor) -> None:
        """Makes slots absent: never drawn, and no longer candidates of :meth:`argmin`."""
        index = self._as(index, torch.int64)
        if index.numel():
            self._tree.set(index, torch.full(index.shape, -0.0, device=self.device))

    def get(self, index: Tensor) -> Tensor:
        """Values, float32 ``[n]``; 0 for absent slots."""
        return self._tree.get(self._as(index, torch.int64))

    def total(self) -> Tensor:
        """Sum of all values, a float64 scalar on the device."""
        return self._tree.total()

    def min(self) -> Tensor:
        """Smallest positive value, a float32 scalar on the device; infinity when there is none."""
        return self._tree.min()

    def bounds(self) -> tuple[float, float]:
        """Returns the sum of all values and the smallest positive one, as numbers; waits for the device."""
        return self._tree.bounds()

    def argmin(self) -> Tensor:
        """Slot of the smallest present value, zero included, the lowest slot of equals; -1 when none is present.

        The first call builds the levels this needs, later writes keep them.
        """
        return self._tree.argmin()

    def find(self, prefix_sum: Tensor) -> Tensor:
        """First slot whose cumulative sum exceeds ``prefix_sum``, int64 ``[n]``; never one whose value is zero.

        At or past :meth:`total` it is the last slot that still adds to the sum. Only when everything is zero has
        the answer no meaning, see :meth:`has_mass`.
        """
        return self._tree.find(self._as(prefix_sum, torch.float64))

    def draw(self, uniform: Tensor, *, over_batch: bool = False) -> tuple[Tensor, Tensor]:
        """Draws in proportion to the values.

        Args:
            uniform: float64 ``[n]`` in ``[0, 1)``.
            over_batch: see the return value.

        Returns:
            Slots int64 ``[n]``, and each drawn value over the smallest positive one of all slots (of the drawn
            ones with ``over_batch``), float32 ``[n]``, at least 1.
        """
        return self._tree.draw(uniform, over_batch)

    def has_mass(self) -> bool:
        """Whether any value is positive."""
        return self._tree.has_mass()

    def set_checked(self, index: Tensor, priority: Tensor, value: Tensor, limit: int) -> float | Tensor | None:
        """Like :meth:`set` for entries found sound in the same pass.

        Args:
            index: int64 ``[n]``, n > 0; sound in ``[-1, limit)``, -1 is skipped.
            priority: float32 ``[n]`` that ``value`` was computed from; sound when finite and non-negative.
            value: float32 ``[n]``.
            limit: slots that may be written.

        Returns:
            The largest priority written (a scalar tensor on CUDA), -1 when every entry was skipped, or ``None`` with
            nothing written when an entry is unsound. While a CUDA graph is captured unsound entries are skipped.
        """
        return self._tree.set_checked(index, priority, value, limit)

    def fill_checked(self, index: Tensor | int, value: float, limit: int) -> bool:
        """One value for every slot, fast for a run of them; ``False``, nothing written, as in :meth:`set_checked`."""
        return self._tree.fill_checked(index, value, limit)

    def clear(self) -> None:
        """Makes every slot absent."""
        self._tree.clear()

    def leaves(self) -> Tensor:
        """A copy of all values, float32 ``[capacity]``; -0.0 where absent."""
        return self._tree.leaves()

    def state_dict(self) -> dict[str, Any]:
        """The leaves; all else follows from them."""
        return {"leaves": self.leaves()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the leaves and recomputes the sums."""
        leaves = state_dict["leaves"]
        if leaves.shape != (self.capacity,):
            raise ValueError(
                f"the saved tree has {leaves.numel()} slots and this one {self.capacity}; "
                "build it with the saved capacity"
            )
        self._tree.load_leaves(leaves.to(torch.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of leaves, sums and minima."""
        return self._tree.nbytes

    def _as(self, values: Tensor | float, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)
