# SPDX-License-Identifier: Apache-2.0
"""The running episodes of a storage: trajectories whose newest stored row did not end them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.tracker import read_trajectory
from lightning_replay.parts import WriterHooks
from lightning_replay.storage.access import device_of, occupancy_of
from lightning_replay.storage.packed import PackedStorage

__all__ = ["newest_running", "slots_by_age", "stored_trajectories"]


def slots_by_age(storage: Storage, writer: WriterHooks) -> Tensor | None:
    """Returns the slots of the stored rows, int64 ``[N]``, oldest first; ``None`` where the writer keeps no order."""
    slots = occupancy_of(storage).slots().to(device_of(storage) or "cpu")
    age = writer.age_of(slots)
    return None if age is None else slots[age.to(slots.device).argsort(descending=True)]


def stored_trajectories(storage: PackedStorage) -> list[int | None]:
    """Returns the ids of all stored trajectories; ``[None]`` where rows have none."""
    slots = storage.occupancy.slots().to(storage.device)
    ids = read_trajectory(storage, slots) if len(slots) else None
    return [None] if ids is None else ids.unique().tolist()


def newest_running(
    storage: PackedStorage, oldest_first: Tensor, trajectories: Iterable[int] | None = None
) -> tuple[Tensor, list[int | None]]:
    """Returns the newest slot and the id of each running episode.

    Args:
        storage: with a column ``("next", "done")``; without ``trajectory`` (or ``("collector", "traj_ids")``) all rows
            are one environment in order.
        oldest_first: int64 ``[N]``, the stored slots in the order in which they were written.
        trajectories: ids of the episodes to return; ``None`` for all.

    Returns:
        The slots of the newest rows, int64 ``[E]``, and the ids of the E trajectories, ``[None]`` without ids.
    """
    done = storage.column(("next", "done"), oldest_first) if len(oldest_first) else None
    if done is None:
        return oldest_first[:0], []
    ids = read_trajectory(storage, oldest_first)
    count = len(oldest_first)
    if ids is None:
        names = torch.zeros(1, dtype=torch.int64, device="cpu")
        last = torch.tensor([count - 1], device=oldest_first.device)
    else:
        names, of = ids.unique(return_inverse=True)
        place = torch.arange(count, device=of.device)
        last = torch.zeros_like(names).scatter_reduce_(0, of, place, "amax", include_self=False)
    is_running = ~done.reshape(count, -1)[last].any(1)
    if trajectories is not None and ids is not None:
        is_running &= torch.isin(names, torch.tensor(list(trajectories), dtype=torch.int64, device=names.device))
    index = oldest_first[last][is_running]
    return index, [None] * len(index) if ids is None else names[is_running].tolist()
