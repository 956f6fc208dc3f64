# SPDX-License-Identifier: Apache-2.0
"""Slots of a storage by counted references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


class Slots:
    """``count`` slots of a storage, each taken while something refers to it, and free otherwise.

    Example:
        >>> slots = Slots(3)
        >>> slots.take(2), slots.num_free
        (array([0, 1]), 1)
        >>> slots.hold(np.array([0, 1])); slots.hold(np.array([1])); slots.release(np.array([0, 1]))
        >>> slots.take(2), slots.references
        (array([2, 0]), array([0, 1, 0], dtype=int32))
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = np.zeros(count, dtype=np.int32)
        # A ring: slots that were freed in order are taken in order, so that a write stays contiguous in memory.
        self._free = np.arange(count)
        self._next = 0
        self.num_free = count
        #: Called with slots, int64 ``[n]``, that are free now.
        self.on_free: Callable[[np.ndarray], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of references and free list."""
        return self.references.nbytes + self._free.nbytes

    def take(self, count: int) -> np.ndarray:
        """Returns ``count`` free slots, int64, free for longest first; nothing refers to them yet."""
        if count > self.num_free:
            raise RuntimeError(
                f"{count} rows are to be written and {self.num_free} of {self.count} slots are free; build the storage "
                "with the writer's num_slots"
            )
        end = self._next + count
        taken = self._free[self._next : end] if end <= self.count else self._wrapped(self._next, count)
        self._next = end % self.count
        self.num_free -= count
        return taken.copy()

    def hold(self, slots: np.ndarray) -> None:
        """Adds a reference to each of these slots; several to a slot given several times."""
        np.add.at(self.references, slots, 1)

    def release(self, slots: np.ndarray) -> None:
        """Removes a reference to each of these slots, all different; those without any become free."""
        left = self.references[slots] - 1
        self.references[slots] = left
        freed = slots[left == 0]
        start = (self._next + self.num_free) % self.count
        if start + len(freed) <= self.count:
            self._free[start : start + len(freed)] = freed
        else:
            self._free.put(np.arange(start, start + len(freed)), freed, mode="wrap")
        self.num_free += len(freed)
        if self.on_free is not None and len(freed):
            self.on_free(freed)

    def release_one(self, slot: int) -> None:
        """:meth:`release` of one slot, in plain numbers."""
        self.references[slot] -= 1
        if not self.references[slot]:
            self._free[(self._next + self.num_free) % self.count] = slot
            self.num_free += 1
            if self.on_free is not None:
                self.on_free(np.array([slot]))

    def _wrapped(self, start: int, count: int) -> np.ndarray:
        return self._free.take(np.arange(start, start + count), mode="wrap")

    def state_dict(self) -> dict[str, Any]:
        """Returns the free slots in order, and the references."""
        order = self._wrapped(self._next, self.num_free)
        return {"free": torch.from_numpy(order), "references": torch.from_numpy(self.references.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        free = state_dict["free"].numpy()
        self._free[: len(free)] = free
        self._next, self.num_free = 0, len(free)
        self.references[:] = state_dict["references"].numpy()
