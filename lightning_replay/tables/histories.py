# SPDX-License-Identifier: Apache-2.0
"""Running episodes: the slots of their last steps, which stay stored as long as an event may follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_replay.episodes.groups import EpisodeGroups
from lightning_replay.storage.occupancy import are_within
from lightning_replay.tables import kernels
from lightning_replay.tables.kernels import EventArrays, HistoryArrays
from lightning_replay.tables.tables import Tables

_NONE = np.zeros(0, dtype=np.int64)


class Histories:
    """The last ``length`` steps of up to ``max_trajectories`` running episodes; each step is a reference to its slot.

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
        self.arrays: HistoryArrays = HistoryArrays(
            np.zeros((0, self._length), dtype=np.int64), np.zeros(0, dtype=np.int64)
        )
        # The row of each episode. The episode continued last is last: a dictionary keeps the order of insertion.
        self._running: dict[int, int] = {}
        self._unused: list[int] = []
        self.forgotten: int = 0

    def __len__(self) -> int:
        return len(self._running)

    def of(self, trajectory: int) -> np.ndarray:
        """Returns the slots of the remembered steps of a running episode, int64, oldest first."""
        row = self._running.get(trajectory)
        if row is None:
            return _NONE
        count = int(self.arrays.added[row])
        return self.arrays.steps[row, np.arange(max(count - self._length, 0), count) % max(self._length, 1)]

    def _rows_of(self, trajectories: Sequence[int]) -> list[int]:
        before = len(self.arrays.added)
        needed = len(self._running) + len(trajectories)
        if needed > before:
            further = max(needed - before, before)
            steps = np.concatenate((self.arrays.steps, np.zeros((further, self._length), dtype=np.int64)))
            self.arrays = HistoryArrays(steps, np.concatenate((self.arrays.added, np.zeros(further, dtype=np.int64))))
            self._unused.extend(range(before, before + further))
        return [self._running[name] if name in self._running else self._unused.pop() for name in trajectories]

    def check_room(self, parts: Sequence[EpisodeGroups]) -> None:
        """Raises ``ValueError`` for batches, written in turn, with which too many episodes would run at once."""
        if not self._length or len(self) + sum([len(part.trajectory) for part in parts]) <= self._max_trajectories:
            return
        running = list(self._running)
        for part in parts:
            staying, opened = _running_after(running, part)
            excess = len(staying) + len(opened) - self._max_trajectories
            if excess > (len(staying) if self._forget_stale else 0):
                raise ValueError(
                    f"{len(staying) + len(opened)} episodes would run at once, of max_trajectories="
                    f"{self._max_trajectories}. Nothing was stored. Raise it, or mark last steps of ended episodes done"
                )
            running = staying[max(excess, 0) :] + opened

    def evict_stale(self, rows: EpisodeGroups) -> list[int]:
        """Evicts the episodes continued longest ago, if checked rows need their room; returns their trajectories."""
        staying, opened = _running_after(list(self._running), rows)
        return self._evict(staying[: max(0, len(staying) + len(opened) - self._max_trajectories)])

    def evict_oldest(self) -> list[int]:
        """Evicts the episode continued longest ago; returns its trajectory, or nothing if no episode runs."""
        return self._evict([*self._running][:1])

    def _evict(self, trajectories: list[int]) -> list[int]:
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
        names = episodes.trajectory.tolist()
        rows = self._rows_of(names)
        # A storage of frames learns of the slots that the compiled loops free after the loops.
        before = self._tables.num_freed
        arrays = self._tables.arrays
        held_in = np.array(rows, dtype=np.int64)
        events.sent[slots] = False  # Earlier rows of these slots may have been sent.
        tables = steps = _NONE
        if np.count_nonzero(happened):
            tables, steps = kernels.led_to_events(
                happened, tuple(events), tuple(episodes), slots, held_in, tuple(self.arrays)
            )
            kernels.append(tuple(arrays), tables, steps)
        grouped = episodes.order, episodes.start, episodes.done
        kernels.remember(arrays.references, arrays.free, arrays.counters, *grouped, slots, held_in, *self.arrays)
        self._tables.announce(before)
        for name, row, ended in zip(names, rows, episodes.ended.tolist(), strict=True):
            # An episode that goes on is inserted again, so that it becomes the last one.
            self._running.pop(name, None)
            if ended or not (self._length or self._forget_stale):
                self._unused.append(row)
            else:
                self._running[name] = row
        return tables, steps

    def end_episodes(self, trajectories: Iterable[int]) -> None:
        """Releases the remembered steps of episodes that nothing continues; others are ignored."""
        for name in trajectories:
            slots = self.of(name)
            row = self._running.pop(name, None)
            if row is not None:
                self.arrays.added[row] = 0
                self._unused.append(row)
                self._tables.release(slots)

    def state_dict(self) -> dict[str, Any]:
        """Returns the slots of the remembered steps, episode after episode."""
        held = [self.of(name) for name in self._running]
        return {
            "trajectory": torch.tensor(list(self._running), dtype=torch.int64, device="cpu"),
            "length": torch.tensor([len(slots) for slots in held], dtype=torch.int64, device="cpu"),
            "slots": torch.from_numpy(np.concatenate([_NONE, *held])),
            "forgotten": self.forgotten,
        }

    def slots_in(self, state_dict: Mapping[str, Any]) -> np.ndarray:
        """Returns the slots of a saved state; raises ``ValueError`` unless they belong to different episodes."""
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
        names = state_dict["trajectory"].tolist()
        slots = np.split(state_dict["slots"].numpy(), np.cumsum(state_dict["length"].numpy()))
        # The state of the tables counts the references to these slots.
        for name, row, held in zip(names, self._rows_of(names), slots, strict=False):
            self.arrays.steps[row, : len(held)] = held
            self.arrays.added[row] = len(held)
            self._running[name] = row
        self.forgotten = int(state_dict["forgotten"])


def _running_after(running: Sequence[int], rows: EpisodeGroups) -> tuple[list[int], list[int]]:
    given = rows.trajectory.tolist()
    opened = [name for name, ended in zip(given, rows.ended.tolist(), strict=True) if not ended]
    named = set(given)
    return [name for name in running if name not in named], opened
