# SPDX-License-Identifier: Apache-2.0
"""Places of next observations: the slot of the row that starts with one, or a pool if no row starts with it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_replay.storage import observation_kernels as loops

_LEAST_ROOM = 16
_ROWS_AT_ONCE = 1024  # Each may need two last observations for a moment.


_NO_PLACES = torch.zeros(0, dtype=torch.int32, device="cpu")


def check_places(places: Tensor, last: Tensor, length: int, width: int) -> None:
    """Refuses saved places of ``length`` rows that do not fit: compiled loops follow them unchecked."""
    named, kept = places[places > 0], places[places < 0]
    is_whole = places.dtype == torch.int32 and places.shape == (length,)
    are_kept = last.dtype == torch.int64 and last.shape == (len(kept), width)
    in_order = -1 - torch.arange(len(kept), dtype=torch.int32, device="cpu")
    are_slots = len(named.unique()) == len(named) and not bool((named > length).any())
    if not (is_whole and are_kept and are_slots and torch.equal(kept, in_order)):
        raise ValueError("the saved rows and the places of their next observations do not fit; load another save")


class NextObservations:
    """Finds the next observation of every slot, words ``[width]``, in the rows or among the last observations.

    ``rows`` are packed rows on the CPU, int64 ``[capacity, words]``, with the observation from the word ``start`` on.
    A new row's observation is looked up by a hash of its words, and then word by word, among the last observations.
    The row that ended with one then refers to the new row, whatever the order in which rows of episodes come.
    """

    def __init__(self, rows: Tensor, start: int, width: int) -> None:
        self._rows = rows.numpy()
        self._start = start
        self._width = width
        # See observation_kernels for both, int32 [capacity].
        self.places: np.ndarray = np.zeros(len(rows), dtype=np.int32)
        self._before = np.zeros(len(rows), dtype=np.int32)
        self.clear()

    _last: np.ndarray  # int64 [L, width], row 0 of zeros
    _hashes: np.ndarray  # int64 [L]
    _heads: np.ndarray  # int32 [L], the first last observation of each bucket
    _chains: np.ndarray  # int32 [4, L], see observation_kernels
    _num_free: int
    _least_free: int

    @property
    def count(self) -> int:
        """Last observations that are kept."""
        return len(self._last) - 1 - self._num_free

    @property
    def nbytes(self) -> int:
        """Bytes of places, of the last observations kept at once so far, and of their index."""
        written = (len(self._last) - self._least_free) * self._width * 8
        arrays = (self.places, self._before, self._hashes, self._heads, self._chains)
        return written + sum(array.nbytes for array in arrays)

    def link(self, slots: slice | Tensor, first: np.ndarray, second: np.ndarray) -> None:
        """Takes new rows in ``slots`` before they are written: both observations, words ``[N, W]``."""
        index = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots.numpy()
        for start in range(0, len(index), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            new = index[part]
            # A new row may need room for its own, and for that of a row before the one that it replaces.
            if self._num_free < 2 * len(new):
                kept = np.flatnonzero(self.places < 0)
                self._refill(kept, self._last[-self.places[kept]], 2 * len(new))
            self._num_free = loops.link(
                *(new, first[part], second[part], self._rows, self._start, self.places, self._before),
                *(self._last, self._hashes, self._heads, self._chains, self._num_free),
            )
            self._least_free = min(self._least_free, self._num_free)

    def gather(self, slots: Tensor, before: int = 0) -> Tensor:
        """Returns the next observations of slots, int64 ``[N]``, behind the first words ``before`` of their rows."""
        found = torch.empty(slots.shape[0], before + self._width, dtype=torch.int64, device="cpu")
        index = slots.contiguous().numpy()
        if not loops.gather(index, self._rows, self._start, self.places, self._last, found.numpy()):
            raise IndexError(f"slots are {index.min()} to {index.max()}; they must be from 0 to {len(self._rows) - 1}")
        return found

    def saved(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the places of the first slots, int32 ``[length]``, and the last observations that they refer to."""
        places = self.places[:length].copy()
        # Rows above the length are not saved.
        kept = np.flatnonzero((places < 0) | (places > length))
        places[kept] = -1 - np.arange(len(kept), dtype=np.int32)
        return torch.from_numpy(places), self.gather(torch.from_numpy(kept))

    def load(self, places: Tensor, last: Tensor) -> None:
        """Restores what :meth:`saved` returned, once the rows are restored."""
        self.places[:] = 0
        self._before[:] = 0
        self.places[: len(places)] = places.numpy()
        slots = np.flatnonzero(self.places > 0)
        self._before[self.places[slots] - 1] = slots + 1
        self._refill(np.flatnonzero(self.places < 0), last.numpy(), _LEAST_ROOM)

    def clear(self) -> None:
        """Removes all places and last observations."""
        self.load(_NO_PLACES, torch.zeros(0, self._width, dtype=torch.int64, device="cpu"))

    def _refill(self, slots: np.ndarray, last: np.ndarray, room: int) -> None:
        # Keeps these last observations of rows in slots, and takes memory for as many more.
        count = len(slots)
        size = 1 << (count + room).bit_length()
        self._last = np.empty((size, self._width), dtype=np.int64)
        self._last[0] = 0
        self._last[1 : count + 1] = last
        self._hashes = np.zeros(size, dtype=np.int64)
        self._heads = np.zeros(size, dtype=np.int32)
        self._chains = np.zeros((4, size), dtype=np.int32)
        self._chains[loops.OWNER, 1 : count + 1] = slots
        self.places[slots] = -np.arange(1, count + 1)
        self._num_free = self._least_free = size - 1 - count
        self._chains[loops.FREE, : self._num_free] = np.arange(size - 1, count, -1)
        loops.enter_all(count, self._last, self._hashes, self._heads, self._chains)
