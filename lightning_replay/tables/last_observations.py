# SPDX-License-Identifier: Apache-2.0
"""The last observations of running episodes, and the rows that do not continue them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_replay.episodes.groups import EpisodeGroups
from lightning_replay.episodes.links import DiscontinuityCount, consecutive, equal_rows
from lightning_replay.episodes.running_rows import RunningRows
from lightning_replay.tables import kernels

ObservationPair = tuple[Any, Any]  # columns [N, numbers] of one observation before and after each step


class Discontinuities(NamedTuple):
    """Breaks among new rows ``[N]``: rows that start with another observation than the row before ended with."""

    done: np.ndarray  #: bool ``[N]``, whether an episode ends with each row, also by breaking off.
    starts: np.ndarray  #: Running episodes that the rows given before them do not continue, int64.
    inner: np.ndarray  #: Other rows with which another episode of the same trajectory begins, int64 ascending.
    names: np.ndarray  #: Trajectories of these rows, int64.

    @property
    def num_broken(self) -> int:
        """Number of rows that do not continue the row before."""
        return len(self.starts) + len(self.inner)

    def parts(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the rows in parts, each with the trajectories whose running episodes end before it."""
        bounds = [0, *self.inner.tolist(), len(self.done)]
        ending = [self.starts, *self.names[:, None]]
        for place, names in enumerate(ending):
            yield slice(bounds[place], bounds[place + 1]), names


class LastObservations:
    """The observations that running episodes ended with so far, with which their next rows must start, bit for bit."""

    def __init__(self) -> None:
        self._running = RunningRows()
        self._last = np.zeros((0, 0), dtype=np.uint8)  # The words of all observations, [capacity, words].
        self.tally: DiscontinuityCount = DiscontinuityCount()  #: Of rows that do not continue the row before.

    def breaks(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups) -> Discontinuities | None:
        """Returns which new rows do not continue the rows before them, or ``None`` if all do, as without ``pairs``."""
        if not pairs:
            return None
        # The first row of each episode in the batch is compared with the last observation of the episode.
        found = self._running.find(episodes.trajectory)
        if len(episodes.done) == 1:  # One row takes a third of the time.
            row = found[0]
            if row < 0 or self._last[row].tobytes() == b"".join([own.tobytes() for own, _ in pairs]):
                return None
        is_other = np.zeros(len(found), dtype=np.bool_)
        num_broken = first = 0
        for own in _words_of([own for own, _ in pairs]) if len(self._running) else ():
            last = self._last.view(own.dtype)  # A load leaves bytes.
            num_broken = kernels.mark_others(own, episodes.order, episodes.start, last, first, found, is_other)
            first += own.shape[1]
        # Within the batch: each row against the one before it in its episode. One run of rows that all continue is
        # compared without copies, in a third of the time.
        done = episodes.done
        inner = np.zeros(0, dtype=np.int64)
        is_one_run = len(found) == 1 and all(own[1:].tobytes() == following[:-1].tobytes() for own, following in pairs)
        if len(done) > len(found) and not is_one_run:
            before, after = consecutive(episodes)
            broken = np.zeros(len(before), dtype=np.bool_)
            for own, following in pairs:
                broken |= ~equal_rows(own[after], following[before])
            inner = np.sort(after[broken])
            if len(inner):
                done = done.copy()
                done[before[broken]] = True
        if not num_broken and not len(inner):
            return None
        names = np.empty(len(done), dtype=np.int64)
        names[episodes.order] = np.repeat(episodes.trajectory, np.diff(episodes.start))
        return Discontinuities(done, episodes.trajectory[is_other], inner, names[inner])

    def follow(self, pairs: Sequence[ObservationPair], episodes: EpisodeGroups, num_broken: int) -> None:
        """Keeps the observations that rows ended with, once they are stored. ``num_broken`` do not continue others."""
        if not pairs:
            return
        self.tally.add(len(episodes.done), num_broken)
        rows = self._running.open(episodes.trajectory)
        if (
            len(rows) == 1 and rows[0] < len(self._last) and not episodes.done[-1]
        ):  # One episode takes a third of the time.
            newest = b"".join([following[-1].tobytes() for _, following in pairs])
            self._last[rows[0]] = np.frombuffer(newest, self._last.dtype)
            return
        words = _words_of([following for _, following in pairs])
        if len(self._last) < self._running.capacity:
            grown = np.zeros((self._running.capacity, sum(one.shape[1] for one in words)), dtype=words[0].dtype)
            if len(self._last):
                grown[: len(self._last)] = self._last.view(grown.dtype)
            self._last = grown
        last, first = self._last.view(words[0].dtype), 0
        for one in words:
            kernels.keep_last(one, episodes.order, episodes.start, last, first, rows)
            first += one.shape[1]
        if episodes.ended.any():
            self._running.close(rows[episodes.ended])

    def end_episodes(self, trajectories: np.ndarray) -> None:
        """Forgets the last observations of these episodes, so that any row may begin the next episode."""
        self._running.close(self._running.find(trajectories))

    def state_dict(self) -> dict[str, Any]:
        """Returns the running episodes, int64 ``[E]``, and their last observations, uint8 ``[E, bytes]``."""
        last = self._last[self._running.rows].view(np.uint8)
        return {
            "trajectory": torch.from_numpy(self._running.names.copy()),
            "last": torch.from_numpy(last if len(last) else last.reshape(1, 0)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        names, last = state["trajectory"].numpy(), state["last"].numpy()
        self._running = RunningRows()
        rows = self._running.open(np.sort(names))
        self._last = np.zeros_like(last, shape=(len(rows), last.shape[1]))
        self._last[rows] = last[np.argsort(names)]


def _words_of(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns columns ``[N, numbers]`` as unsigned numbers as wide as fit all of them, which are compared faster."""
    size = math.gcd(8, *[column.shape[1] * column.itemsize for column in columns])
    return [np.ascontiguousarray(column).view(f"u{size}") for column in columns]
