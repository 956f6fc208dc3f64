# SPDX-License-Identifier: Apache-2.0
"""Writing in a ring, where the oldest transition leaves."""

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

if TYPE_CHECKING:
    from lightning_replay.storage.frames import FrameStorage


@rebuildable
class FirstInFirstOutWriter(ReplayWriter, TensorDictRoundRobinWriter):
    """Writes transitions in a ring: when the storage is full, the oldest ones are overwritten.

    Of more transitions than the storage holds the last ones are kept. Rows that do not fit the columns of a
    :class:`~lightning_replay.storage.PackedStorage` are refused before anything is written; over TorchRL's storages
    this is TorchRL's own round-robin writer. Where a :class:`~lightning_replay.storage.frames.FrameStorage` is full
    of frames, the oldest transitions leave until new ones fit. Needs no feedback.
    """

    exact: bool = True
    _cursor: int
    _write_count: int

    def __init__(self) -> None:
        super().__init__(compilable=True)  # plain counters, see PackedStorage

    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes transitions ``[N]``, oldest first.

        Returns:
            Their slots, int64 ``[N]``; -1 for the first ones of more than fit, which are not kept.

        Raises:
            ValueError: keys, shapes or dtypes are not those of the rows stored first.
        """
        kept = self.insert(data).slots  # TorchRL's buffers write a slot into each row given
        return torch.cat((kept.new_full((data.shape[0] - len(kept),), -1), kept))

    def insert(self, data: TensorDictBase) -> Insertion:
        if isinstance(self._storage, PackedStorage):
            return super().insert(data)
        index = TensorDictRoundRobinWriter.extend(self, data.copy())  # which writes an index into what it is given
        return Insertion(index.cpu(), slice(0, data.shape[0]))

    def _insert_columns(self, columns: Sequence[Column], rows: Any) -> Insertion:
        # Of more than fit, the last ones are stored: min(N, capacity), or fewer where not even their frames fit.
        storage, count = self._storage, len(columns[0])
        capacity, start = storage.capacity, self._cursor
        stop = start + count
        # The usual way: the rows lie side by side, and no old frames are in their way.
        if stop <= capacity and not storage.stores_frames:
            storage.write(slice(start, stop), columns)
            self._cursor = stop if stop < capacity else 0
            index, kept = storage.slots(start, stop), slice(0, count)
        else:
            index = self._insert_around(storage, columns, count)
            kept = slice(count - index.numel(), count)
        self._write_count += count
        for buffer in storage._attached_entities:
            # Once everything is written: the buffer reads the rows, to link their episodes.
            buffer.mark_update(index)
        return Insertion(index, kept)

    def _insert_around(self, storage: PackedStorage, values: Sequence[Column], count: int) -> Tensor:
        capacity = storage.capacity
        kept = min(count, capacity)
        frames = cast("FrameStorage", storage) if storage.stores_frames else None
        if count > kept:
            values = [value[-kept:] for value in values]
        start = (self._cursor + count - kept) % capacity
        if count > kept and frames is not None:
            frames.release(torch.arange(capacity, device="cpu"))  # all of them leave
            start = self._cursor  # which leaves no slot before it unwritten
        self._cursor = start
        for first in range(0, kept, storage.rows_at_once):
            part = [value[first : first + storage.rows_at_once] for value in values]
            stop = self._cursor + len(part[0])
            slots = torch.arange(self._cursor, stop, device="cpu") % capacity
            if frames is not None:
                self._release_oldest(frames, part, slots)
            storage.write(slice(self._cursor, stop) if stop <= capacity else slots, part)
            self._cursor = stop % capacity
        index = torch.arange(start, start + kept, device="cpu") % capacity
        return index[-storage.num_stored :]  # the first of more than the frames allow left for the last

    def _release_oldest(self, storage: FrameStorage, values: Sequence[Column], slots: Tensor) -> None:
        while lacking := storage.frames_missing(values, slots):
            held = storage.num_stored
            overwritten = max(0, held + len(slots) - storage.capacity)
            # A row has at most this many frames, so that fewer rows would never do.
            leaving = min(-(-lacking // (2 * storage.frame_stack)), held - overwritten)
            oldest = self._cursor - held + overwritten
            storage.release(torch.arange(oldest, oldest + leaving, device="cpu") % storage.capacity)
            if storage.num_stored == held:  # rows in between were released by another caller
                others = torch.from_numpy(np.setdiff1d(storage.occupancy.slots(), slots))
                storage.release(others[self.age_of(others).argmax()])

    def age_of(self, index: Tensor) -> Tensor:
        return (self._cursor - 1 - index) % self._storage.max_size

    def register_storage(self, storage: Storage) -> None:
        super().register_storage(storage)
        self._cursor %= storage.max_size  # of a state that was loaded before

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor, "write_count": self._write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._write_count = int(state_dict["write_count"])
        self._cursor = int(state_dict["cursor"])
        if self._storage is not None:
            self._cursor %= self._storage.max_size
