# SPDX-License-Identifier: Apache-2.0
"""Columns, device and occupied slots of any storage, TorchRL's included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.storage.occupancy import FirstSlots, Occupancy
from lightning_replay.storage.packed import PackedStorage

__all__ = ["device_of", "empty_storage", "occupancy_of", "read_columns", "readable_rows", "stored_before"]


def occupancy_of(storage: Storage) -> Occupancy:
    """Returns which slots hold a row; of TorchRL's storages all below the length."""
    return storage.occupancy if isinstance(storage, PackedStorage) else FirstSlots(len(storage))


def empty_storage() -> RuntimeError:
    """Returns the error for a draw from no rows."""
    return RuntimeError("cannot sample from an empty replay buffer; call extend first")


def device_of(storage: Storage) -> torch.device | None:
    """Returns the device of the rows; ``None`` where a storage of TorchRL has none, or not yet."""
    device = getattr(storage, "device", None)  # a list of rows has none, and "auto" is no device
    return device if isinstance(device, torch.device) else None


def stored_before(storage: Storage, new: Tensor) -> Tensor:
    """Returns the slots stored before those in ``new``, int64 ``[N]``; ascending, on the device of these."""
    earlier = torch.zeros(storage.max_size, dtype=torch.bool, device=new.device)
    earlier[occupancy_of(storage).slots().to(new.device)] = True
    earlier[new] = False
    return earlier.nonzero().squeeze(1)


def readable_rows(storage: Storage) -> TensorDictBase:
    """Returns all slots of any TorchRL tensor storage that may hold a row, to be read and not written."""
    return storage.readable_rows if isinstance(storage, PackedStorage) else storage.get(slice(0, len(storage)))


def read_columns(storage: Storage, index: Tensor, keys: Sequence[NestedKey]) -> list[Tensor]:
    """Returns single columns ``[N, ...]`` of the rows ``index`` of any TorchRL tensor storage.

    Raises:
        KeyError: a key is not stored; the message names the stored ones.
    """
    packed, everything = isinstance(storage, PackedStorage), readable_rows(storage)
    if not isinstance(everything, TensorDictBase):
        raise TypeError(
            f"columns cannot be read from a {type(storage).__name__}; use PackedStorage or LazyTensorStorage"
        )
    columns = []
    for key in keys:
        column = storage.column(key, index) if packed else everything.get(key, None)
        if column is None:
            stored = list(everything.keys(include_nested=True, leaves_only=True))
            raise KeyError(f"no column {key!r} is stored; stored are {stored}")
        columns.append(column if packed else column[index])
    return columns
