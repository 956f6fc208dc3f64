# SPDX-License-Identifier: Apache-2.0
"""Draws inside tables: uniform, or in proportion to priorities of which each transition has one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.draw_parts import DividedRows, DrawPart, GroupRows, GroupTotals, PartDraw
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers.torchrl_compat import TorchRLNames
from lightning_replay.schedules import Schedule
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import checked_number


class DrawnRatios(NamedTuple):
    """How often the rows of a batch are drawn, compared with a uniform draw from the table of each."""

    ratio: np.ndarray  #: float64 ``[B]``, ``|B| P`` of each row.
    smallest: float  #: The least it can be for any row of any table drawn from.

    def importance(self, exponent: float) -> np.ndarray:
        """Returns ``ratio ** -exponent`` over the largest it can be, float64 ``[B]``."""
        return (self.ratio / self.smallest) ** -exponent


class SummedTables(NamedTuple):
    """The tables of several replays that a draw is divided over."""

    names: list[str]
    length: np.ndarray  #: int64 ``[L]``, entries of each in all replays together.


class PartOfTables(Tables):
    """Tables of one of several replays, whose lengths are those of all of them; all else is shared with ``tables``.

    Args:
        tables: of one replay.
        length: int64 ``[L]``, entries of each table in all replays.
        drawn_among: ``[L]``, see :attr:`Tables.drawn_among <lightning_replay.tables.tables.Tables.drawn_among>`.
    """

    length = drawn_among = None  # type: ignore[assignment]

    def __init__(self, tables: Tables, length: np.ndarray, drawn_among: np.ndarray) -> None:
        self.__dict__.update(vars(tables), length=length, drawn_among=drawn_among)


def tables_of(storage: Storage, sampler: Any) -> Tables:
    """Returns the tables over a storage; raises TypeError where its writer keeps none."""
    tables = storage.occupancy if isinstance(storage, PackedStorage) else None
    if not isinstance(tables, Tables):
        raise without_tables(type(sampler).__name__)
    return tables


def without_tables(sampler: str) -> TypeError:
    """Returns the error for a sampler of tables, by its name, beside a writer that keeps none."""
    return TypeError(
        f"{sampler} draws from tables and the buffer's writer keeps none; give it an EventTableWriter or a "
        "TaskTableWriter"
    )


class WithinTables(TorchRLNames):
    """Draws a number of rows from each table that the writer keeps; a subclass defines how many.

    With a ``priority_exponent`` above 0, rows of a table are drawn in proportion to
    ``(priority + priority_offset) ** priority_exponent`` within it. A transition has one priority, which holds in every
    table that refers to it; new ones get the largest given so far.

    Args:
        priority_exponent: α inside each table; 0 draws uniformly and ignores feedback.
        importance_exponent: β of the correction for priorities; 0 leaves it out.
        priority_offset: ε added to every priority.
        seed: of the sampler's own generator.
    """

    draws_from_tables = True

    def __init__(
        self,
        priority_exponent: float = 0.0,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        seed: int | None = None,
    ) -> None:
        super().__init__(priority_exponent, importance_exponent, priority_offset, seed)
        self.uses_priorities: bool = self._priority_exponent > 0
        self._empty()

    def _empty(self) -> None:
        self._largest: float = -1.0
        self._priority = np.zeros(0, dtype=np.float32)  # raw, by slot
        self._forget_trees()
        self.rows_drawn: np.ndarray = np.zeros(0, dtype=np.int64)

    def _forget_trees(self) -> None:
        self._trees: list[PriorityTree] = []  # by table, over its entries
        self._known = np.zeros(0, dtype=np.int64)  # entries of each table that are in its tree or have left
        self._known_first = np.zeros(0, dtype=np.int64)  # the oldest of them

    @property
    def priority_exponent(self) -> float:
        """α; a new value holds for all rows from the next draw on."""
        return self._priority_exponent

    @priority_exponent.setter
    def priority_exponent(self, value: float) -> None:
        self._priority_exponent = checked_number("priority_exponent", value, 0.0)
        self.uses_priorities = self._priority_exponent > 0
        self._forget_trees()

    @property
    def default_priority(self) -> float:
        """Returns the priority of new rows: the largest given so far, 1 when none was."""
        return self._largest if self._largest > 0 else 1.0

    @property
    def max_size(self) -> int:
        return len(self._priority)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return self._priority.nbytes + sum(tree.nbytes for tree in self._trees)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        if self.uses_priorities and storage is not None:
            self._attach_tables(tables_of(storage, self))
            self._priority[torch.as_tensor(index, device="cpu").numpy()] = self.default_priority

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots with replacement, int64 ``[B]`` on the storage's device, table after table.

        Raises:
            RuntimeError: no table can be drawn from.
        """
        tables = tables_of(storage, self)
        rows, shares = self.rows_of_tables(tables, batch_size)
        totals = None  # where no table is empty and its rows are equally likely
        if self.uses_priorities:
            totals = self._totals(tables)
            self._check_mass(totals, rows)
        table, slots, probability = self._draw(tables, totals, rows, self._uniform(batch_size))
        ratios = None
        if totals is not None:  # of a table without mass the smallest is infinite
            ratios = self._ratios(totals.names, totals.rows, totals.smallest / totals.mass, table, probability)
        columns, correction = self.describe(tables, table, slots, shares)
        columns.update(self.weights(table, shares, ratios, correction))
        return _on_device(storage, slots, columns)

    def group_totals(self, storage: Storage) -> GroupTotals:
        """Returns the number of rows of each table or, with priorities, their sum as rows are drawn by them."""
        return self._totals(tables_of(storage, self))

    def _totals(self, tables: Tables) -> GroupTotals:
        if not self.uses_priorities:
            return GroupTotals.alike(tables.length, tables.names)
        self._attach_tables(tables)
        self._sync_trees(tables)
        mass, smallest = np.array([tree.bounds() for tree in self._trees], dtype=np.float64).T
        return GroupTotals([*tables.names], mass, tables.length, smallest, float(self._largest))

    def sample_part(self, storage: Storage, part: DrawPart) -> tuple[Tensor, dict[str, Any], PartDraw]:
        """Draws the rows at the points, int64 ``[n]`` on the storage's device.

        Raises:
            RuntimeError: a table of which rows are asked holds none, or none of positive priority.
        """
        tables = tables_of(storage, self)
        totals, rows = self._totals(tables), np.bincount(part.groups, minlength=len(tables))
        self._check_mass(totals, rows)
        table, slots, probability = self._draw(tables, totals, rows, part.points)
        drawn_among = part.rows  # where priorities make an entry more or less likely, their weights correct for it
        if not self.uses_priorities:
            drawn_among = np.full(len(tables), np.inf)
            np.divide(tables.length, part.fractions, out=drawn_among, where=part.fractions > 0)
        whole = PartOfTables(tables, part.rows, drawn_among)
        columns, correction = self.describe(whole, table, slots, part.shares)
        return *_on_device(storage, slots, columns), PartDraw(probability, totals, correction)

    def rows_of_groups(self, batch_size: int, totals: GroupTotals) -> GroupRows:
        return self.rows_of_tables(SummedTables(totals.names, totals.rows), batch_size)

    @abstractmethod
    def rows_of_tables(self, tables: Tables | SummedTables, batch_size: int) -> GroupRows:
        """Returns how many rows of a batch come from each table, and how likely a row is of each.

        Args:
            tables: the names of the tables and their lengths; summed over all replays where a draw is divided.
            batch_size: rows.

        Raises:
            RuntimeError: no table can be drawn from.
        """

    def describe(
        self, tables: Tables, table: np.ndarray, slots: np.ndarray, shares: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Returns further columns ``[B]`` of drawn rows, and what their weights are multiplied by, if anything.

        Args:
            tables: of this replay; with the lengths of all replays where a draw is divided.
            table: of each row, int64 ``[B]``.
            slots: of the rows, int64 ``[B]``.
            shares: how likely a row of the batch is of each table, float64 ``[L]``.
        """
        return {}, None

    def weigh(self, drawn: DividedRows) -> dict[str, np.ndarray]:
        """Returns what :meth:`weights` does; counts a draw."""
        self._clocks["draws"] += 1
        ratios = None
        if self.uses_priorities:
            ratios = self._ratios(drawn.names, drawn.rows, drawn.least, drawn.group, drawn.probability)
        return self.weights(drawn.group, drawn.shares, ratios, drawn.correction)

    def weights(
        self, table: np.ndarray, shares: np.ndarray, ratios: DrawnRatios | None, correction: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Returns ``priority_weight``, float32 ``[B]``, with priorities."""
        if ratios is None or self.beta == 0:
            return {}
        return {"priority_weight": ratios.importance(self.beta).astype(np.float32)}

    def _ratios(
        self, names: list[str], rows: np.ndarray, least: np.ndarray, table: np.ndarray, probability: np.ndarray
    ) -> DrawnRatios:
        """Returns how often rows are drawn, from the probability of each and the ``least`` one ``[L]`` in its table."""
        is_drawn = self._drawable(names) & np.isfinite(least)
        return DrawnRatios(
            rows[table] * probability, min((rows[is_drawn] * least[is_drawn]).tolist(), default=math.inf)
        )

    def _drawable(self, names: list[str]) -> np.ndarray:
        """Returns whether rows of each table may be in a batch once it holds enough, bool ``[L]``."""
        return np.ones(len(names), dtype=np.bool_)

    def _draw(
        self, tables: Tables, totals: GroupTotals | None, rows: np.ndarray, points: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns tables and slots of ``rows`` entries of each table, one at each point, and the probability of each.

        Without ``totals`` there are no probabilities.
        """
        if not self.uses_priorities:
            table, slots = tables.draw(rows, points)
            probability = points if totals is None else 1.0 / totals.mass[table]
        else:
            table, ends = np.repeat(np.arange(len(rows)), rows), np.cumsum(rows)
            slots, probability = np.empty(len(points), dtype=np.int64), np.empty(len(points))
            for number in np.flatnonzero(rows).tolist():
                own = slice(ends[number] - rows[number], ends[number])
                places, probability[own] = self._trees[number].draw_at(points[own])
                slots[own] = tables.entries[tables.offset[number] + places.numpy()]
        self._clocks["draws"] += 1
        if len(self.rows_drawn) != len(rows):
            self.rows_drawn = np.zeros_like(rows)
        self.rows_drawn += rows
        return table, slots, probability

    def _check_mass(self, totals: GroupTotals, rows: np.ndarray) -> None:
        empty = np.flatnonzero((rows > 0) & ~(totals.mass > 0))
        if not len(empty):
            return
        table = totals.names[empty[0]]
        if not totals.rows[empty[0]]:
            raise RuntimeError(f"table {table!r} holds no rows to draw from; call extend first")
        raise RuntimeError(
            f"every row of table {table!r} has priority 0 and priority_offset is {self.priority_offset}, so none can "
            "be drawn; use a positive priority_offset"
        )

    def _uniform(self, count: int) -> np.ndarray:
        generator = self._generator
        device = generator.device
        uniform = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
        return (uniform if device.type == "cpu" else uniform.cpu()).numpy()

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Sets priorities, in every table that refers to a row; -1 is skipped.

        Raises:
            ValueError: a priority is negative, infinite or NaN, or does not fit float32 once it is raised to α.
            IndexError: a slot does not exist. In every case nothing has changed.
        """
        if not self.uses_priorities or storage is None:
            return
        tables = tables_of(storage, self)
        self._attach_tables(tables)
        self._sync_trees(tables)
        self.check_priority(magnitudes)
        index = slots.numpy()
        places, given = index[index >= 0], magnitudes.numpy()[index >= 0]
        if not len(places):
            return
        self._priority[places] = given
        self._largest = max(self._largest, float(given.max()))
        for number, tree in enumerate(self._trees):
            place = tables.position[number, places]
            inside = place >= 0
            if inside.any():
                tree.set(torch.from_numpy(place[inside].astype(np.int64)), self._leaves(places[inside]))

    def priority_of(self, index: Tensor) -> Tensor | None:
        """Returns the priorities of rows, float32 ``[n]``; ``None`` where feedback is ignored."""
        return torch.from_numpy(self._priority[index.numpy()]) if self.uses_priorities else None

    def _leaves(self, slots: np.ndarray) -> Tensor:
        return self._exponentiated(torch.from_numpy(self._priority[slots]))

    def _attach_tables(self, tables: Tables) -> None:
        count = len(tables.names)
        if not self.uses_priorities or len(self._trees) == count:
            return
        self._trees = [PriorityTree(int(capacity)) for capacity in tables.capacity]
        self._known = np.zeros(count, dtype=np.int64)
        self._known_first = np.zeros(count, dtype=np.int64)
        if len(self._priority) != tables.num_slots:
            self._priority = np.full(tables.num_slots, self.default_priority, dtype=np.float32)

    def _sync_trees(self, tables: Tables) -> None:
        """Updates the trees by what was appended to the tables, or left them early, since the last call."""
        first = tables.first
        for number in np.flatnonzero((self._known < tables.appended) | (self._known_first < first)).tolist():
            appended, capacity = int(tables.appended[number]), int(tables.capacity[number])
            left_early = np.arange(max(int(self._known_first[number]), appended - capacity), first[number]) % capacity
            self._trees[number].remove(torch.from_numpy(left_early))
            self._known_first[number] = first[number]
            places = np.arange(max(int(self._known[number]), int(first[number])), appended) % capacity
            slots = tables.entries[tables.offset[number] + places]
            self._trees[number].set(torch.from_numpy(places), self._leaves(slots))
            self._known[number] = appended

    def state_dict(self) -> dict[str, Any]:
        """Priorities, clocks, counters and the state of the generator; tensors and plain values."""
        own = {"priority": torch.from_numpy(self._priority.copy()), "rows_drawn": self.rows_drawn.tolist()}
        return own | self._shared_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; the trees are rebuilt from the tables."""
        self._empty()
        self._priority = state_dict["priority"].numpy().copy()
        self._largest = float(state_dict["largest_priority"])
        if not self._differs("priority_exponent", state_dict):
            self.priority_exponent = float(state_dict["priority_exponent"])
        if "priority_offset" in state_dict and not self._differs("priority_offset", state_dict):
            self.priority_offset: float = float(state_dict["priority_offset"])
        self.rows_drawn = np.array(state_dict["rows_drawn"], dtype=np.int64)
        self._load_shared_state(state_dict)


def _on_device(storage: Storage, slots: np.ndarray, columns: dict[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
    index, info = torch.from_numpy(slots), {name: torch.from_numpy(one) for name, one in columns.items()}
    if storage.device.type == "cpu":
        return index, info
    return index.to(storage.device), {name: column.to(storage.device) for name, column in info.items()}
