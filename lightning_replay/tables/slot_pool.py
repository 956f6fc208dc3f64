# SPDX-License-Identifier: Apache-2.0
"""Slots of a storage by counted references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lightning_replay.tables.arrays import FREED, TAKEN, TableArrays


class Slots:
    """The slots of tables, each taken while something refers to it, and free otherwise.

    Free slots are a ring: slots that were freed in order are taken in order, so that a write stays contiguous in
    memory. Those of new tables are all free.

    Args:
        arrays: of the tables.
    """

    def __init__(self, arrays: TableArrays) -> None:
        self.references: np.ndarray = arrays.references
        self.count: int = len(arrays.references)
        self._arrays = arrays
        #: Called with slots, int64 ``[n]``, that are free now.
        self.on_free: Callable[[np.ndarray], None] | None = None
        self.clear()

    @property
    def nbytes(self) -> int:
        return self.references.nbytes + self._arrays.free.nbytes

    @property
    def num_free(self) -> int:
        return int(self._arrays.counters[FREED] - self._arrays.counters[TAKEN])

    @property
    def num_freed(self) -> int:
        """Slots that became free, ever."""
        return int(self._arrays.counters[FREED])

    def release(self, slots: np.ndarray) -> None:
        """Removes a reference to each of these slots, all different; those without any become free."""
        before = self.num_freed
        left = self.references[slots] - 1
        self.references[slots] = left
        freed = slots[left == 0]
        self._arrays.free.put(before + np.arange(len(freed)), freed, mode="wrap")
        self._arrays.counters[FREED] += len(freed)
        self.announce(before)

    def announce(self, before: int) -> None:
        """Calls :attr:`on_free` with the slots that became free since :attr:`num_freed` was ``before``."""
        if self.on_free is not None and self.num_freed > before:
            self.on_free(self._freed(before))

    def _freed(self, since: int) -> np.ndarray:
        return self._arrays.free.take(np.arange(since, self.num_freed), mode="wrap")

    def clear(self) -> None:
        self.references.fill(0)
        self._arrays.free[:] = np.arange(self.count)
        self._arrays.counters[[TAKEN, FREED]] = 0, self.count

    def state_dict(self) -> dict[str, Any]:
        """Returns the free slots in order, and the references."""
        order = self._freed(int(self._arrays.counters[TAKEN]))
        return {"free": torch.from_numpy(order), "references": torch.from_numpy(self.references.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        free = state_dict["free"].numpy()
        self._arrays.free[: len(free)] = free
        self._arrays.counters[[TAKEN, FREED]] = 0, len(free)
        self.references[:] = state_dict["references"].numpy()
