# SPDX-License-Identifier: Apache-2.0
"""Named first-in-first-out tables of slots over one storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.memory import check_free
from lightning_replay.storage.occupancy import Occupancy
from lightning_replay.tables.counts import StateActionCounts
from lightning_replay.tables.slot_pool import Slots
from lightning_replay.validation import checked_count


class Tables(Occupancy):
    """Ordered lists of slots, first in first out, each with a name and a capacity of its own.

    A slot holds its row while a table or a running episode (:class:`~lightning_replay.tables.histories.Histories`)
    refers to it, and is free after that. A slot is at most once in a table. An entry takes 8 bytes, a slot 4 bytes in
    each table (its position) and 20 more.

    ::

        default, capacity 4      a  b  c  d     then e comes, and a leaves:    b  c  d  e
        goal,    capacity 2         a  b                                          a  b      a is kept: goal refers to it

    Args:
        capacities: most entries by table name; the order of the names numbers the tables.
        extra_slots: slots beyond those of the tables, for running episodes.

    Raises:
        ValueError: a capacity that is no positive whole number.

    Example:
        >>> tables = Tables({"default": 2, "goal": 1}, extra_slots=0)
        >>> slots = tables.append_new(0, 2); tables.append(np.array([1]), slots[:1])
        >>> slots = tables.append_new(0, 1)
        >>> tables.slots_of(0), tables.slots_of(1)
        (array([1, 2]), array([0]))
    """

    def __init__(self, capacities: Mapping[str, int], extra_slots: int = 0) -> None:
        for name, capacity in capacities.items():
            checked_count(f"capacity of table {name!r}", capacity, of="rows")
        checked_count("extra_slots", extra_slots, 0)
        num_entries = sum(capacities.values())
        self.num_slots = num_entries + extra_slots
        # Entries, and for each slot its positions, its age, its references and its place among the free ones.
        num_bytes = 8 * num_entries + (4 * len(capacities) + 20) * self.num_slots
        check_free(num_bytes, f"tables over {self.num_slots:,} slots")
        self.names = list(capacities)
        self.capacity = np.fromiter(capacities.values(), np.int64, len(capacities))
        self.offset = np.concatenate(([0], np.cumsum(self.capacity)[:-1]))
        self.pool = Slots(self.num_slots)
        # The rings of all tables, one after the other: entry k of a table lies at offset + k % capacity.
        self.entries = np.zeros(num_entries, dtype=np.int64)
        self.appended = np.zeros(len(capacities), dtype=np.int64)
        self._first = np.zeros(len(capacities), dtype=np.int64)  # entries before it left early, see leave_early
        # int32: a ring of more than two thousand million rows fits no memory.
        self.position = np.full((len(capacities), self.num_slots), -1, dtype=np.int32)
        self.rows_written = 0
        self.state_action_counts: StateActionCounts | None = None  # where the writer has count_state_actions
        self._written_at = np.zeros(self.num_slots, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def length(self) -> np.ndarray:
        """Entries of each table, int64 ``[L]``."""
        return np.minimum(self.appended - self._first, self.capacity)

    @property
    def first(self) -> np.ndarray:
        """The oldest entry of each table, of all that were ever appended to it, int64 ``[L]``."""
        return np.maximum(self._first, self.appended - self.capacity)

    @property
    def count(self) -> int:  # type: ignore[override]
        """Slots that a table or the history of a running episode refers to."""
        return self.num_slots - self.pool.num_free

    def slots(self) -> Tensor:
        """Returns the slots that something refers to, int64 ``[count]``, ascending."""
        return torch.from_numpy(np.flatnonzero(self.pool.references))

    def held(self, index: Tensor) -> Tensor:
        """Returns whether something refers to each slot, bool."""
        return torch.from_numpy(self.pool.references[index.cpu().numpy()] > 0).to(index.device)

    def drawable(self, index: Tensor) -> Tensor:
        """Returns whether each slot is in a table, bool; rows of running histories alone are not drawn."""
        return torch.from_numpy((self.position[:, index.cpu().numpy()] >= 0).any(0)).to(index.device)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws slots that something refers to, int64 ``[count]`` on the CPU, each equally likely."""
        held = self.slots()
        return held[torch.randint(len(held), (count,), generator=generator, device=generator.device).cpu()]

    @property
    def nbytes(self) -> int:
        """Bytes of lists, positions and references."""
        return sum(part.nbytes for part in (self.entries, self.position, self._written_at, self.pool))

    def number(self, name: str) -> int:
        """Returns the number of the table of this name; raises KeyError, with all names, where there is none."""
        if name not in self.names:
            raise KeyError(f"there is no table {name!r}; there are {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    def slots_of(self, table: int) -> np.ndarray:
        """Returns the slots of a table, int64, the oldest entry first."""
        return self.entries[self.offset[table] + self._held_places(table)]

    def _held_places(self, table: int) -> np.ndarray:
        return np.arange(self.first[table], self.appended[table]) % self.capacity[table]

    def places(self, table: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Returns the places in the rings, int64 ``[N]``, of entries by table and rank below its length."""
        if not self._first.any():
            return rank
        has_gap = self._first > self.appended - self.capacity  # else the whole ring is taken
        return (np.where(has_gap, self._first, 0)[table] + rank) % self.capacity[table]

    def leave_early(self, table: int, count: int) -> None:
        """Removes the oldest ``count`` entries of a table before it is full."""
        first = int(self.first[table])
        places = np.arange(first, first + count) % self.capacity[table]
        leaving = self.entries[self.offset[table] + places]
        self._first[table] = first + count
        self.position[table, leaving] = -1
        self.pool.release(leaving)

    def append_new(self, table: int, count: int) -> np.ndarray:
        """Appends new rows, at most the capacity, to a table, whose oldest entries leave first; returns their slots."""
        if count == 1:
            return np.array([self._append_one(table)])
        capacity, offset, first = int(self.capacity[table]), int(self.offset[table]), int(self.appended[table])
        places = np.arange(first, first + count)
        if first + count > capacity:
            places %= capacity
        rings = places + offset
        if self._first[table] > first - capacity:  # some of the ring is free
            taken = rings[np.arange(first - capacity, first - capacity + count) >= self._first[table]]
        else:
            taken = rings
        if len(taken):
            leaving = self.entries[taken]
            self.position[table, leaving] = -1
            self.pool.release(leaving)
        slots = self._take(count)
        self.entries[rings] = slots
        self.position[table, slots] = places
        self.appended[table] = first + count
        return slots

    def append_new_to_each(self, table: np.ndarray) -> np.ndarray:
        """:meth:`append_new` of row k to table ``table[k]``, int64 ``[N]``, none more often than its capacity."""
        if len(table) == 1:
            return np.array([self._append_one(int(table[0]))])
        places = self._make_room(table)
        slots = self._take(len(table))
        self._place(table, places, slots)
        return slots

    def _take(self, count: int) -> np.ndarray:
        """Returns slots for rows that are written now, with one reference each."""
        slots = self.pool.take(count)
        self.pool.references[slots] = 1
        self._written_at[slots] = np.arange(self.rows_written, self.rows_written + count)
        self.rows_written += count
        return slots

    def append(self, table: np.ndarray, slots: np.ndarray) -> None:
        """Appends slots with references to tables that do not have them, both int64 ``[N]``; the oldest entries leave.

        Of more slots at once than the capacity of a table, the last ones are appended.
        """
        skipped = np.maximum(np.bincount(table, minlength=len(self)) - self.capacity, 0)
        if skipped.any():
            stays = _rank(table) >= skipped[table]
            table, slots = table[stays], slots[stays]
        self.pool.hold(slots)  # first: a slot may leave the last table that refers to it
        self._place(table, self._make_room(table, skipped), slots)

    def age_of(self, slots: np.ndarray) -> np.ndarray:
        """Returns how many rows were written after those in the slots."""
        return self.rows_written - 1 - self._written_at[slots]

    def clear(self) -> None:
        """Empties every table."""
        on_free, self.pool = self.pool.on_free, Slots(self.num_slots)
        self.pool.on_free = on_free
        self.position.fill(-1)
        self.appended.fill(0)
        self._first.fill(0)
        self.rows_written = 0

    def _append_one(self, table: int) -> int:
        """:meth:`append_new` of one row in plain numbers, the fast path of one environment step."""
        capacity, offset, number = int(self.capacity[table]), int(self.offset[table]), int(self.appended[table])
        place = number % capacity
        if number - capacity >= self._first[table]:
            leaving = int(self.entries[offset + place])
            self.position[table, leaving] = -1
            self.pool.release_one(leaving)
        slot = int(self.pool.take(1)[0])
        self.pool.references[slot] = 1
        self.entries[offset + place] = slot
        self.position[table, slot] = place
        self.appended[table] = number + 1
        self._written_at[slot] = self.rows_written
        self.rows_written += 1
        return slot

    def _make_room(self, table: np.ndarray, skipped: np.ndarray | int = 0) -> np.ndarray:
        """Removes the entries in the way of new ones, after ``skipped`` ones ``[L]``; returns the free places."""
        before = self.appended
        self.appended = before + skipped + np.bincount(table, minlength=len(self))
        places = ((before + skipped)[table] + _rank(table)) % self.capacity[table]
        # The number of the last entry at each place, negative before any was appended.
        last = before[table] - 1
        taken = last - (last - places) % self.capacity[table] >= self._first[table]
        if taken.any():
            tables, leaving = table[taken], self.entries[self.offset[table[taken]] + places[taken]]
            self.position[tables, leaving] = -1
            if not ((tables == tables[0]).all() or (self.pool.references[leaving] == 1).all()):
                leaving, times = np.unique(leaving, return_counts=True)  # a slot may leave several tables at once
                self.pool.references[leaving] -= (times - 1).astype(np.int32)
            self.pool.release(leaving)  # of one table free in order of age
        return places

    def _place(self, table: np.ndarray, places: np.ndarray, slots: np.ndarray) -> None:
        self.entries[self.offset[table] + places] = slots
        self.position[table, slots] = places

    def state_dict(self) -> dict[str, Any]:
        """Returns lists, references and counters, as tensors and plain values."""
        return {
            "entries": torch.from_numpy(self.entries.copy()),
            "appended": torch.from_numpy(self.appended.copy()),
            "first": torch.from_numpy(self._first.copy()),
            "written_at": torch.from_numpy(self._written_at.copy()),
            "rows_written": self.rows_written,
            "slots": self.pool.state_dict(),
            "counts": None if self.state_action_counts is None else self.state_action_counts.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; raises ValueError, unchanged, for that of other tables."""
        entries = state_dict["entries"].numpy()
        if entries.shape != self.entries.shape or len(state_dict["written_at"]) != self.num_slots:
            raise ValueError(
                f"the saved tables hold {len(entries)} entries over {len(state_dict['written_at'])} slots, these "
                f"{len(self.entries)} over {self.num_slots}; build them with the saved capacities"
            )
        if self.state_action_counts is not None and state_dict["counts"] is None:
            raise ValueError(
                "the saved tables have no counts of states and actions; build them without a correction that counts"
            )
        self.entries[:] = entries
        self.appended[:] = state_dict["appended"].numpy()
        self._first[:] = state_dict["first"].numpy() if "first" in state_dict else 0  # early saves have none
        self._written_at[:] = state_dict["written_at"].numpy()
        self.rows_written = int(state_dict["rows_written"])
        self.pool.load_state_dict(state_dict["slots"])
        if self.state_action_counts is not None:
            self.state_action_counts.load_state_dict(state_dict["counts"])
        self.position.fill(-1)
        for table in range(len(self)):
            self.position[table, self.slots_of(table)] = self._held_places(table)


def _rank(table: np.ndarray) -> np.ndarray:
    """Returns how many earlier entries have the same table, int64 ``[N]``: 0 0 1 2 1 for 2 0 2 2 0."""
    steps = np.arange(len(table))
    counts = np.bincount(table)
    if len(counts) < 2 or counts[-1] == len(table):
        return steps
    rank = np.empty_like(steps)
    rank[np.argsort(table, kind="stable")] = steps - np.repeat(np.cumsum(counts) - counts, counts)
    return rank
