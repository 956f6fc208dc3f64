# SPDX-License-Identifier: Apache-2.0
"""The running episodes of a storage: trajectories whose newest stored row did not end them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_replay.episodes.tracker import read_trajectory
from lightning_replay.storage.packed import PackedStorage

__all__ = ["newest_running"]


def newest_running(
    storage: PackedStorage, oldest_first: Tensor, trajectories: Iterable[int] | None = None
) -> tuple[Tensor, list[int | None]]:
    """Returns where the running episodes are, and which trajectories they are.

    Args:
        storage: with a column ``("next", "done")``; without ``trajectory`` (or ``("collector", "traj_ids")``) all rows
            are one environment in order.
        oldest_first: int64 ``[N]``, the stored slots in the order in which they were written.
        trajectories: ids of those looked for; ``None`` for all.

    Returns:
        The slots of the newest rows, int64 ``[E]``, and the ids of the E trajectories, ``[None]`` without ids.
    """
    done = storage.column(("next", "done"), oldest_first) if len(oldest_first) else None
    if done is None:
        return oldest_first[:0], []
    ids = read_trajectory(storage, oldest_first)
    count = len(oldest_first)
    if ids is None:
        names, last = torch.zeros(1, dtype=torch.int64), torch.tensor([count - 1], device=oldest_first.device)
    else:
        names, of = ids.unique(return_inverse=True)
        place = torch.arange(count, device=of.device)
        last = torch.zeros_like(names).scatter_reduce_(0, of, place, "amax", include_self=False)
    is_running = ~done.reshape(count, -1)[last].any(1)
    if trajectories is not None and ids is not None:
        wanted = torch.tensor(list(trajectories), dtype=torch.int64, device=names.device)
        is_running &= torch.isin(names, wanted)
    index = oldest_first[last][is_running]
    return index, [None] * len(index) if ids is None else names[is_running].tolist()
