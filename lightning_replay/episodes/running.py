# SPDX-License-Identifier: Apache-2.0
"""Running episodes of a storage: their trajectories and newest rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.deferred_checks import DeferredChecks
from lightning_replay.episodes.links import (
    TRAJECTORY_KEYS,
    EpisodeLinks,
    trajectory_name,
    trajectory_of,
)
from lightning_replay.options import checked_flag, checked_key
from lightning_replay.parts import WriterHooks
from lightning_replay.storage.columns import checked_device
from lightning_replay.storage.packed import PackedStorage, occupancy_of, read_columns, readable_rows, stored_before


def read_trajectory(storage: Storage, index: Tensor) -> Tensor | None:
    """Returns the running episode of each stored row, int64 ``[N]`` on the CPU, or ``None`` when the rows name none."""
    trajectory = stored_trajectory(storage, index)
    return None if trajectory is None else trajectory.cpu()


def stored_trajectory(storage: Storage, index: Tensor) -> Tensor | None:
    """Returns the running episode of each stored row, int64 ``[N]``, or ``None`` if the rows name none."""
    if isinstance(storage, PackedStorage):
        columns = (storage.column(key, index) for key in TRAJECTORY_KEYS if storage.has_column(key))
        trajectory = next(columns, None)
    else:
        named = trajectory_of(readable_rows(storage))
        trajectory = None if named is None else named[index]
    return None if trajectory is None else trajectory.flatten()


def require_columns(rows: TensorDictBase, purpose: str) -> None:
    """Raises ``ValueError`` for rows ``[N]`` without one reward, terminated and done each. ``purpose`` needs them."""
    for name in ("reward", "terminated", "done"):
        require_one_each(rows, ("next", name), purpose, is_flag=name != "reward")
    trajectory = trajectory_of(rows)
    if trajectory is not None and trajectory.numel() != rows.shape[0]:
        raise ValueError(
            f"the column {trajectory_name(rows)} has the shape {list(trajectory.shape)} for {rows.shape[0]} rows, and "
            f"{purpose} need the episode of each row, int64 [{rows.shape[0]}]. Nothing was stored"
        )


def require_one_each(rows: TensorDictBase, key: NestedKey, purpose: str, *, is_flag: bool) -> None:
    """Raises ``ValueError`` for rows ``[N]`` without one number, or one flag, for each row under ``key``."""
    column = rows.get(key, None)
    count = rows.shape[0]
    if column is None:
        raise ValueError(
            f"the transitions have no {key!r}, which {purpose} need; nothing was stored. "
            "Store reward, terminated, truncated and done under 'next' of every transition"
        )
    wrong_dtype = (column.dtype == torch.bool) != is_flag or column.is_complex()
    if column.numel() != count or wrong_dtype:
        kind = "bool" if is_flag else "a number"
        raise ValueError(
            f"{key!r} is {column.dtype} {list(column.shape)}, and {purpose} need {kind} for each row, [{count}] or "
            f"[{count}, 1]; nothing was stored"
        )


class FollowedEpisodes:
    """The links between the rows of a storage.

    Args:
        done_key: Flag of rows that ended their episode.
        check_continuity: Whether observations are compared.
        device: Device of rows and links. ``None`` keeps the links on the CPU.
        counts_steps: Whether links on a device count the steps of each episode.
    """

    def __init__(
        self,
        done_key: NestedKey,
        check_continuity: bool,
        device: str | torch.device | None = None,
        counts_steps: bool = False,
    ) -> None:
        checked_key("done_key", done_key)
        self.done_key: NestedKey = tuple(done_key) if isinstance(done_key, list) else done_key
        self.check_continuity: bool = checked_flag("check_continuity", check_continuity)
        self.device: torch.device | None = None if device is None else checked_device(device)
        self._counts_steps = counts_steps
        # EpisodeLinks or DeviceLinks, once rows are stored.
        self.links: Any = None

    def check_ends(self, rows: TensorDictBase, sampler: str, purpose: str) -> None:
        """Refuses the first rows ``[N]`` if they have no flags of episode ends. Later ones have their columns."""
        if self.links is not None:
            return
        if rows.get(self.done_key, None) is None:
            raise ValueError(
                f"the transitions have no {self.done_key!r}, which marks where episodes end; nothing was stored. "
                f"Store it with every transition, or name your key with done_key= of {sampler}"
            )
        require_one_each(rows, self.done_key, purpose, is_flag=True)

    def mark_update(self, index: Tensor, storage: Storage) -> Tensor:
        """Links the rows just written into the slots ``index``, int64 ``[n]`` in insertion order.

        Returns the slots that were linked: with the first rows also the rows that were stored before, in slot order.
        """
        if self.links is None:
            index = index.cpu()
            index = torch.cat((stored_before(storage, index), index))
            if not len(index):
                return index
        (done,) = read_columns(storage, index, [self.done_key])
        if self.links is None:
            self.links = self._new_links(storage.max_size)
        if self.check_continuity and self.links.continuity is None:
            self.links.continuity = self.links.compares(storage)
        self.links.write(index, stored_trajectory(storage, index), done)
        if self.device is not None and self.device.type == "cpu":  # Nothing waits for the CPU.
            self.links.receive(self.links.counts.tolist())
        return index

    def move_to(self, device: torch.device | None) -> None:
        """Keeps the links on another device from now on. ``None`` is the CPU."""
        if device != self.device:
            state = self.state_dict()
            self.device = device
            FollowedEpisodes.load_state_dict(self, state)

    def _new_links(self, capacity: int) -> Any:
        if self.device is None:
            return EpisodeLinks(capacity)
        # Most replays draw on the CPU.
        from lightning_replay.episodes.device_links import DeviceLinks

        return DeviceLinks(capacity, self.device, counts_steps=self._counts_steps)

    def defer_reads(self, checks: DeferredChecks) -> None:
        """Has the counts of links on a device read with the refusals.

        :meta private:
        """
        checks.register(self._counts, self._receive)

    def _counts(self) -> Tensor:
        if self.links is None:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        counts: Tensor = self.links.counts
        return counts

    def _receive(self, counts: list[int]) -> None:
        if counts:
            self.links.receive(counts)

    def warn(self) -> None:
        """Warns once if most rows do not continue the row before. Call it when the sampler has the new rows."""
        if self.links is not None and self.links.continuity is not None:
            self.links.continuity.warn()

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends the episodes with the newest rows ``slots``, int64 ``[n]``, and the episodes in ``trajectories``."""
        if self.links is not None:
            self.links.end_episodes(slots, trajectories)

    def on_evict(self, index: Tensor) -> None:
        """Cuts the links to and from rows that left without being overwritten."""
        if self.links is not None:
            self.links.release(index)

    def clear(self) -> None:
        """Removes all links."""
        self.links = None

    @property
    def nbytes(self) -> int:
        """Bytes of the links, or 0 before any row is stored."""
        return 0 if self.links is None else self.links.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the links, or ``None`` before any row is stored."""
        return {"links": None if self.links is None else self.links.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.links = None
        if state_dict["links"] is not None:
            self.links = self._new_links(state_dict["links"]["successor"].numel())
            self.links.load_state_dict(state_dict["links"])


def held_slots(storage: Storage) -> Tensor:
    """Returns the slots that hold a row, int64."""
    return occupancy_of(storage).slots()


def slots_by_age(storage: Storage, writer: WriterHooks) -> Tensor | None:
    """Returns the slots of the stored rows, int64 ``[N]``, oldest first, or ``None`` if the writer keeps no order."""
    slots = held_slots(storage)
    age = writer.age_of(slots)
    return None if age is None else slots[age.argsort(descending=True)]


def stored_trajectories(storage: Storage) -> list[int | None]:
    """Returns the trajectories of the stored rows, each once, or ``[None]`` if rows name none."""
    slots = held_slots(storage)
    ids = read_trajectory(storage, slots) if len(slots) else None
    return [None] if ids is None else ids.unique_consecutive().unique().tolist()


def newest_running(
    storage: PackedStorage, oldest_first: Tensor, trajectories: Iterable[int] | None = None
) -> tuple[Tensor, list[int | None]]:
    """Returns the newest slot of each running episode, or of those named, and their ids, ``[None]`` without ids."""
    # Without a column ("next", "done") no episode is known to run.
    done = storage.column(("next", "done"), oldest_first) if len(oldest_first) else None
    if done is None:
        return oldest_first[:0], []
    ids = read_trajectory(storage, oldest_first)
    count = len(oldest_first)
    if ids is None:
        names = torch.zeros(1, dtype=torch.int64, device="cpu")
        last = torch.tensor([count - 1], device="cpu")
    else:
        names, of = ids.unique(return_inverse=True)
        place = torch.arange(count, device="cpu")
        last = torch.zeros_like(names).scatter_reduce_(0, of, place, "amax", include_self=False)
    is_running = ~done.reshape(count, -1)[last].any(1).cpu()
    if trajectories is not None and ids is not None:
        is_running &= torch.isin(names, torch.tensor(list(trajectories), dtype=torch.int64, device="cpu"))
    index = oldest_first[last][is_running]
    return index, [None] * len(index) if ids is None else names[is_running].tolist()
