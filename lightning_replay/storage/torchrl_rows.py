# SPDX-License-Identifier: Apache-2.0
"""Rows in a storage of TorchRL that a writer of this library writes, with what that storage does not keep of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage, TensorStorage

from lightning_replay.storage.columns import NOT_STORED, Column, RowReader, as_tensor, refuse_ragged
from lightning_replay.storage.occupancy import FirstSlots, Occupancy, are_within, checked_least_generation
from lightning_replay.storage.packed import other_columns, readable_rows
from lightning_replay.storage.rows import Key, gather_branch, leaves_of, nest
from lightning_replay.torchrl_compat import attached_buffers, set_length, set_newest_slot


class TorchRLRows:
    """A storage of TorchRL as the writers of this library see one: with the interface of a ``PackedStorage``.

    The writer owns this object, and its state contains that of the object. The object keeps the columns that the first
    rows fixed, how often each slot was written or emptied, and which slots hold a row. The rows are in the storage.

    Args:
        storage: ``LazyTensorStorage``, ``LazyMemmapStorage``, or another one of one dimension that holds TensorDicts.
    """

    stores_frames = False

    def __init__(self, storage: Storage) -> None:
        self.storage: Storage = storage
        self.capacity: int = storage.max_size
        self.rows_at_once: int = storage.max_size
        self.occupancy_owner: Occupancy | None = None
        self.generations: np.ndarray = np.zeros(storage.max_size, dtype=np.int64)
        self._least_generation = 0  # of rows written from now on, less 1
        self._has_columns = False
        self._columns: Mapping[Key, tuple[torch.dtype, torch.Size]] = {}
        self._device: torch.device | None = None  # of the rows that are given

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def _attached_entities(self) -> Sequence[Any]:
        return attached_buffers(self.storage)

    @property
    def occupancy(self) -> Occupancy:
        """The slots that hold a row: the slots that tables refer to, or all below the length."""
        return FirstSlots(len(self)) if self.occupancy_owner is None else self.occupancy_owner

    @property
    def row_columns(self) -> Mapping[Key, tuple[torch.dtype, torch.Size]]:
        """Dtype and shape of each column of the rows, by its key. Without rows, there are none."""
        if not self._has_columns and len(self):
            self._read_columns(self.storage.get(0))
        return self._columns

    def _read_columns(self, row: TensorDictBase) -> None:
        self._has_columns = len(self) > 0
        self._columns = {key: (dtype, shape) for key, dtype, shape in leaves_of(row) if key not in NOT_STORED}
        self._reader = RowReader(self._columns, ())

    @property
    def readable_rows(self) -> TensorDictBase:
        """All rows below the length, TensorDict ``[N]``, to be read."""
        return readable_rows(self.storage)

    def column(self, key: Any, index: Tensor) -> Tensor | None:
        """Returns one column ``[N, ...]`` of the rows ``index``, or ``None`` if it is not stored."""
        column = self.readable_rows.get(key, None)
        return None if column is None else column[index]

    def generation_of(self, index: Tensor) -> Tensor:
        """Returns how often each slot has been written or emptied, int64 of the shape of ``index``."""
        return torch.from_numpy(self.generations[index.cpu().numpy()]).to(index.device)

    def checked_values(self, data: Any) -> list[Column]:
        """Returns the values of rows ``[N]`` in the order of the columns.

        Raises:
            TypeError: No TensorDict, or columns that are no dense tensors. Nothing is stored.
            ValueError: Keys, shapes, dtypes, or a device other than in the first rows. Nothing is stored.
        """
        if not isinstance(data, TensorDictBase):
            raise TypeError(
                f"the writer stores rows of a TensorDict; got {type(data).__name__}. Nothing was stored; wrap columns "
                "as TensorDict({'observation': ...}, batch_size=[N]), or call to_tensordict() of a class"
            )
        refuse_ragged(data)
        if not self._has_columns:
            self._read_columns(self.storage.get(0) if len(self) else data[0])
            self._device = None
        if self._device is None:
            self._device = next((leaf.device for leaf in data.values(True, True)), torch.device("cpu"))
        values = self._reader.read(data, self._device)
        if values is None:
            raise other_columns(data, self._columns, self._device)
        return values

    def write(self, slots: slice | Tensor, values: Sequence[Column]) -> None:
        """Writes the values of :meth:`checked_values` into a slice or int64 ``[n]`` of slots.

        The slots below the highest one were written before, or are written now.
        """
        index = torch.arange(slots.start, slots.stop, device="cpu") if isinstance(slots, slice) else slots
        leaves = dict(zip(self._columns, map(as_tensor, values), strict=True))
        assert self._device is not None
        rows = gather_branch(nest(leaves), leaves, index.shape, self._device)
        if isinstance(self.storage, TensorStorage):
            self.storage.set(index, rows, set_cursor=False)
        else:  # A list keeps the objects that it is given, and takes new slots in ascending order.
            order = index.argsort()
            self.storage.set(index[order], [rows[place].clone() for place in order.tolist()], set_cursor=False)
        set_newest_slot(self.storage, int(index[-1]))
        set_length(self.storage, max(len(self), int(index.max()) + 1))
        self._has_columns = True
        self._count(index.numpy())

    def _count(self, slots: np.ndarray | slice) -> None:
        self.generations[slots] = np.maximum(self.generations[slots], self._least_generation) + 1

    def clear(self) -> None:
        """Counts one more generation of every slot that holds a row, before the storage is emptied."""
        self._count(slice(0, len(self)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the generations, which the storage does not save."""
        return {"generations": torch.from_numpy(self.generations.copy()), "least_generation": self._least_generation}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned. New rows then have larger generations than any row before."""
        least = checked_least_generation(state_dict["least_generation"])
        saved = np.asarray(state_dict["generations"])
        if not are_within(saved, 2**62, self.capacity):
            raise ValueError(
                f"the saved generations are {saved.dtype} {list(saved.shape)}, here int64 [{self.capacity}], from 0 "
                "on; build the buffer with the saved capacity. Nothing was loaded"
            )
        self._least_generation = max(self._least_generation, int(self.generations.max()), least)
        self.generations[:] = saved
        self._has_columns, self._device = False, None  # The rows that the storage loads may have others.

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "a writer of this library keeps in its process which slots hold a row, so that its buffer cannot be "
                "shared between processes; keep it in one process, or use lightning_replay.sharded.ShardedReplay"
            )
        return vars(self).copy()
