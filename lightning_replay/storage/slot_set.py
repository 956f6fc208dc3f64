# SPDX-License-Identifier: Apache-2.0
"""Which slots below a storage's length hold a row, once some were released."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class LiveSlots:
    """A set of slots from which one can be drawn by its place.

    Args:
        capacity: slots there are.
        length: the first so many are in the set.

    Example:
        >>> live = LiveSlots(capacity=4, length=3)
        >>> live.remove(np.array([0])); live.add(np.array([3, 3]))
        >>> live.slots, live.contains(np.array([0, 3]))
        (array([2, 1, 3]), array([False,  True]))
    """

    def __init__(self, capacity: int, length: int) -> None:
        self._order = np.arange(capacity)
        self._place = np.arange(capacity)
        self._place[length:] = -1
        self.count = length

    @property
    def slots(self) -> np.ndarray:
        """The set, int64 ``[count]``, in the order in which places number it."""
        return self._order[: self.count]

    @property
    def nbytes(self) -> int:
        """Bytes of both lists."""
        return self._order.nbytes + self._place.nbytes

    def contains(self, slots: np.ndarray) -> np.ndarray:
        """Whether each slot is in the set, bool."""
        return self._place[slots] >= 0

    def add(self, slots: np.ndarray) -> None:
        """Puts slots, int64 ``[n]``, into the set, where they are not in it."""
        for slot in slots.tolist():
            if self._place[slot] < 0:
                self._order[self.count] = slot
                self._place[slot] = self.count
                self.count += 1

    def remove(self, slots: np.ndarray) -> None:
        """Takes slots, int64 ``[n]``, all in the set, out of it; the last takes the place of each."""
        for slot in slots.tolist():
            place = self._place[slot]
            self.count -= 1
            last = self._order[self.count]
            self._order[place], self._place[last] = last, place
            self._place[slot] = -1

    def at(self, places: Tensor) -> Tensor:
        """The slots at these places, int64 of their shape, on the CPU."""
        return torch.from_numpy(self._order[places.cpu().numpy()])

    def state(self) -> Tensor:
        """The set in order, int64 ``[count]``."""
        return torch.from_numpy(self.slots.copy())

    @classmethod
    def from_state(cls, capacity: int, state: Tensor) -> LiveSlots:
        """What :meth:`state` gave."""
        live = cls(capacity, 0)
        live.add(state.numpy())
        return live
