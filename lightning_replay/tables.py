# SPDX-License-Identifier: Apache-2.0
"""Named first-in-first-out tables of slots over one storage, and the counted references that keep a slot alive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_replay.state_action_counts import StateActionCounts


class Slots:
    """Rows of a storage that are taken while something refers to them, and free otherwise.

    Args:
        count: rows of the storage.

    Example:
        >>> slots = Slots(3)
        >>> slots.take(2), slots.num_free
        (array([0, 1]), 1)
        >>> slots.hold(np.array([0, 1])); slots.hold(np.array([1])); slots.release(np.array([0, 1]))
        >>> slots.take(2), slots.references
        (array([2, 0]), array([0, 1, 0], dtype=int32))
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = np.zeros(count, dtype=np.int32)
        # A ring, so that slots freed in order are taken in order and a write stays one stretch of memory.
        self._free = np.arange(count)
        self._next = 0
        self.num_free = count

    def take(self, count: int) -> np.ndarray:
        """``count`` free slots, int64, the one that has been free for longest first; nothing refers to them yet.

        Raises:
            RuntimeError: fewer are free.
        """
        if count > self.num_free:
            raise RuntimeError(
                f"{count} rows are to be written and {self.num_free} of {self.count} slots are free; build the storage "
                "with the writer's num_slots"
            )
        end = self._next + count
        taken = self._free[self._next : end] if end <= self.count else self._wrapped(self._next, count)
        self._next = end % self.count
        self.num_free -= count
        return taken.copy()

    def hold(self, slots: np.ndarray) -> None:
        """One more reference to each of these slots; several to one that is named several times."""
        np.add.at(self.references, slots, 1)

    def release(self, slots: np.ndarray) -> None:
        """One reference less to each of these slots, all different; those without any are free."""
        left = self.references[slots] - 1
        self.references[slots] = left
        freed = slots[left == 0]
        start = (self._next + self.num_free) % self.count
        if start + len(freed) <= self.count:
            self._free[start : start + len(freed)] = freed
        else:
            self._free.put(np.arange(start, start + len(freed)), freed, mode="wrap")
        self.num_free += len(freed)

    def release_one(self, slot: int) -> None:
        """One reference less to a slot."""
        self.references[slot] -= 1
        if not self.references[slot]:
            self._free[(self._next + self.num_free) % self.count] = slot
            self.num_free += 1

    def _wrapped(self, start: int, count: int) -> np.ndarray:
        return self._free.take(np.arange(start, start + count), mode="wrap")

    def state_dict(self) -> dict[str, Any]:
        """The free slots in order, and the references."""
        order = self._wrapped(self._next, self.num_free)
        return {"free": torch.from_numpy(order), "references": torch.from_numpy(self.references.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        free = state_dict["free"].numpy()
        self._free[: len(free)] = free
        self._next, self.num_free = 0, len(free)
        self.references[:] = state_dict["references"].numpy()


class Tables:
    """Ordered lists of slots, first in first out, each with a name and a capacity of its own.

    A slot lives while at least one table (or a running episode, see :meth:`hold`) refers to it, and is free to be
    written again after. A slot is at most once in a table. The lists cost 8 bytes an entry, and a slot 4 bytes in each
    table (its position) and 12 more.

    ::

        default, capacity 4      a  b  c  d     then e comes, and a leaves:    b  c  d  e
        goal,    capacity 2         a  b                                          a  b      a is kept: goal refers to it

    Args:
        capacities: most entries by table name; the order of the names numbers the tables.
        extra_slots: rows beyond the tables' own, for what running episodes hold.

    Example:
        >>> tables = Tables({"default": 2, "goal": 1}, extra_slots=0)
        >>> slots = tables.append_new(0, 2); tables.append(np.array([1]), slots[:1])
        >>> slots = tables.append_new(0, 1)
        >>> tables.slots_of(0), tables.slots_of(1)
        (array([1, 2]), array([0]))
    """

    def __init__(self, capacities: Mapping[str, int], extra_slots: int = 0) -> None:
        self.names = list(capacities)
        self.capacity = np.fromiter(capacities.values(), np.int64, len(capacities))
        self.offset = np.concatenate(([0], np.cumsum(self.capacity)[:-1]))
        self.num_slots = int(self.capacity.sum()) + extra_slots
        self.pool = Slots(self.num_slots)
        # The rings of all tables, one after the other: entry k of a table lies at offset + k % capacity.
        self.entries = np.zeros(int(self.capacity.sum()), dtype=np.int64)
        self.appended = np.zeros(len(capacities), dtype=np.int64)
        # int32: a ring of more than two thousand million rows fits no memory.
        self.position = np.full((len(capacities), self.num_slots), -1, dtype=np.int32)
        self.rows_written = 0
        self.state_action_counts: StateActionCounts | None = None  # kept by a writer that is told to
        self._written_at = np.zeros(self.num_slots, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def length(self) -> np.ndarray:
        """Entries of each table, int64 ``[L]``."""
        return np.minimum(self.appended, self.capacity)

    @property
    def num_held(self) -> int:
        """Slots that something refers to."""
        return self.num_slots - self.pool.num_free

    @property
    def nbytes(self) -> int:
        """Bytes of lists, positions and references."""
        arrays = (self.entries, self.position, self._written_at, self.pool.references, self.pool._free)
        return sum(array.nbytes for array in arrays)

    def number(self, name: str) -> int:
        """The number of the table of this name.

        Raises:
            KeyError: no such table; the message names those there are.
        """
        if name not in self.names:
            raise KeyError(f"there is no table {name!r}; there are {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    def slots_of(self, table: int) -> np.ndarray:
        """Slots of a table, int64, the oldest entry first."""
        capacity, appended = int(self.capacity[table]), int(self.appended[table])
        ring = self.entries[self.offset[table] :][: min(appended, capacity)]
        return np.roll(ring, -(appended % capacity)) if appended > capacity else ring.copy()

    def holds(self, table: int, slots: np.ndarray) -> np.ndarray:
        """Whether each slot is in the table, bool of the shape of ``slots``."""
        return self.position[table][slots] >= 0

    def append_new(self, table: int, count: int) -> np.ndarray:
        """Takes slots for new rows and appends them to one table, whose oldest entries leave first.

        Args:
            table: its number.
            count: rows, at most the capacity of the table.

        Returns:
            Slots, int64 ``[count]``.
        """
        if count == 1:
            return np.array([self._append_one(table)])
        capacity, offset, first = int(self.capacity[table]), int(self.offset[table]), int(self.appended[table])
        places = np.arange(first, first + count)
        if first + count > capacity:
            places %= capacity
        rings = places + offset
        taken = rings if first >= capacity else rings[places < first]
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
        """As :meth:`append_new`, each row to a table of its own.

        Args:
            table: int64 ``[N]``, in the order of the rows; no table more often than its capacity.
        """
        if len(table) == 1:
            return np.array([self._append_one(int(table[0]))])
        places = self._make_room(table)
        slots = self._take(len(table))
        self._place(table, places, slots)
        return slots

    def _take(self, count: int) -> np.ndarray:
        """Slots for rows that are written now, with one reference each."""
        slots = self.pool.take(count)
        self.pool.references[slots] = 1
        self._written_at[slots] = np.arange(self.rows_written, self.rows_written + count)
        self.rows_written += count
        return slots

    def append(self, table: np.ndarray, slots: np.ndarray) -> None:
        """Appends slots that are alive and not in the table, in order; the table's oldest entries leave.

        Of more entries at once than the capacity of a table the last ones stay.

        Args:
            table: int64 ``[N]``, of each slot.
            slots: int64 ``[N]``.
        """
        skipped = np.maximum(np.bincount(table, minlength=len(self)) - self.capacity, 0)
        if skipped.any():
            stays = _rank(table) >= skipped[table]
            table, slots = table[stays], slots[stays]
        self.pool.hold(slots)  # before anything leaves: a slot may be in its last table
        self._place(table, self._make_room(table, skipped), slots)

    def age_of(self, slots: np.ndarray) -> np.ndarray:
        """How many rows were written after those in the slots."""
        return self.rows_written - 1 - self._written_at[slots]

    def clear(self) -> None:
        """Empties every table."""
        self.pool = Slots(self.num_slots)
        self.position.fill(-1)
        self.appended.fill(0)
        self.rows_written = 0

    def _append_one(self, table: int) -> int:
        """The path of one environment step: :meth:`append_new` in plain numbers, several times faster."""
        capacity, offset, number = int(self.capacity[table]), int(self.offset[table]), int(self.appended[table])
        place = number % capacity
        if number >= capacity:
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
        """Places in the rings for one more entry of each of ``table``; what lies there leaves.

        Args:
            table: int64 ``[N]``.
            skipped: entries of each table that come before and are not kept, int64 ``[L]``.
        """
        before = self.appended
        self.appended = before + skipped + np.bincount(table, minlength=len(self))
        places = ((before + skipped)[table] + _rank(table)) % self.capacity[table]
        taken = places < np.minimum(before, self.capacity)[table]
        if taken.any():
            tables, leaving = table[taken], self.entries[self.offset[table[taken]] + places[taken]]
            self.position[tables, leaving] = -1
            if (tables == tables[0]).all():
                self.pool.release(leaving)  # all different, and free in order of age
            else:
                self._release_from_several(leaving)
        return places

    def _release_from_several(self, slots: np.ndarray) -> None:
        """One reference less for each time a slot is named."""
        if (self.pool.references[slots] == 1).all():
            self.pool.release(slots)  # none can be named twice
            return
        once, times = np.unique(slots, return_counts=True)
        self.pool.references[once] -= (times - 1).astype(np.int32)
        self.pool.release(once)

    def _place(self, table: np.ndarray, places: np.ndarray, slots: np.ndarray) -> None:
        self.entries[self.offset[table] + places] = slots
        self.position[table, slots] = places

    def state_dict(self) -> dict[str, Any]:
        """Lists, references and counters, as tensors and plain values."""
        return {
            "entries": torch.from_numpy(self.entries.copy()),
            "appended": torch.from_numpy(self.appended.copy()),
            "written_at": torch.from_numpy(self._written_at.copy()),
            "rows_written": self.rows_written,
            "slots": self.pool.state_dict(),
            "counts": None if self.state_action_counts is None else self.state_action_counts.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave; the tables must be the same."""
        entries = state_dict["entries"].numpy()
        if entries.shape != self.entries.shape or len(state_dict["written_at"]) != self.num_slots:
            raise ValueError(
                f"the saved tables hold {len(entries)} entries over {len(state_dict['written_at'])} slots, these "
                f"{len(self.entries)} over {self.num_slots}; build them with the saved capacities"
            )
        self.entries[:] = entries
        self.appended[:] = state_dict["appended"].numpy()
        self._written_at[:] = state_dict["written_at"].numpy()
        self.rows_written = int(state_dict["rows_written"])
        self.pool.load_state_dict(state_dict["slots"])
        if self.state_action_counts is not None and state_dict["counts"] is not None:
            self.state_action_counts.load_state_dict(state_dict["counts"])
        self.position.fill(-1)
        for table, (offset, length) in enumerate(zip(self.offset, self.length, strict=True)):
            self.position[table, self.entries[offset : offset + length]] = np.arange(length)


def _rank(table: np.ndarray) -> np.ndarray:
    """How many earlier entries have the same table, int64 ``[N]``.

    Example:
        >>> _rank(np.array([2, 0, 2, 2, 0]))
        array([0, 0, 1, 2, 1])
    """
    steps = np.arange(len(table))
    counts = np.bincount(table)
    if len(counts) < 2 or counts[-1] == len(table):
        return steps
    rank = np.empty_like(steps)
    rank[np.argsort(table, kind="stable")] = steps - np.repeat(np.cumsum(counts) - counts, counts)
    return rank
