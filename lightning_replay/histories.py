# SPDX-License-Identifier: Apache-2.0
"""Running episodes: the slots of their last steps, held until it is known whether an event follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_replay.tables import Slots


class Stretch(NamedTuple):
    """Rows of one episode among the rows written together: their places in the batch, in order of time.

    It continues what ran under its number before, unless an episode of that number has ended in the same batch.
    """

    trajectory: int
    rows: np.ndarray
    continues: bool
    ended: bool


def stretches(trajectory: np.ndarray, done: np.ndarray) -> Iterator[Stretch]:
    """Takes a batch of rows apart by episode.

    Args:
        trajectory: int64 ``[N]``, the running episode of each row.
        done: bool ``[N]``, whether the row ended its episode; what follows under the same number is another one.

    Example:
        >>> for stretch in stretches(np.array([7, 8, 7, 7]), np.array([False, False, True, False])):
        ...     print(stretch.trajectory, stretch.rows, stretch.continues, stretch.ended)
        7 [0 2] True True
        7 [3] False False
        8 [1] True False
    """
    order = np.argsort(trajectory, kind="stable")
    named, ends = trajectory[order], done[order]
    last = np.append(named[1:] != named[:-1], True) | ends
    start = 0
    for stop in (np.flatnonzero(last) + 1).tolist():
        continues = start == 0 or bool(named[start] != named[start - 1])
        yield Stretch(int(named[start]), order[start:stop], continues, bool(ends[stop - 1]))
        start = stop


class Histories:
    """The last steps of every running episode, each held by a reference so that its slot is not written again.

    Args:
        slots: counts the references.
        length: steps remembered of an episode.
        max_trajectories: episodes that may run at once.
    """

    def __init__(self, slots: Slots, length: int, max_trajectories: int) -> None:
        self._slots = slots
        self._length = length
        self._max_trajectories = max_trajectories
        self._running: dict[int, np.ndarray] = {}  # the one continued last is last
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._running)

    def before(self, stretch: Stretch) -> np.ndarray:
        """Slots of the remembered steps that come before a stretch, int64, oldest first."""
        return self._running.get(stretch.trajectory, _NONE) if stretch.continues else _NONE

    def check_room(self, trajectory: np.ndarray, done: np.ndarray, *, forget_stale: bool) -> None:
        """Refuses rows by which more episodes would run at once than there is room for.

        Args:
            trajectory: int64 ``[N]``, of the rows to come.
            done: bool ``[N]``.
            forget_stale: forget the episodes that were continued longest ago instead.

        Raises:
            ValueError: with both numbers; nothing has changed.
        """
        if not self._length or len(self._running) + len(trajectory) <= self._max_trajectories:
            return
        opened = {}
        for name, ended in zip(trajectory.tolist(), done.tolist(), strict=True):
            opened[name] = not ended
        running = [name for name, is_open in opened.items() if is_open]
        staying = [name for name in self._running if name not in opened]
        excess = len(running) + len(staying) - self._max_trajectories
        if excess > 0 and (not forget_stale or excess > len(staying)):
            raise ValueError(
                f"{len(running) + len(staying)} episodes would run at once, and histories of max_trajectories="
                f"{self._max_trajectories} are held. Nothing was stored. Raise max_trajectories; or if these episodes "
                "have ended, mark their last steps done"
            )
        for name in staying[: max(excess, 0)]:
            self.forget(name)
            self.forgotten += 1

    def follow(self, stretch: Stretch, slots: np.ndarray) -> None:
        """Appends the slots of a stretch to its episode, or forgets the episode that it ended."""
        if stretch.ended:
            self.forget(stretch.trajectory)
            return
        if not self._length:
            return
        before = self._running.pop(stretch.trajectory, _NONE)
        kept = slots[-self._length :]
        dropped = max(0, len(before) + len(kept) - self._length)
        self._slots.hold(kept)
        self._slots.release(before[:dropped])
        self._running[stretch.trajectory] = np.concatenate((before[dropped:], kept))

    def forget(self, trajectory: int) -> None:
        """Releases the steps of an episode."""
        self._slots.release(self._running.pop(trajectory, _NONE))

    def state_dict(self) -> dict[str, Any]:
        """Trajectories and slots, as tensors and plain values."""
        return {
            "trajectory": torch.tensor(list(self._running), dtype=torch.int64),
            "length": torch.tensor([len(held) for held in self._running.values()], dtype=torch.int64),
            "slots": torch.from_numpy(np.concatenate([_NONE, *self._running.values()])),
            "forgotten": self.forgotten,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave; the references are those of the slots' own state."""
        parts = np.split(state_dict["slots"].numpy(), np.cumsum(state_dict["length"].numpy())[:-1])
        self._running = dict(zip(state_dict["trajectory"].tolist(), parts, strict=False))
        self.forgotten = int(state_dict["forgotten"])


_NONE = np.zeros(0, dtype=np.int64)
