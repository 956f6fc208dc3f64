# SPDX-License-Identifier: Apache-2.0
"""Writing in a ring, from which the oldest transition leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage, TensorDictRoundRobinWriter

from lightning_replay.parts import Insertion, ReplayWriter
from lightning_replay.saving.spec import rebuildable
from lightning_replay.storage.columns import Column
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.torchrl_compat import attached_buffers

if TYPE_CHECKING:
    from lightning_replay.storage.frames import FrameStorage


@rebuildable
class FirstInFirstOutWriter(ReplayWriter, TensorDictRoundRobinWriter):
    """Writes transitions in a ring: when the storage is full, the oldest ones are overwritten.

    If more transitions are given than the storage holds, the last ones are kept. A
    :class:`~lightning_replay.storage.PackedStorage` refuses rows that do not fit its columns before anything is
    written. Over a storage of TorchRL, this is TorchRL's round-robin writer. If a
    :class:`~lightning_replay.storage.frames.FrameStorage` is full of frames, the oldest transitions leave until new
    ones fit. The writer needs no feedback.
    """

    exact: bool = True
    _cursor: int
    _write_count: int

    def __init__(self) -> None:
        super().__init__(compilable=True)  # TorchRL then keeps plain counters, see PackedStorage.

    def insert(self, data: TensorDictBase) -> Insertion:
        """Stores transitions ``[N]``, oldest first, and leaves the given TensorDict unchanged."""
        if isinstance(self._storage, PackedStorage):
            return super().insert(data)
        index = TensorDictRoundRobinWriter.extend(self, data.copy())  # TorchRL writes an index into its argument.
        return Insertion(index.cpu(), slice(0, data.shape[0]))

    def _insert_columns(self, columns: Sequence[Column], rows: object) -> Insertion:
        # The last min(N, capacity) rows are stored, or fewer if not even their frames fit.
        storage = self._storage
        count = len(columns[0])
        stop = self._cursor + count
        # Usually, the rows lie side by side, and no old frames are in their way.
        if stop <= storage.capacity and not storage.stores_frames:
            storage.write(slice(self._cursor, stop), columns)
            index = storage.slots(self._cursor, stop)
            self._cursor = stop % storage.capacity
            storage.given = columns
        else:
            index = self._insert_around(storage, columns, count)
        self._write_count += count
        # TorchRL attaches each buffer to the storage that the buffer shares with its writer. Through the storage, the
        # writer calls the buffer back once all rows are written: the buffer reads them to link their episodes.
        for buffer in attached_buffers(storage):
            buffer.mark_update(index)
        storage.given = None
        return Insertion(index, slice(count - index.numel(), count))

    def _insert_around(self, storage: PackedStorage, values: Sequence[Column], count: int) -> Tensor:
        capacity = storage.capacity
        kept = min(count, capacity)
        frames = cast("FrameStorage", storage) if storage.stores_frames else None
        values = [value[-kept:] for value in values]
        start = (self._cursor + count - kept) % capacity
        if count > kept and frames is not None:
            frames.release(torch.arange(capacity, device="cpu"))
            start = self._cursor  # No slot before the cursor remains unwritten.
        self._cursor = start
        for first in range(0, kept, storage.rows_at_once):
            part = [value[first : first + storage.rows_at_once] for value in values]
            stop = self._cursor + len(part[0])
            slots = torch.arange(self._cursor, stop, device="cpu") % capacity
            if frames is not None:
                self._release_oldest(frames, part, slots)
            if stop > capacity and storage.generations is None:  # On a device, a copy of the slots would wait.
                before = capacity - self._cursor
                storage.write(slice(self._cursor, capacity), [value[:before] for value in part])
                storage.write(slice(0, stop - capacity), [value[before:] for value in part])
            else:
                storage.write(slice(self._cursor, stop) if stop <= capacity else slots, part)
            self._cursor = stop % capacity
        index = torch.arange(start, start + kept, device=storage.slot_device) % capacity
        return index[-storage.num_stored :]  # If their frames did not fit, the first rows left for the last ones.

    def _release_oldest(self, storage: FrameStorage, values: Sequence[Column], slots: Tensor) -> None:
        while lacking := storage.frames_missing(values, slots):
            num_stored = storage.num_stored
            overwritten = max(0, num_stored + len(slots) - storage.capacity)
            # A row has at most twice frame_stack frames, so that fewer rows would never be enough.
            leaving = min(-(-lacking // (2 * storage.frame_stack)), num_stored - overwritten)
            oldest = self._cursor - num_stored + overwritten
            storage.release(torch.arange(oldest, oldest + leaving, device="cpu") % storage.capacity)
            if storage.num_stored == num_stored:  # Another caller released the rows in between.
                others = torch.from_numpy(np.setdiff1d(storage.occupancy.slots(), slots))
                storage.release(others[self.age_of(others).argmax()])

    def age_of(self, index: Tensor) -> Tensor:
        """Returns how many rows were given after the rows in the slots, int64."""
        return (self._cursor - 1 - index) % self._storage.max_size

    def register_storage(self, storage: Storage) -> None:
        """Attaches a storage, which may be smaller than the storage of a state that was loaded before.

        :meta private:
        """
        super().register_storage(storage)
        self._cursor %= storage.max_size

    def state_dict(self) -> dict[str, Any]:
        """Returns the next slot, and the number of rows given so far."""
        return {"cursor": self._cursor, "write_count": self._write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._write_count = int(state_dict["write_count"])
        self._cursor = int(state_dict["cursor"])
        if self._storage is not None:
            self._cursor %= self._storage.max_size
