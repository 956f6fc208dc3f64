# SPDX-License-Identifier: Apache-2.0
"""Running episodes: the slots of their last steps, held as long as an event may follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_replay.tables.slot_pool import Slots


class EpisodeSlice(NamedTuple):
    """Rows of one episode in a batch: their places, in order of time.

    ``continues`` the running episode of its number, unless that ended in the same batch; ``ended`` by its last row.
    """

    trajectory: int
    rows: np.ndarray
    continues: bool
    ended: bool


def episode_slices(trajectory: np.ndarray, done: np.ndarray) -> Iterator[EpisodeSlice]:
    """Divides a batch of rows by running episode, int64 ``[N]``; after a row that is done, another one begins.

    Example:
        >>> for part in episode_slices(np.array([7, 8, 7, 7]), np.array([False, False, True, False])):
        ...     print(part.trajectory, part.rows, part.continues, part.ended)
        7 [0 2] True True
        7 [3] False False
        8 [1] True False
    """
    if len(trajectory) == 1:
        yield EpisodeSlice(int(trajectory[0]), np.zeros(1, dtype=np.int64), True, bool(done[0]))
        return
    order = np.argsort(trajectory, kind="stable")
    named, ends = trajectory[order], done[order]
    last = np.append(named[1:] != named[:-1], True) | ends
    start = 0
    for stop in (np.flatnonzero(last) + 1).tolist():
        continues = start == 0 or bool(named[start] != named[start - 1])
        yield EpisodeSlice(int(named[start]), order[start:stop], continues, bool(ends[stop - 1]))
        start = stop


def led_to_events(
    happened: np.ndarray, history_length: np.ndarray, num_before: int, is_sent: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of one episode that its events append to a table, in order.

    Where events have different history lengths, a long one may append older steps after an earlier short one.

    Args:
        happened: bool ``[E, N]``, which events the new steps are.
        history_length: int64 ``[E]``, the event's own step included.
        num_before: remembered steps before the new ones.
        is_sent: bool ``[num_before + N]``, steps that have been in the table.

    Returns:
        Places among all ``num_before + N`` steps, and for each the place of its event among the new ones.

    Example:
        >>> happened = np.array([[False, True, False, True, False]])
        >>> led_to_events(happened, np.array([3]), 2, np.array([True, True, False, False, False, False, False]))
        (array([2, 3, 4, 5]), array([1, 1, 3, 3]))
    """
    events = np.flatnonzero(happened.any(0))
    if (history_length == history_length[0]).all():
        last = events + num_before
        steps = np.flatnonzero(~is_sent[: last[-1] + 1])
        following = np.searchsorted(last, steps)  # the next event at or after each step
        near = last[following] - steps < history_length[0]
        return steps[near], events[following[near]]
    is_sent = is_sent.copy()
    sent, sender = [], []
    for event in events.tolist():
        longest = int(history_length[happened[:, event]].max())
        last_step = event + num_before
        window = np.arange(max(0, last_step - longest + 1), last_step + 1)
        new = window[~is_sent[window]]
        is_sent[new] = True
        sent.append(new)
        sender.append(np.full(len(new), event))
    return np.concatenate(sent), np.concatenate(sender)


class Histories:
    """The last ``length`` steps of up to ``max_trajectories`` running episodes, each held by a reference to its slot.

    With ``forgets_stale``, needed for :meth:`make_room`, episodes are counted also where no step is remembered.
    """

    def __init__(self, slots: Slots, length: int, max_trajectories: int, forgets_stale: bool = False) -> None:
        self._slots = slots
        self._length = length
        self._max_trajectories = max_trajectories
        self._counts_all = length > 0 or forgets_stale
        self._running: dict[int, deque[int]] = {}  # the one continued last is last
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._running)

    def before(self, part: EpisodeSlice) -> np.ndarray:
        """Returns the slots of the remembered steps before a slice, int64, oldest first."""
        held = self._running.get(part.trajectory, ()) if part.continues else ()
        return np.array(held, dtype=np.int64)

    def check_room(self, parts: Sequence[tuple[np.ndarray, np.ndarray]], forget_stale: bool) -> None:
        """Raises ValueError for rows with which more than ``max_trajectories`` episodes would run at once.

        Args:
            parts: trajectory, int64 ``[N]``, and done, bool ``[N]``, of batches to be written in turn.
            forget_stale: whether :meth:`make_room` will forget the episodes that were continued longest ago.
        """
        named = sum(len(set(trajectory.tolist())) for trajectory, _ in parts)
        if not self._length or len(self._running) + named <= self._max_trajectories:
            return
        running = list(self._running)
        for trajectory, done in parts:
            staying, opened = self._running_after(running, trajectory, done)
            excess = len(staying) + len(opened) - self._max_trajectories
            if excess > (len(staying) if forget_stale else 0):
                raise ValueError(
                    f"{len(staying) + len(opened)} episodes would run at once, and histories of max_trajectories="
                    f"{self._max_trajectories} are held. Nothing was stored. Raise max_trajectories; or if these "
                    "episodes have ended, mark their last steps done"
                )
            running = staying[max(excess, 0) :] + opened

    def make_room(self, trajectory: np.ndarray, done: np.ndarray) -> list[int]:
        """Forgets the episodes continued longest ago, as far as checked rows need their room; returns these."""
        staying, opened = self._running_after(list(self._running), trajectory, done)
        stale = staying[: max(0, len(staying) + len(opened) - self._max_trajectories)]
        for name in stale:
            self.forget(name)
            self.forgotten += 1
        return stale

    def _running_after(
        self, running: Sequence[int], trajectory: np.ndarray, done: np.ndarray
    ) -> tuple[list[int], list[int]]:
        """Returns the running episodes that are not in the rows, and those of the rows that run on."""
        is_open = dict(zip(trajectory.tolist(), (~done).tolist(), strict=True))
        return [name for name in running if name not in is_open], [name for name, runs in is_open.items() if runs]

    def append(self, part: EpisodeSlice, slots: np.ndarray) -> None:
        """Appends the slots of a slice to its episode, or forgets the episode where it ended."""
        if part.ended:
            self.forget(part.trajectory)
            return
        if not self._counts_all:
            return
        held = self._running.pop(part.trajectory, None) or deque()
        kept = slots[len(slots) - self._length :] if self._length < len(slots) else slots
        self._slots.references[kept] += 1
        held.extend(kept.tolist())
        while len(held) > self._length:
            self._slots.release_one(held.popleft())
        self._running[part.trajectory] = held

    def forget(self, trajectory: int) -> None:
        """Releases the steps of an episode."""
        held = self._running.pop(trajectory, None)
        if held:
            self._slots.release(np.array(held))

    def forget_oldest(self) -> int | None:
        """Releases the steps of the episode continued longest ago; returns it, or ``None`` if none runs."""
        name = next(iter(self._running), None)
        if name is not None:
            self.forget(name)
            self.forgotten += 1
        return name

    def state_dict(self) -> dict[str, Any]:
        """Returns trajectories and slots, as tensors and plain values."""
        return {
            "trajectory": torch.tensor(list(self._running), dtype=torch.int64),
            "length": torch.tensor([len(held) for held in self._running.values()], dtype=torch.int64),
            "slots": torch.tensor([slot for held in self._running.values() for slot in held], dtype=torch.int64),
            "forgotten": self.forgotten,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; the references are in the state of the slots."""
        slots = iter(state_dict["slots"].tolist())
        lengths = zip(state_dict["trajectory"].tolist(), state_dict["length"].tolist(), strict=True)
        self._running = {name: deque(islice(slots, length)) for name, length in lengths}
        self.forgotten = int(state_dict["forgotten"])
