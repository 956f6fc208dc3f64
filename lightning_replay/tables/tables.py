# SPDX-License-Identifier: Apache-2.0
"""Named first-in-first-out tables of slots over one storage. Counted references keep the slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.free_memory import check_free
from lightning_replay.options import checked_count
from lightning_replay.storage.occupancy import Occupancy, are_within
from lightning_replay.tables import kernels
from lightning_replay.tables.counts import StateActionCounts
from lightning_replay.tables.kernels import FREED, TAKEN, WRITTEN, TableArrays

_SAVED = ("entries", "appended", "first", "written_at")
_MOST = 2**62  # No program writes so many rows.


class Tables(Occupancy):
    """Ordered lists of slots, first in first out, each with a name and a capacity.

    A slot keeps its row while a table or a running episode (:class:`~lightning_replay.tables.histories.Histories`)
    refers to it. After that, the slot is free. Free slots form a ring: slots that were freed in order are taken in
    order, so that a write stays contiguous in memory. A slot is at most once in a table.

    Args:
        capacities: Most entries by table name. The order of the names numbers the tables.
        extra_slots: Further slots for the steps of running episodes.

    Raises:
        TypeError, ValueError: A capacity that is no whole number from 1 on.
        MemoryError: More slots than fit the free memory.

    Example:
        >>> tables = Tables({"default": 2, "goal": 1}, extra_slots=0)
        >>> slots = tables.append_new_to_each(np.array([0, 0])); tables.append(np.array([1]), slots[:1])
        >>> slots = tables.append_new_to_each(np.array([0]))
        >>> tables.slots_of(0), tables.slots_of(1)
        (array([1, 2]), array([0]))
    """

    def __init__(self, capacities: Mapping[str, int], extra_slots: int = 0) -> None:
        for name, capacity in capacities.items():
            checked_count(f"capacity of table {name!r}", capacity, of="rows")
        checked_count("extra_slots", extra_slots, 0)
        num_entries = sum(capacities.values())
        self.num_slots: int = num_entries + extra_slots
        # Each slot has a position in each table, an age, its references, and a place among the free slots.
        num_bytes = 8 * num_entries + (4 * len(capacities) + 20) * self.num_slots
        check_free(num_bytes, f"tables over {self.num_slots:,} slots")
        self.names: list[str] = list(capacities)
        self.capacity: np.ndarray = np.fromiter(capacities.values(), np.int64, len(capacities))
        self.appended: np.ndarray = np.zeros(len(capacities), dtype=np.int64)
        self.arrays: TableArrays = TableArrays(
            capacity=self.capacity,
            offset=np.concatenate(([0], np.cumsum(self.capacity)[:-1])),
            appended=self.appended,
            first=np.zeros(len(capacities), dtype=np.int64),
            entries=np.zeros(num_entries, dtype=np.int64),
            # int32: a ring of more than two thousand million rows fits no memory.
            position=np.full((len(capacities), self.num_slots), -1, dtype=np.int32),
            references=np.zeros(self.num_slots, dtype=np.int32),
            free=np.zeros(self.num_slots, dtype=np.int64),
            written_at=np.zeros(self.num_slots, dtype=np.int64),
            counters=np.zeros(3, dtype=np.int64),
        )
        self.entries: np.ndarray = self.arrays.entries
        self.offset: np.ndarray = self.arrays.offset
        self.position: np.ndarray = self.arrays.position
        self.references: np.ndarray = self.arrays.references
        #: Function to call with slots, int64 ``[n]``, that became free.
        self.on_free: Callable[[np.ndarray], None] | None = None
        self._free_all()
        self.state_action_counts: StateActionCounts | None = None  # The writer sets it with count_state_actions.

    def __len__(self) -> int:
        return len(self.names)

    @property
    def length(self) -> np.ndarray:
        """Entries in each table, int64 ``[L]``."""
        return np.minimum(self.appended - self.arrays.first, self.capacity)

    #: Number of entries among which a draw from each table chooses, ``[L]``: the length.
    drawn_among = length

    @property
    def first(self) -> np.ndarray:
        """Number of the oldest entry of each table among all entries ever appended to it, int64 ``[L]``."""
        return np.maximum(self.arrays.first, self.appended - self.capacity)

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of slots to which a table or the history of a running episode refers."""
        return self.num_slots - self.num_free

    @property
    def num_free(self) -> int:
        """Number of slots to which nothing refers."""
        return int(self.arrays.counters[FREED] - self.arrays.counters[TAKEN])

    @property
    def num_freed(self) -> int:
        """Number of times that a slot became free, including all slots at first."""
        return int(self.arrays.counters[FREED])

    @property
    def rows_written(self) -> int:
        """Number of rows ever written."""
        return int(self.arrays.counters[WRITTEN])

    def slots(self) -> Tensor:
        """Returns the slots that hold a row, int64 ascending."""
        return torch.from_numpy(np.flatnonzero(self.references))

    def held(self, index: Tensor) -> Tensor:
        """Returns whether each slot holds a row, bool of the shape of ``index``."""
        return torch.from_numpy(self.references[index.numpy()] > 0)

    def drawable(self, index: Tensor) -> Tensor:
        """Returns whether each slot is in a table. Rows that are only in the history of an episode are not drawn."""
        return torch.from_numpy((self.position[:, index.numpy()] >= 0).any(0))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws slots that hold a row, int64 ``[count]``, each equally likely, with replacement."""
        held = self.slots()
        return held[torch.randint(len(held), (count,), generator=generator, device=generator.device).cpu()]

    @property
    def nbytes(self) -> int:
        """Bytes of the large arrays."""
        arrays = self.arrays
        kept = (arrays.entries, arrays.position, arrays.written_at, arrays.references, arrays.free)
        return sum(array.nbytes for array in kept)

    def number(self, name: str) -> int:
        """Returns the number of a table, or raises ``KeyError`` for a name that no table has."""
        if name not in self.names:
            raise KeyError(f"there is no table {name!r}; there are {', '.join(map(repr, self.names))}")
        return self.names.index(name)

    def slots_of(self, table: int) -> np.ndarray:
        """Returns the slots of a table, int64, the oldest entry first."""
        return self.entries[self.offset[table] + self._places(table)]

    def _places(self, table: int) -> np.ndarray:
        return np.arange(self.first[table], self.appended[table]) % self.capacity[table]

    def draw(self, rows: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draws ``rows[t]`` entries of each table t, all equally likely, with replacement.

        A table from which entries are drawn must not be empty. Each draw uses a number of ``uniform``, from [0, 1).
        Returns tables and slots, int64 ``[B]``, table after table.
        """
        table = np.empty(len(uniform), dtype=np.int64)
        slots = np.empty_like(table)
        kernels.draw(*self.arrays[:5], rows, uniform, table, slots)
        return table, slots

    def leave_early(self, table: int, count: int) -> np.ndarray:
        """Removes the oldest ``count`` entries of a table before it is full, and returns their places in its ring."""
        places = self._places(table)[:count]
        leaving = self.entries[self.offset[table] + places]
        self.arrays.first[table] = self.first[table] + count
        self.position[table, leaving] = -1
        self.release(leaving)
        return places

    def release(self, slots: np.ndarray) -> None:
        """Removes a reference to each of these different slots. Slots without a reference become free."""
        before = self.num_freed
        left = self.references[slots] - 1
        self.references[slots] = left
        freed = slots[left == 0]
        self.arrays.free.put(before + np.arange(len(freed)), freed, mode="wrap")
        self.arrays.counters[FREED] += len(freed)
        self.announce(before)

    def announce(self, before: int) -> None:
        """Calls :attr:`on_free` with the slots that became free since :attr:`num_freed` was ``before``."""
        if self.on_free is not None and self.num_freed > before:
            self.on_free(self._freed(before))

    def _freed(self, since: int) -> np.ndarray:
        return self.arrays.free.take(np.arange(since, self.num_freed), mode="wrap")

    def _free_all(self) -> None:
        self.references.fill(0)
        self.arrays.free[:] = np.arange(self.num_slots)
        self.arrays.counters[[TAKEN, FREED]] = 0, self.num_slots

    def append_new_to_each(self, table: np.ndarray) -> np.ndarray:
        """Appends new row k to table ``table[k]``, ``[N]``, none more often than its capacity. Returns the slots."""
        slots = self.try_append_new(table)
        if slots is None:
            raise ValueError(
                f"rows are for tables {table.tolist()}; the {len(self)} tables take at once {self.capacity.tolist()}"
            )
        return slots

    def try_append_new(self, table: np.ndarray) -> np.ndarray | None:
        """Appends rows like :meth:`append_new_to_each`, or changes nothing and returns ``None`` if they do not fit.

        Rows do not fit a table that does not exist, or a table with a smaller capacity.
        """
        slots = np.empty(len(table), dtype=np.int64)
        before = self.num_freed
        fits = kernels.append_new(tuple(self.arrays), table, slots)
        if fits < 0:
            raise RuntimeError(
                f"{len(table)} rows are to be written, {self.num_free} slots are free; build the storage with num_slots"
            )
        if not fits:
            return None
        self.announce(before)
        return slots

    def append(self, table: np.ndarray, slots: np.ndarray) -> None:
        """Appends stored slots to tables that do not have them.

        Of more slots than a capacity, the last ones are appended.
        """
        before = self.num_freed
        kernels.append(tuple(self.arrays), table, slots)
        self.announce(before)

    def age_of(self, slots: np.ndarray) -> np.ndarray:
        """Returns how many rows were written after the rows in the slots, int64."""
        return self.rows_written - 1 - self.arrays.written_at[slots]

    def clear(self) -> None:
        """Empties all tables and frees all slots."""
        self._free_all()
        self.position.fill(-1)
        self.appended.fill(0)
        self.arrays.first.fill(0)
        self.arrays.counters[WRITTEN] = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries of the tables, the free slots in their order, and the references."""
        counts = self.state_action_counts
        free = self._freed(int(self.arrays.counters[TAKEN]))
        return {
            **{name: torch.from_numpy(getattr(self.arrays, name).copy()) for name in _SAVED},
            "rows_written": self.rows_written,
            "slots": {"free": torch.from_numpy(free), "references": torch.from_numpy(self.references.copy())},
            "counts": counts and counts.state_dict(),
        }

    def check_state(self, state_dict: Mapping[str, Any], held: np.ndarray) -> None:
        """Raises ``ValueError`` for a state that the compiled loops cannot follow, because they check no bounds.

        ``held`` are the slots of the running episodes that are saved with it, int64 ``[n]``.
        """
        entries = state_dict["entries"].numpy()
        if entries.shape != self.entries.shape or len(state_dict["written_at"]) != self.num_slots:
            raise ValueError(
                f"the saved tables hold {len(entries)} entries over {len(state_dict['written_at'])} slots, these "
                f"{len(self.entries)} over {self.num_slots}; build them with the saved capacities"
            )
        if self.state_action_counts is not None and state_dict["counts"] is None:
            raise ValueError("the saved tables count no states; build these without a correction that counts")
        saved = {name: state_dict[name].numpy() for name in _SAVED}
        limits = {"entries": self.num_slots, "appended": _MOST, "first": _MOST, "written_at": _MOST}
        of_slots = state_dict["slots"]
        if not (
            all(are_within(saved[name], limits[name], len(getattr(self.arrays, name))) for name in _SAVED)
            and (saved["first"] <= saved["appended"]).all()
            and 0 <= int(state_dict["rows_written"]) < _MOST
            and are_within(held, self.num_slots)
            and self._are_counted(saved, of_slots["references"].numpy(), of_slots["free"].numpy(), held)
        ):
            raise ValueError("the state has tables whose entries, episodes, and free slots disagree; load another save")

    def _are_counted(
        self, saved: Mapping[str, np.ndarray], references: np.ndarray, free: np.ndarray, held: np.ndarray
    ) -> bool:
        """Returns whether ``references`` count the slots of tables and episodes, and all other slots are ``free``."""
        oldest = np.maximum(saved["first"], saved["appended"] - self.capacity)
        tables = zip(self.offset, self.capacity, oldest, saved["appended"], strict=True)
        lists = [saved["entries"][start + np.arange(first, last) % capacity] for start, capacity, first, last in tables]
        counts = np.zeros(self.num_slots, dtype=np.int64)
        for slots in (held, *lists):
            references_here = np.bincount(slots, minlength=self.num_slots)
            if references_here.max() > 1:
                return False
            counts += references_here
        is_free = np.array_equal(np.sort(free), np.flatnonzero(counts == 0))
        return is_free and are_within(free, self.num_slots) and np.array_equal(counts, references)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, after :meth:`check_state`."""
        for name in _SAVED:
            getattr(self.arrays, name)[:] = state_dict[name].numpy()
        free = state_dict["slots"]["free"].numpy()
        self.arrays.free[: len(free)] = free
        self.arrays.counters[[TAKEN, FREED, WRITTEN]] = 0, len(free), int(state_dict["rows_written"])
        self.references[:] = state_dict["slots"]["references"].numpy()
        if self.state_action_counts is not None:
            self.state_action_counts.load_state_dict(state_dict["counts"])
        self.position.fill(-1)  # Positions are not saved, because they follow from the entries.
        for table in range(len(self)):
            self.position[table, self.slots_of(table)] = self._places(table)
