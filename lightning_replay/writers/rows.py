# SPDX-License-Identifier: Apache-2.0
"""Functions of writers that choose rows: they check the storage, write chosen rows, and call the buffers back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import ListStorage, Storage, TensorStorage

from lightning_replay.episodes.links import missing_steps, trajectory_of
from lightning_replay.parts import BufferHooks, Insertion, ReplayWriter, check_home
from lightning_replay.storage.columns import Column, as_rows
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.storage.torchrl_rows import TorchRLRows
from lightning_replay.tables.kernels import is_run
from lightning_replay.torchrl_compat import attached_buffers


def rows_in(storage: Storage, writer: ReplayWriter, capacity: int) -> Any:
    """Returns a :class:`PackedStorage`, or what the writer keeps beside a storage of TorchRL.

    Raises:
        TypeError: Another storage, one of several dimensions, or a list without a size.
    """
    is_packed = isinstance(storage, PackedStorage)
    # A PackedStorage is one of tensors, and a list without a size has a very large one.
    if not isinstance(storage, TensorStorage | ListStorage) or storage.ndim > 1 or storage.max_size >= 2**62:
        raise TypeError(
            f"{type(writer).__name__} got a {type(storage).__name__} with ndim={storage.ndim} and "
            f"max_size={storage.max_size}; it writes into a PackedStorage, or into a LazyTensorStorage, a "
            "LazyMemmapStorage, or a ListStorage of one dimension and a given size. Use "
            f"PackedStorage({capacity}), and flatten environments and time before extend"
        )
    check_home(storage, writer)
    writer.rows_beside = None if is_packed else TorchRLRows(storage)
    writer.saved_parts = (*type(writer).saved_parts, *([] if is_packed else ["rows_beside"]))
    return storage if is_packed else writer.rows_beside


def chosen(values: Sequence[Column], rows: np.ndarray) -> Sequence[Column]:
    """Returns the values ``[n, ...]`` of the chosen rows, int64 ``[n]``, of columns ``[N, ...]``."""
    if len(rows) == len(values[0]):  # Usually, all rows are chosen. They are not copied.
        return values
    index = torch.from_numpy(rows)
    return [value[index.to(value.device) if isinstance(value, Tensor) else rows] for value in values]


def write_slots(storage: Any, slots: np.ndarray, values: Sequence[Column]) -> Tensor:
    """Writes columns ``[n, ...]`` into different slots, int64 ``[n]``, and returns the slots."""
    index = torch.from_numpy(slots)
    if len(slots):
        # Slots mostly lie side by side, and a slice is written at half the cost.
        first = int(slots[0])
        storage.write(slice(first, first + len(slots)) if is_run(slots) else index, values)
    return index


def announce(storage: Storage, index: Tensor, entered: np.ndarray, rows: Any, count: int) -> None:
    """Informs the buffers of new rows, and ends the episodes in which a row was left out.

    Of ``count`` given rows, the rows at the places ``entered``, ascending, were written to the slots ``index``.
    """
    missing = missing_steps(trajectory_of(as_rows(rows)), entered, count) if len(entered) < count else None
    for buffer in attached_buffers(storage):
        # TorchRL's buffers follow no episodes. No new row may be linked to a stored row across a missing step.
        if missing is not None and isinstance(buffer, BufferHooks):
            buffer.on_episode_end(index[:0], missing.trajectories)
        if len(index):
            buffer.mark_update(index)
        if missing is not None and isinstance(buffer, BufferHooks) and len(missing.last_before):
            buffer.on_episode_end(index[missing.last_before])


def write_rows(storage: Storage, data: TensorDictBase, slots: Tensor, rows: Tensor) -> Insertion:
    """Writes some of the given rows into slots of a storage of tensors, and informs its buffers.

    The buffers also learn which rows were left out, so that no n-step return crosses a gap.

    Args:
        storage: Storage of the writer.
        data: Given rows, TensorDict ``[N]``, oldest first.
        slots: Slots to write, int64 ``[n]``, each at most once.
        rows: Places of the written rows in ``data``, int64 ``[n]`` ascending.

    Returns:
        The insertion that a writer's ``insert`` returns.

    Raises:
        ValueError: Slots or rows that are not int64 ``[n]``, that do not exist, or that are given twice.
    """
    for name, given, limit in (("slots", slots, storage.max_size), ("rows", rows, data.shape[0])):
        if given.dtype != torch.int64 or given.shape != (slots.numel(),):
            raise ValueError(f"{name} is {given.dtype} {list(given.shape)}; give int64 [n], as many slots as rows")
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < limit:
            raise ValueError(f"{name} reaches from {int(given.min())} to {int(given.max())}; there are {limit}")
        if given.unique().numel() < len(given):
            raise ValueError(f"{name} has entries twice; give each slot and each row at most once")
    if (rows.diff() < 0).any():
        raise ValueError("rows is not ascending; give rows in the order of time, and their slots in the same order")
    if len(slots):
        storage.set(slots, data[rows])
    announce(storage, slots, rows.numpy(), data, data.shape[0])
    return Insertion(slots, rows)
