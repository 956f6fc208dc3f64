# SPDX-License-Identifier: Apache-2.0
"""Writing into tables: slots, ages and the tables' state, shared by the writers that choose the tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage, TensorDictRoundRobinWriter

from lightning_replay.declared import declared_sampler
from lightning_replay.parts import ReplayWriter
from lightning_replay.storage.frames.storage import FrameStorage
from lightning_replay.storage.transition_check import Column
from lightning_replay.tables.numba_kernels import is_run
from lightning_replay.tables.tables import Tables
from lightning_replay.writers.announcement import packed_storage


class TableWriter(ReplayWriter, TensorDictRoundRobinWriter):
    """Writes rows into slots that :class:`~lightning_replay.tables.Tables` hands out, so that samplers find the tables.

    The storage is a ``PackedStorage`` with ``num_slots`` rows or more; the tables are its ``occupancy``.

    Args:
        tables: where the slots are kept.
    """

    keeps_tables = True
    tables: Tables
    _is_on_cpu: bool

    def __init__(self, tables: Tables) -> None:
        super().__init__(compilable=True)  # plain counters, see PackedStorage
        self.tables = tables
        self._frames: FrameStorage | None = None

    @property
    def num_slots(self) -> int:
        """Rows the storage needs."""
        return self.tables.num_slots

    def register_storage(self, storage: Storage) -> None:
        """Attaches the storage; called by the buffer.

        Raises:
            TypeError: another storage than a ``PackedStorage``, or a sampler that does not draw from tables.
            ValueError: a storage with fewer rows than ``num_slots``.
        """
        storage = packed_storage(storage, self, self.num_slots)
        if storage.capacity < self.num_slots:
            raise ValueError(
                f"the storage has {storage.capacity} rows and {type(self).__name__} needs {self.num_slots}: the "
                "capacities of its tables, and the histories of running episodes. Use "
                f"PackedStorage({self.num_slots})"
            )
        for buffer in storage._attached_entities:
            if not declared_sampler(buffer._sampler).draws_from_tables:
                raise TypeError(
                    f"the sampler is a {type(buffer._sampler).__name__}, which would draw slots that no table of "
                    f"{type(self).__name__} holds any more; use TableShares or ScheduledSampler, alone or as first= of "
                    "a sampler of pairs"
                )
        super().register_storage(storage)
        storage.hold_by(self.tables)
        self._frames = storage if isinstance(storage, FrameStorage) else None
        self._is_on_cpu = storage.device.type == "cpu"
        if self._frames is not None:
            self.tables.pool.on_free = self._frames.release

    @abstractmethod
    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes transitions ``[N]``, oldest first; returns the slots of those that stayed, int64."""

    def write(self, slots: np.ndarray, values: Sequence[Column]) -> Tensor:
        """Stores the columns ``values``, ``[N, ...]`` each, in the slots, int64 ``[N]``, that were just appended.

        Returns the slots on the storage's device.

        While frames do not fit, the oldest entries leave the table that is fullest, by the share of its capacity, and
        at last the histories of running episodes.
        """
        if self._frames is not None:
            self._free_frames(self._frames, slots, values)
        index = torch.from_numpy(slots)
        if not self._is_on_cpu:
            index = index.to(self._storage.device)
        # Slots are mostly free in order, and a slice of them is written at half the cost.
        first = int(slots[0])
        self._storage.write(slice(first, first + len(slots)) if is_run(slots) else index, values)
        return index

    def _free_frames(self, storage: FrameStorage, slots: np.ndarray, values: Sequence[Column]) -> None:
        new = (self.tables.position[:, slots] >= 0).sum(1)
        while lacking := storage.frames_missing(values, slots):
            old = self.tables.length - new
            if old.any():
                fullest = int(np.where(old > 0, self.tables.length / self.tables.capacity, -1.0).argmax())
                # A row has at most this many frames, so that fewer entries would never do.
                leaving = -(-lacking // (2 * storage.frame_stack)) if len(new) == 1 else 1
                self.tables.leave_early(fullest, min(leaving, int(old[fullest])))
            elif not self.forget_oldest():
                raise RuntimeError(
                    f"{lacking} frames are lacking although nothing else is stored; raise frame_capacity"
                )

    def forget_oldest(self) -> bool:
        """Releases the oldest episode history; returns False if there is none."""
        return False

    def age_of(self, index: Tensor) -> Tensor:
        """Returns how many transitions were written after those in the slots ``index``, int64 of its shape."""
        return torch.from_numpy(self.tables.age_of(index.cpu().numpy()))

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        self.tables.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns tables and counters."""
        return {"tables": self.tables.state_dict(), "write_count": self._write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tables.load_state_dict(state_dict["tables"])
        self._write_count = int(state_dict["write_count"])
