# SPDX-License-Identifier: Apache-2.0
"""Running episodes of a storage: their trajectories, newest rows, and what their last observations were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.groups import EpisodeGroups
from lightning_replay.episodes.links import (
    TRAJECTORY_KEYS,
    DiscontinuityCount,
    EpisodeLinks,
    consecutive,
    equal_rows,
    trajectory_name,
    trajectory_of,
)
from lightning_replay.options import checked_flag, checked_key
from lightning_replay.parts import WriterHooks
from lightning_replay.storage.columns import checked_device
from lightning_replay.storage.packed import PackedStorage, occupancy_of, read_columns, readable_rows, stored_before

ObservationPair = tuple[Any, Any]  # columns [N, numbers] of one observation before and after the step of each row


def read_trajectory(storage: Storage, index: Tensor) -> Tensor | None:
    """Returns the running episode of each stored row, int64 ``[N]`` on the CPU; ``None`` when the rows name none."""
    trajectory = stored_trajectory(storage, index)
    return None if trajectory is None else trajectory.cpu()


def stored_trajectory(storage: Storage, index: Tensor) -> Tensor | None:
    """Returns the running episode of each stored row, int64 ``[N]``; ``None`` if the rows name none."""
    if isinstance(storage, PackedStorage):
        columns = (storage.column(key, index) for key in TRAJECTORY_KEYS if storage.has_column(key))
        trajectory = next(columns, None)
    else:
        named = trajectory_of(readable_rows(storage))
        trajectory = None if named is None else named[index]
    return None if trajectory is None else trajectory.flatten()


def require_columns(rows: TensorDictBase, purpose: str) -> None:
    """Raises ``ValueError`` for rows ``[N]`` without one reward, terminated and done each; ``purpose`` needs them."""
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
        device: Device of rows and links; ``None`` keeps the links on the CPU.
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
        """Refuses the first rows ``[N]`` where they have no flags of episode ends; later ones have their columns."""
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

        Returns the slots that were linked: with the first rows also those that were stored before, in slot order.
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
        return index

    def _new_links(self, capacity: int) -> Any:
        if self.device is None:
            return EpisodeLinks(capacity)
        # Most replays draw on the CPU.
        from lightning_replay.episodes.device_links import DeviceLinks

        return DeviceLinks(capacity, self.device, counts_steps=self._counts_steps)

    def warn(self) -> None:
        """Warns once if most rows do not continue the row before; call it when the sampler has the new rows."""
        if self.links is not None and self.links.continuity is not None:
            self.links.continuity.warn()

    def end_episodes(self, slots: Tensor, trajectories: Iterable[int | None] = ()) -> None:
        """Ends the episodes with the newest rows ``slots``, int64 ``[n]``, and those that run in ``trajectories``."""
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
        """Bytes of the links; 0 before any row is stored."""
        return 0 if self.links is None else self.links.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the links; ``None`` before any row is stored."""
        return {"links": None if self.links is None else self.links.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.links = None
        if state_dict["links"] is not None:
            self.links = self._new_links(state_dict["links"]["successor"].numel())
            self.links.load_state_dict(state_dict["links"])


class Discontinuities(NamedTuple):
    """Where new rows ``[N]`` start with another observation than the row before ended with."""

    done: np.ndarray  #: bool ``[N]``, whether an episode ends with each row; also where it breaks off.
    starts: list[int]  #: The running episodes that the rows given before them do not continue.
    begins: list[tuple[int, int]]  #: Rows with which another episode of the same trajectory begins, and these.

    def parts(self) -> Iterator[tuple[slice, int | None]]:
        """Yields the rows in parts, each with the trajectory of the episode that begins with it, if one begins."""
        bounds = [(0, None), *self.begins] if not self.begins or self.begins[0][0] else self.begins
        for place, (first, name) in enumerate(bounds):
            yield slice(first, bounds[place + 1][0] if place + 1 < len(bounds) else len(self.done)), name


class LastObservations:
    """The observations that running episodes ended with so far, with which their next rows must start, bit for bit."""

    def __init__(self) -> None:
        self._last: dict[int, bytes] = {}
        self.tally: DiscontinuityCount = DiscontinuityCount()  #: Of rows that do not continue the row before.

    def breaks(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups) -> Discontinuities | None:
        """Returns where new rows do not continue the rows before them; ``None`` where all do, as without ``pairs``."""
        if not pairs:
            return None
        if len(episodes.done) == 1:  # One row takes half the time.
            name = int(episodes.trajectory[0])
            observation = b"".join([own.tobytes() for own, _ in pairs])
            continues = self._last.get(name, observation) == observation
            return None if continues else Discontinuities(episodes.done, [name], [(0, name)])
        begins: list[tuple[int, int]] = []
        # The first row of each episode in the batch is compared with the last observation of the episode.
        named = episodes.trajectory.tolist()
        heads = episodes.order[episodes.start[:-1]]
        is_one = len(named) == 1
        owns = [own for own, _ in pairs]
        given = [b"".join([own[0].tobytes() for own in owns])] if is_one else _bytes_at(owns, heads)
        if list(map(self._last.get, named)) != given:
            rows = zip(heads.tolist(), named, given, strict=True)
            begins = [(first, name) for first, name, seen in rows if self._last.get(name, seen) != seen]
        starts = [name for _, name in begins]
        done = episodes.done
        # Within the batch: each row against the one before it in its episode. One run of rows that all continue is
        # compared without copies, in a third of the time.
        is_one_run = is_one and all(own[1:].tobytes() == following[:-1].tobytes() for own, following in pairs)
        if len(done) > len(named) and not is_one_run:
            before, after = consecutive(episodes)
            broken = np.zeros(len(before), dtype=np.bool_)
            for own, following in pairs:
                broken |= ~equal_rows(own[after], following[before])
            if broken.any():
                done = done.copy()
                done[before[broken]] = True
                names = np.empty(len(done), dtype=np.int64)
                names[episodes.order] = np.repeat(episodes.trajectory, np.diff(episodes.start))
                begins += [(row, int(names[row])) for row in after[broken].tolist()]
        return Discontinuities(done, starts, sorted(begins)) if begins else None

    def follow(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups, num_broken: int) -> None:
        """Keeps the observations that rows ended with, once they are stored; ``num_broken`` do not continue others."""
        if not pairs:
            return
        self.tally.add(len(episodes.done), num_broken)
        if len(episodes.trajectory) == 1 and not episodes.done[-1]:  # One episode takes half the time.
            self._last[int(episodes.trajectory[0])] = b"".join([following[-1].tobytes() for _, following in pairs])
            return
        lasts = _bytes_at([following for _, following in pairs], episodes.order[episodes.start[1:] - 1])
        self._last.update(zip(episodes.trajectory.tolist(), lasts, strict=True))
        self.end_episodes(episodes.trajectory[episodes.ended].tolist())

    def end_episodes(self, trajectories: Iterable[int]) -> None:
        """Forgets the last observations of these episodes, so that any row may begin the next episode."""
        for name in trajectories:
            self._last.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the running episodes, int64 ``[E]``, and their last observations, uint8 ``[E, bytes]``."""
        last = np.frombuffer(b"".join(self._last.values()), dtype=np.uint8).reshape(len(self._last) or 1, -1)
        names = torch.tensor(list(self._last), dtype=torch.int64, device="cpu")
        return {"trajectory": names, "last": torch.from_numpy(last.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        rows = zip(state["trajectory"].tolist(), state["last"].numpy(), strict=False)
        self._last = {name: row.tobytes() for name, row in rows}


def _bytes_at(columns: Sequence[np.ndarray], places: np.ndarray) -> list[bytes]:
    """Returns the bytes of all columns ``[N, numbers]`` in each of the rows at ``places``."""
    parts = [np.ascontiguousarray(column[places]) for column in columns]
    rows = parts[0] if len(parts) == 1 else np.concatenate([part.view(np.uint8) for part in parts], 1)
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0].tolist()


def held_slots(storage: Storage) -> Tensor:
    """Returns the slots that hold a row, int64."""
    return occupancy_of(storage).slots()


def slots_by_age(storage: Storage, writer: WriterHooks) -> Tensor | None:
    """Returns the slots of the stored rows, int64 ``[N]``, oldest first; ``None`` if the writer keeps no order."""
    slots = held_slots(storage)
    age = writer.age_of(slots)
    return None if age is None else slots[age.argsort(descending=True)]


def stored_trajectories(storage: Storage) -> list[int | None]:
    """Returns the trajectories of the stored rows, each once; ``[None]`` if rows name none."""
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
