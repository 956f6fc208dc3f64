# SPDX-License-Identifier: Apache-2.0
"""Running episodes: the slots of their last steps, held as long as an event may follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The last ``length`` steps of up to ``max_trajectories`` running episodes, each held by a reference to its slot.

    With ``forget_stale`` the episodes continued longest ago make room for others, and episodes are counted also where
    no step is remembered; otherwise more episodes are refused.
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
        self._running: dict[int, int] = {}  # the row of each episode; the one continued last is last
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
        before, needed = len(self.arrays.added), len(self._running) + len(trajectories)
        if needed > before:
            grown = np.zeros((max(needed, 2 * before), self._length), dtype=np.int64)
            added = np.zeros(len(grown), dtype=np.int64)
            grown[:before], added[:before] = self.arrays
            self.arrays = HistoryArrays(grown, added)
            self._unused.extend(range(before, len(grown)))
        running, unused = self._running, self._unused
        return [running[name] if name in running else unused.pop() for name in trajectories]

    def check_room(self, parts: Sequence[EpisodeGroups]) -> None:
        """Raises ValueError for batches, written in turn, with which too many episodes would run at once."""
        named = sum([len(part.trajectory) for part in parts])
        if not self._length or len(self._running) + named <= self._max_trajectories:
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

    def make_room(self, rows: EpisodeGroups) -> list[int]:
        """Discards the episodes continued longest ago, as far as checked rows need their room; returns these."""
        staying, opened = _running_after(list(self._running), rows)
        # A dictionary is in order of insertion, and follow puts an episode that goes on at its end.
        stale = staying[: max(0, len(staying) + len(opened) - self._max_trajectories)]
        for name in stale:
            self.forget(name)
        self.forgotten += len(stale)
        return stale

    def follow(
        self, happened: np.ndarray, events: EventArrays, episodes: EpisodeGroups, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Appends the steps that led to events, bool ``[V, N]``, to the events' tables, and new rows to their episodes.

        A step goes to a table once. Tables are filled in turn, each in the order of its events; an episode is forgotten
        where it ends. Returns tables and slots of the steps, int64, in the order in which they were appended.
        """
        names = episodes.trajectory.tolist()
        rows = self._rows_of(names)
        # Slots that the compiled loops free are counted, and announced to a storage of frames after them.
        before, arrays = self._tables.num_freed, self._tables.arrays
        held_in = np.array(rows, dtype=np.int64)
        events.sent[slots] = False  # they may have held rows that were sent
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
            # Out and in again: a dictionary keeps the episode that was continued last at its end.
            self._running.pop(name, None)
            if ended or not (self._length or self._forget_stale):
                self._unused.append(row)
            else:
                self._running[name] = row
        return tables, steps

    def forget(self, trajectory: int) -> None:
        held = self.of(trajectory)
        row = self._running.pop(trajectory, None)
        if row is not None:
            self.arrays.added[row] = 0
            self._unused.append(row)
            self._tables.release(held)

    def forget_oldest(self) -> int | None:
        """Releases the steps of the episode continued longest ago; returns it, or ``None`` if none runs."""
        name = next(iter(self._running), None)
        if name is not None:
            self.forget(name)
            self.forgotten += 1
        return name

    def state_dict(self) -> dict[str, Any]:
        held = [self.of(name) for name in self._running]
        return {
            "trajectory": torch.tensor(list(self._running), dtype=torch.int64, device="cpu"),
            "length": torch.tensor([len(slots) for slots in held], dtype=torch.int64, device="cpu"),
            "slots": torch.from_numpy(np.concatenate([_NONE, *held])),
            "forgotten": self.forgotten,
        }

    def slots_in(self, state_dict: Mapping[str, Any]) -> np.ndarray:
        """Returns the slots of a saved state; ``ValueError`` if its steps are not those of different episodes."""
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
        # The references are in the state of the slots.
        self._clear()
        names = state_dict["trajectory"].tolist()
        slots = np.split(state_dict["slots"].numpy(), np.cumsum(state_dict["length"].numpy()))
        for name, row, held in zip(names, self._rows_of(names), slots, strict=False):
            self.arrays.steps[row, : len(held)], self.arrays.added[row] = held, len(held)
            self._running[name] = row
        self.forgotten = int(state_dict["forgotten"])


def _running_after(running: Sequence[int], rows: EpisodeGroups) -> tuple[list[int], list[int]]:
    given = rows.trajectory.tolist()
    opened = [name for name, ended in zip(given, rows.ended.tolist(), strict=True) if not ended]
    named = set(given)
    return [name for name in running if name not in named], opened
