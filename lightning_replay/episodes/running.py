# SPDX-License-Identifier: Apache-2.0
"""Running episodes: trajectories whose newest row did not end them, and the observations that these rows ended with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.episodes.links import Tally, equal_rows
from lightning_replay.episodes.tracker import read_trajectory
from lightning_replay.parts import WriterHooks
from lightning_replay.storage.access import device_of, occupancy_of
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.tables.arrays import EpisodeGroups

__all__ = ["Breaks", "RunningObservations", "newest_running", "slots_by_age", "stored_trajectories"]

ObservationPair = tuple[Any, Any]  # columns [N, numbers] of one observation before and after the step of each row


class Breaks(NamedTuple):
    """Where new rows ``[N]`` start with another observation than the row before ended with."""

    done: np.ndarray  #: bool ``[N]``, whether an episode ends with each row; also where it breaks off.
    starts: list[int]  #: The running episodes that the rows given before them do not continue.
    begins: list[tuple[int, int]]  #: Rows with which another episode of the same trajectory begins, and these.

    def parts(self) -> Iterator[tuple[slice, int | None]]:
        """Yields the rows in parts, each with the trajectory whose episode begins anew with it, if one does."""
        bounds = [(0, None), *self.begins] if not self.begins or self.begins[0][0] else self.begins
        for place, (first, name) in enumerate(bounds):
            yield slice(first, bounds[place + 1][0] if place + 1 < len(bounds) else len(self.done)), name


class RunningObservations:
    """The observations that running episodes ended with so far, with which their next rows must start, bit for bit.

    Rows of the same episodes in each call, as environments side by side give them, are compared as one block.
    """

    def __init__(self) -> None:
        self._last: dict[int, bytes] = {}
        self._names: np.ndarray | None = None  # the episodes whose observations are in the block instead
        self._block: list[np.ndarray] = []
        self.tally: Tally = Tally()  #: Of rows that do not continue the row before.

    def breaks(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups) -> Breaks | None:
        """Returns where new rows do not continue the rows before them; ``None`` where all do.

        Args:
            pairs: the observations of the rows; without any, all rows continue.
            episodes: the groups of the rows.
        """
        if not pairs:
            return None
        begins: list[tuple[int, int]] = []
        if len(episodes.done) == 1 and self._names is None:  # in half the time
            name = int(episodes.trajectory[0])
            last = self._last.get(name)
            if last is None or last == b"".join([own.tobytes() for own, _ in pairs]):
                return None
            return Breaks(episodes.done, [name], [(0, name)])
        if not self._is_block(pairs, episodes):
            heads = episodes.order[episodes.start[:-1]].tolist()
            for name, first in zip(episodes.trajectory.tolist(), heads, strict=True):
                last = self._last.get(name)
                if last is not None and last != b"".join([own[first].tobytes() for own, _ in pairs]):
                    begins.append((first, name))
        starts, done = [name for _, name in begins], episodes.done
        if len(done) > len(episodes.trajectory) and not _is_one_run(pairs, episodes):
            is_inner = ~done[episodes.order[:-1]]
            is_inner[episodes.start[1:-1] - 1] = False
            before, after = episodes.order[:-1][is_inner], episodes.order[1:][is_inner]
            broken = np.zeros(len(before), dtype=np.bool_)
            for own, following in pairs:
                broken |= ~equal_rows(own[after], following[before])
            if broken.any():
                done = done.copy()
                done[before[broken]] = True
                names = np.empty(len(done), dtype=np.int64)
                names[episodes.order] = np.repeat(episodes.trajectory, np.diff(episodes.start))
                begins += [(row, int(names[row])) for row in after[broken].tolist()]
        return Breaks(done, starts, sorted(begins)) if begins else None

    def follow(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups, num_broken: int) -> None:
        """Keeps the observations that rows ended with, once they are stored.

        Args:
            pairs, episodes: as for :meth:`breaks`.
            num_broken: rows that do not continue the row before.
        """
        if not pairs:
            return
        self.tally.add(len(episodes.done), num_broken)
        if len(episodes.trajectory) == 1 and self._names is None and not episodes.done[-1]:  # in half the time
            self._last[int(episodes.trajectory[0])] = b"".join([following[-1].tobytes() for _, following in pairs])
            return
        names, lasts = episodes.trajectory, episodes.order[episodes.start[1:] - 1]
        if len(names) > 1 and not episodes.ended.any():
            if self._names is None or not np.array_equal(names, self._names):
                self._spill()
                for name in names.tolist():
                    self._last.pop(name, None)
            self._names, self._block = names, [following[lasts] for _, following in pairs]
            return
        self._spill()
        for name, row, has_ended in zip(names.tolist(), lasts.tolist(), episodes.ended.tolist(), strict=True):
            if has_ended:
                self._last.pop(name, None)
            else:
                self._last[name] = b"".join([following[row].tobytes() for _, following in pairs])

    def _is_block(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups) -> bool:
        """Returns whether the first rows of all episodes continue the block, which is spilled where they do not."""
        if self._names is None:
            return False
        if np.array_equal(self._names, episodes.trajectory):
            heads = episodes.order[episodes.start[:-1]]
            if all(own[heads].tobytes() == last.tobytes() for (own, _), last in zip(pairs, self._block, strict=True)):
                return True
        self._spill()
        return False

    def _spill(self) -> None:
        """Moves the observations of the block to those of single episodes."""
        if self._names is not None:
            for place, name in enumerate(self._names.tolist()):
                self._last[name] = b"".join([last[place].tobytes() for last in self._block])
            self._names, self._block = None, []

    def forget(self, trajectory: int) -> None:
        self._spill()
        self._last.pop(trajectory, None)

    def abandon(self, trajectories: Iterable[int]) -> None:
        """Keeps episodes that no row continues."""
        self._names, self._last = None, dict.fromkeys(trajectories, b"")

    def state_dict(self) -> dict[str, Any]:
        """Returns running episodes, int64 ``[E]``, their last observations, uint8 ``[E, bytes]``, and abandoned."""
        self._spill()
        known = {name: last for name, last in self._last.items() if last}
        abandoned = [name for name, last in self._last.items() if not last]
        last = np.frombuffer(b"".join(known.values()), dtype=np.uint8).reshape(len(known) or 1, -1)
        names, others = (torch.tensor(part, dtype=torch.int64, device="cpu") for part in (list(known), abandoned))
        return {"trajectory": names, "last": torch.from_numpy(last.copy()), "abandoned": others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names, last = state["trajectory"].tolist(), state["last"].numpy()
        self.abandon(state["abandoned"].tolist())
        self._last |= {name: row.tobytes() for name, row in zip(names, last, strict=False)}


def _is_one_run(pairs: Sequence[ObservationPair], episodes: EpisodeGroups) -> bool:
    """Returns whether all rows are of one episode without an end, and each continues the one before."""
    if len(episodes.trajectory) > 1 or episodes.done[:-1].any():
        return False
    return all(own[1:].tobytes() == following[:-1].tobytes() for own, following in pairs)


def slots_by_age(storage: Storage, writer: WriterHooks) -> Tensor | None:
    """Returns the slots of the stored rows, int64 ``[N]``, oldest first; ``None`` where the writer keeps no order."""
    slots = occupancy_of(storage).slots().to(device_of(storage) or "cpu")
    age = writer.age_of(slots)
    return None if age is None else slots[age.to(slots.device).argsort(descending=True)]


def stored_trajectories(storage: Storage) -> list[int | None]:
    """Returns the ids of all stored trajectories; ``[None]`` where rows have none."""
    slots = occupancy_of(storage).slots().to(device_of(storage) or "cpu")
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
