# SPDX-License-Identifier: Apache-2.0
"""The slots of a storage that hold a row: all below its length, a set of them, or the slots that tables refer to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["FirstSlots", "KnowsOccupancy", "Occupancy", "SlotSet", "are_within"]


class Occupancy(ABC):
    """The slots of a storage that hold a row. Slots are int64, on the CPU."""

    count: int  #: Rows that are stored.

    @abstractmethod
    def slots(self) -> Tensor:
        """Returns the slots that hold a row, int64 ``[count]``, ascending."""

    @abstractmethod
    def held(self, index: Tensor) -> Tensor | None:
        """Returns whether each slot below the storage's length holds a row, bool, or ``None`` if all do."""

    def drawable(self, index: Tensor) -> Tensor | None:
        """Returns whether a sampler may draw each slot below the length, bool, or ``None`` if all may be drawn."""
        return self.held(index)

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws slots that hold a row, int64 ``[count]``, each equally likely, with replacement."""

    def slots_at(self, points: np.ndarray) -> Tensor:
        """Returns the slot at each point of [0, 1), float64 ``[n]``: all slots cover equal lengths."""
        return self._slots_in_places(np.minimum((points * self.count).astype(np.int64), self.count - 1))

    def _slots_in_places(self, places: np.ndarray) -> Tensor:
        return self.slots()[torch.from_numpy(places)]


class KnowsOccupancy:
    """A storage that knows which of its slots hold a row."""

    occupancy: Any  #: :class:`Occupancy` of the slots.


class FirstSlots(Occupancy):
    """All slots below the length of the storage."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count: int = count

    def slots(self) -> Tensor:
        return torch.arange(self.count, device="cpu")

    def held(self, index: Tensor) -> None:
        """Returns ``None``: every slot below the length holds a row."""

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.count, (count,), generator=generator, device=generator.device).cpu()

    def _slots_in_places(self, places: np.ndarray) -> Tensor:
        return torch.from_numpy(places)


class SlotSet(Occupancy):
    """A set of slots from which one can be drawn by its place.

    At first it holds the ``length`` first of ``capacity``.
    """

    def __init__(self, capacity: int, length: int) -> None:
        self._order = np.arange(capacity)
        self._place = np.arange(capacity)
        self._place[length:] = -1
        self.count: int = length

    @property
    def nbytes(self) -> int:
        return self._order.nbytes + self._place.nbytes

    def slots(self) -> Tensor:
        return self.state().sort().values

    def held(self, index: Tensor) -> Tensor:
        return torch.from_numpy(self._place[index.numpy()] >= 0)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        places = torch.randint(self.count, (count,), generator=generator, device=generator.device)
        return torch.from_numpy(self._order[places.cpu().numpy()])

    def _slots_in_places(self, places: np.ndarray) -> Tensor:
        return torch.from_numpy(self._order[places])

    def add(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            if self._place[slot] < 0:
                self._order[self.count] = slot
                self._place[slot] = self.count
                self.count += 1

    def remove(self, slots: np.ndarray) -> None:
        # The last slots take the places of the slots that leave, so that the set stays one block.
        for slot in slots.tolist():
            place = self._place[slot]
            self.count -= 1
            last = self._order[self.count]
            self._order[place], self._place[last] = last, place
            self._place[slot] = -1

    def state(self) -> Tensor:
        return torch.from_numpy(self._order[: self.count].copy())

    @classmethod
    def from_state(cls, capacity: int, state: Tensor) -> SlotSet:
        restored = cls(capacity, 0)
        _, first = np.unique(state.numpy(), return_index=True)
        slots = state.numpy()[np.sort(first)]
        restored.count = len(slots)
        restored._order[: len(slots)] = slots
        restored._place[slots] = np.arange(len(slots))
        return restored


def checked_least_generation(value: Any) -> int:
    """Returns the least generation of a state. Raises ``ValueError`` if it is no whole number from 0 to 2**62."""
    if type(value) is not int or not 0 <= value <= 2**62:
        raise ValueError(
            f"the saved least_generation is {value!r}, not a whole number from 0 to 2**62; nothing was loaded"
        )
    return value


def are_within(values: np.ndarray, limit: int, count: int | None = None) -> bool:
    """Returns whether values of a state are int64 ``[count]``, from 0 on and below ``limit``."""
    is_list = values.dtype == np.int64 and values.ndim == 1 and count in (None, len(values))
    return is_list and (len(values) == 0 or (values.min() >= 0 and values.max() < limit))
