# SPDX-License-Identifier: Apache-2.0
"""Private names of TorchRL that this library uses. Each has a gate test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase

if TYPE_CHECKING:  # The inspection of a save reads rows without TorchRL.
    from torchrl.data.replay_buffers import ReplayBuffer, RoundRobinWriter, Sampler, SliceSampler, Storage, Writer


def attached_buffers(storage: Storage) -> Sequence[ReplayBuffer]:
    """Returns the buffers of a storage, which a writer informs of the rows that it wrote, none of groups of rows."""
    return getattr(storage, "_attached_entities", ())


def writer_of(buffer: ReplayBuffer) -> Writer | None:
    """Returns the writer of a buffer, or ``None`` while the buffer is being built."""
    return getattr(buffer, "_writer", None)


def is_full(storage: Storage) -> bool:
    """Returns whether every slot of a storage holds a row."""
    return storage._is_full


def set_length(storage: Storage, length: int) -> None:
    """Sets how many slots hold a row, from the first one on. A list knows by itself."""
    if hasattr(storage, "_len"):
        storage._len = length


def set_newest_slot(storage: Storage, slot: int) -> None:
    """Sets the slot of the newest row. A ``SliceSampler`` draws no slice across it."""
    storage._set_last_cursor(slot)


def next_slot(writer: RoundRobinWriter) -> int:
    """Returns the slot that a ring writes next."""
    return writer._cursor


def rows_written(writer: RoundRobinWriter) -> int:
    """Returns how many rows a writer has written since it was built or emptied."""
    return writer._write_count


def storage_of(writer: Writer) -> Storage:
    """Returns the storage that a writer writes into."""
    return writer._storage


def batches_left(sampler: Sampler) -> int:
    """Returns how many batches a sampler can still draw, or a large number if it draws with replacement."""
    return sampler._remaining_batches


def most_priorities(sampler: Sampler) -> int | None:
    """Returns how many priorities a sampler keeps at most, or ``None`` if it keeps none."""
    return getattr(sampler, "_max_capacity", None)


def finds_trajectories(sampler: SliceSampler) -> bool:
    """Returns whether a ``SliceSampler`` looks for the column of trajectories itself."""
    return sampler._traj_key_auto


def collated(buffer: ReplayBuffer, rows: Any) -> TensorDictBase:
    """Returns rows of a storage in the form in which a buffer returns them."""
    return buffer._collate_fn(rows)


def assemble_unchecked(source: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    """Returns a TensorDict of entries that were laid out by the caller. No entry is checked."""
    assembled = TensorDict._new_unsafe(source, batch_size=batch_size, nested=False)
    # Given to the constructor, the device costs half of the whole.
    assembled._device = device
    return assembled
