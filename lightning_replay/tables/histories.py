# SPDX-License-Identifier: Apache-2.0
"""Running episodes: the slots of their last steps, which stay stored as long as an event may follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_replay.episodes.groups import EpisodeGroups
from lightning_replay.episodes.running_rows import RunningRows
from lightning_replay.storage.occupancy import are_within
from lightning_replay.tables import kernels
from lightning_replay.tables.kernels import EventArrays, HistoryArrays
from lightning_replay.tables.tables import Tables

_NONE = np.zeros(0, dtype=np.int64)


class Histories:
    """The last ``length`` steps of up to ``max_trajectories`` running episodes. Each step is a reference to its slot.

    With ``forget_stale``, the episodes continued longest ago make room for others, and episodes are also counted if no
    step is remembered. Otherwise, more episodes are refused.
    """

    def __init__(self, tables: Tables, length: int, max_trajectories: int, forget_stale: bool = False) -> None:
        self._tables = tables
        self._length = length
        self._max_trajectories = max_trajectories
        self._forget_stale = forget_stale
        self._clear()

    def _clear(self) -> None:
        self._running = RunningRows()
        self.arrays: HistoryArrays = HistoryArrays(np.zeros((0, self._length), dtype=np.int64), _NONE, _NONE)
        self._now = 0  # Episodes continued so far, which orders the running episodes.
        self.forgotten: int = 0

    def __len__(self) -> int:
        return len(self._running)

    def of(self, trajectory: int) -> np.ndarray:
        """Returns the slots of the remembered steps of a running episode, int64, oldest first."""
        return self._steps_in(self._rows_of([trajectory]))

    def _rows_of(self, trajectories: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the rows of episodes that run, int64, each once and in the order in which they are given."""
        rows = self._running.find(np.asarray(trajectories, dtype=np.int64))
        _, firsts = np.unique(rows, return_index=True)
        rows = rows[np.sort(firsts)]
        return rows[rows >= 0]

    def _lengths_in(self, rows: np.ndarray) -> np.ndarray:
        return np.minimum(self.arrays.added[rows], self._length)

    def _steps_in(self, rows: np.ndarray) -> np.ndarray:
        """Returns the slots of the remembered steps in rows of the arrays, row after row, oldest first."""
        # A row with fewer steps has its steps in its first places.
        first = (self.arrays.added[rows] - self._lengths_in(rows))[:, None]
        places = (first + np.arange(self._length)) % max(self._length, 1)
        return self.arrays.steps[rows[:, None], places][np.arange(self._length) < self._lengths_in(rows)[:, None]]

    def _oldest_first(self) -> np.ndarray:
        """Returns the running episodes, int64. The episode continued last is last."""
        return self._running.names[np.argsort(self.arrays.continued[self._running.rows])]

    def _open(self, trajectories: np.ndarray) -> np.ndarray:
        rows = self._running.open(trajectories)
        further = self._running.capacity - len(self.arrays.added)
        if further:
            grown = [np.concatenate((one, np.zeros((further, *one.shape[1:]), np.int64))) for one in self.arrays]
            self.arrays = HistoryArrays(*grown)
        return rows

    def check_room(self, parts: Sequence[EpisodeGroups]) -> None:
        """Raises ``ValueError`` for batches, written in turn, with which too many episodes would run at once."""
        if not self._length or len(self) + sum([len(part.trajectory) for part in parts]) <= self._max_trajectories:
            return
        running = self._oldest_first()
        for part in parts:
            staying, opened = _running_after(running, part)
            excess = len(staying) + len(opened) - self._max_trajectories
            if excess > (len(staying) if self._forget_stale else 0):
                raise ValueError(
                    f"{len(staying) + len(opened)} episodes would run at once, of max_trajectories="
                    f"{self._max_trajectories}. Nothing was stored. Raise it, or mark last steps of ended episodes done"
                )
            running = np.concatenate((staying[max(excess, 0) :], opened))

    def evict_stale(self, rows: EpisodeGroups) -> np.ndarray:
        """Evicts the episodes continued longest ago, if checked rows need their room. Returns their trajectories."""
        if len(self) + len(rows.trajectory) <= self._max_trajectories:
            return _NONE
        staying, opened = _running_after(self._oldest_first(), rows)
        return self._evict(staying[: max(0, len(staying) + len(opened) - self._max_trajectories)])

    def evict_oldest(self) -> np.ndarray:
        """Evicts the episode continued longest ago, and returns its trajectory, or nothing if no episode runs."""
        return self._evict(self._oldest_first()[:1])

    def _evict(self, trajectories: np.ndarray) -> np.ndarray:
        self.end_episodes(trajectories)
        self.forgotten += len(trajectories)
        return trajectories

    def follow(
        self, happened: np.ndarray, events: EventArrays, episodes: EpisodeGroups, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Appends the steps that led to events, bool ``[V, N]``, to the events' tables, and new rows to their episodes.

        A step goes to a table once. Tables are filled in turn, each in the order of its events. An episode that ends
        has no history any more. Returns tables and slots of the steps, int64, in the order in which they were appended.
        """
        held_in = self._open(episodes.trajectory)
        # A storage of frames learns of the slots that the compiled loops free after the loops.
        before = self._tables.num_freed
        arrays = self._tables.arrays
        events.sent[slots] = False  # Earlier rows of these slots may have been sent.
        tables = steps = _NONE
        if np.count_nonzero(happened):
            tables, steps = kernels.led_to_events(
                happened, tuple(events), tuple(episodes), slots, held_in, tuple(self.arrays)
            )
            kernels.append(tuple(arrays), tables, steps)
        grouped = episodes.order, episodes.start, episodes.done
        num_ended = kernels.remember(
            arrays.references, arrays.free, arrays.counters, *grouped, slots, held_in, *self.arrays, self._now
        )
        self._now += len(held_in)
        self._tables.announce(before)
        if not (self._length or self._forget_stale):
            self._running.close(held_in)
        elif num_ended:
            self._running.close(held_in[episodes.ended])
        return tables, steps

    def end_episodes(self, trajectories: Sequence[int] | np.ndarray) -> None:
        """Releases the remembered steps of episodes that nothing continues. Others are ignored."""
        rows = self._rows_of(trajectories)
        slots = self._steps_in(rows)
        self.arrays.added[rows] = 0
        self._running.close(rows)
        self._tables.release(slots)

    def state_dict(self) -> dict[str, Any]:
        """Returns the slots of the remembered steps, episode after episode."""
        running = self._oldest_first()
        rows = self._running.find(running)
        return {
            "trajectory": torch.from_numpy(running),
            "length": torch.from_numpy(self._lengths_in(rows)),
            "slots": torch.from_numpy(self._steps_in(rows)),
            "forgotten": self.forgotten,
        }

    def slots_in(self, state_dict: Mapping[str, Any]) -> np.ndarray:
        """Returns the slots of a saved state, or raises ``ValueError`` unless they belong to different episodes."""
        names, lengths, slots = (state_dict[name].numpy() for name in ("trajectory", "length", "slots"))
        if not (
            names.dtype == np.int64
            and are_within(lengths, self._length + 1, len(names))
            and lengths.sum() == len(slots)
            and (lengths >= min(self._length, 1)).all()
            and len(np.unique(names)) == len(names)
        ):
            raise ValueError("the state has steps that are not those of its running episodes; load another save")
        return slots

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, after :meth:`slots_in`."""
        self._clear()
        names, length = state_dict["trajectory"].numpy(), state_dict["length"].numpy()
        self._open(np.sort(names))
        rows = self._running.find(names)
        self.arrays.added[rows] = length
        self.arrays.continued[rows] = np.arange(len(names))
        self._now = len(names)
        # The state of the tables counts the references to these slots.
        self.arrays.steps[np.repeat(rows, length), _within(length)] = state_dict["slots"].numpy()
        self.forgotten = int(state_dict["forgotten"])


def _running_after(running: np.ndarray, rows: EpisodeGroups) -> tuple[np.ndarray, np.ndarray]:
    return running[~np.isin(running, rows.trajectory)], rows.trajectory[~rows.ended]


def _within(lengths: np.ndarray) -> np.ndarray:
    """Returns the numbers from 0 to the length, for one length after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
