# SPDX-License-Identifier: Apache-2.0
"""Draws a share of every batch from each table, uniform or by priorities, with corrections, or by a schedule."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.ages import Age, RowAges, checked_age
from lightning_replay.options import (
    check_kind,
    checked_count,
    checked_entries,
    checked_flag,
    checked_number,
    checked_share,
)
from lightning_replay.parts import GroupTotals, ShardDraw, ShardRequest, without_tables
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers.distinct import checked_replace, draw_rows, uniform_points
from lightning_replay.samplers.prioritized import PrioritizedBase, refuse_vanishing
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedulers import Scheduler, checked_probabilities
from lightning_replay.schedules import Schedule
from lightning_replay.storage.columns import as_tensor
from lightning_replay.storage.packed import occupancy_of
from lightning_replay.tables.counts import StateActionCounts
from lightning_replay.tables.tables import Tables

Correction = Callable[[Tables, np.ndarray, np.ndarray], np.ndarray]
ROUNDING = 1e-6


class DrawnRatios(NamedTuple):
    """How often the rows of a batch are drawn, compared with a uniform draw from the table of each."""

    ratio: np.ndarray  #: float64 ``[B]``, ``|B| P`` of each row.
    smallest: float  #: Smallest possible ratio over all tables that have a share.

    def importance(self, exponent: float) -> np.ndarray:
        """Returns ``ratio ** -exponent`` over the largest it can be, float64 ``[B]``."""
        return (self.ratio / self.smallest) ** -exponent


class SummedTables(NamedTuple):
    """The tables of several replays that a draw is divided over."""

    names: list[str]
    length: np.ndarray  # int64 [L], entries of each in all replays together


class CountedTables(Tables):
    """Tables whose lengths are others, for a correction: lengths over all replays, or sums of weights of ages."""

    length: Any = None
    drawn_among: Any = None

    def __init__(self, tables: Tables, length: np.ndarray, drawn_among: np.ndarray) -> None:
        self.__dict__.update(vars(tables), length=length, drawn_among=drawn_among)


def tables_of(storage: Storage, sampler: Any) -> Tables:
    """Returns the tables of a storage. Raises ``TypeError`` if its writer keeps none."""
    tables = occupancy_of(storage)
    if isinstance(tables, Tables):
        return tables
    raise without_tables(type(sampler).__name__)


class WithinTables(PrioritizedBase):
    """Draws a number of rows from each table that the writer keeps. A subclass defines how many.

    With a ``priority_exponent`` above 0, rows of a table are drawn in proportion to
    ``(priority + priority_offset) ** priority_exponent`` within it. A transition has one priority, which holds in every
    table that refers to it. New ones get the largest given so far.

    Args:
        priority_exponent: Exponent α inside each table. 0 draws uniformly and ignores feedback.
        importance_exponent: Exponent β of the correction for priorities. 0 leaves it out.
        priority_offset: Offset ε that is added to every priority.
        seed: Seed for the sampler's own generator.
        age: :class:`~lightning_replay.Age`, or a mapping of its options, by which rows become less likely within each
            table as they age. With ``None``, age has no effect.
        replace: Whether a batch may contain a row several times. Otherwise no row is twice in a batch, also if several
            tables refer to it. The rows of each table are drawn one after the other, each in proportion to its weight
            among the rows that are left, and small tables come first. Weights are as for draws with replacement.

    Raises:
        RuntimeError: at the draw, with ``replace=False``: fewer rows of a table are left than its share of the batch.
    """

    _draws_from_tables = True

    def __init__(
        self,
        priority_exponent: float = 0.0,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        seed: int | None = None,
        age: Age | Mapping[str, Any] | None = None,
        replace: bool = True,
    ) -> None:
        super().__init__(priority_exponent, importance_exponent, priority_offset, seed)
        self.replace: bool = checked_replace(replace)
        self.age: Age | None = checked_age(age)
        if self.age is not None and self._priority_exponent > 0:
            refuse_vanishing(self.age, self._importance_exponent)
        self.uses_priorities: bool = self._priority_exponent > 0
        self._empty()

    def _empty(self) -> None:
        self._largest: float = -1.0
        # Priorities by slot, before any exponent.
        self._priority = np.zeros(0, dtype=np.float32)
        # The number of slots is known from the first row on.
        self._ages = None if self.age is None else RowAges(self.age, 0)
        self._forget_trees()
        self.rows_drawn: np.ndarray = np.zeros(0, dtype=np.int64)

    def _forget_trees(self) -> None:
        # The leaves of a tree are the places in the ring of its table, so a row has one in each of its tables.
        self._trees: list[PriorityTree] = []
        # The trees were built for these tables.
        self._tables: Tables | None = None
        # The trees contain this many of the rows ever written.
        self._num_pushed = 0

    @property
    def _has_trees(self) -> bool:
        return self.uses_priorities or self.age is not None

    @property
    def priority_exponent(self) -> float:
        """α. A new value holds for all rows from the next draw on."""
        return self._priority_exponent

    @priority_exponent.setter
    def priority_exponent(self, value: float) -> None:
        self._priority_exponent = checked_number("priority_exponent", value, 0.0)
        self.uses_priorities = self._priority_exponent > 0
        self._forget_trees()

    @property
    def default_priority(self) -> float:
        """Priority of new rows before any exponent, the largest so far or 1."""
        return self._largest if self._largest > 0 else 1.0

    @property
    def device(self) -> torch.device:
        """Device of the priorities, always the CPU."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Size of the priorities and trees in bytes."""
        return self._priority.nbytes + sum(tree.nbytes for tree in self._trees)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots, int64 ``[B]``, table after table. Raises RuntimeError if none can be drawn."""
        tables = tables_of(storage, self)
        # The number of rows of each table is drawn first, so that it does not depend on priorities.
        if self._has_trees:
            totals = self.group_totals(storage)
            rows, shares = self.rows_of_groups(batch_size, totals)
            self._check_mass(totals, rows)
        else:
            totals = None
            rows, shares = self.rows_of_tables(tables, batch_size)
        table, slots, probability = self._draw(storage, rows, uniform_points(self._generator, batch_size))
        ratios = self._ratios(totals, table, probability) if totals is not None and self.uses_priorities else None
        # The ratios correct for priorities within a table, this for the choice among tables.
        counted = tables
        if totals is not None and not self.uses_priorities:
            counted = CountedTables(tables, totals.mass, totals.mass)
        columns, correction = self.describe(counted, table, slots, shares)
        columns.update(self.weights(table, shares, ratios, correction))
        return as_tensors(slots, columns)

    def group_totals(self, storage: Any) -> GroupTotals:
        """Returns the length and the priority mass of each table."""
        tables = tables_of(storage, self)
        if not self._has_trees:
            return GroupTotals.alike(tables.length, tables.names)
        trees = self._trees_of(tables)
        self._follow_ages(tables)
        bounds = [tree.bounds() for tree in trees]
        mass, smallest = np.array(bounds, dtype=np.float64).T
        return GroupTotals([*tables.names], mass, tables.length, smallest, float(self._largest))

    def sample_shard(self, storage: Storage, part: ShardRequest) -> tuple[Tensor, dict[str, Any], ShardDraw]:
        """Draws one entry at each point of the request, from the requested table."""
        tables = tables_of(storage, self)
        totals = self.group_totals(storage)
        rows = np.bincount(part.groups, minlength=len(tables))
        self._check_mass(totals, rows)
        table, slots, probability = self._draw(storage, rows, part.points)
        # The weights correct for priorities.
        drawn_among = part.rows
        if not self.uses_priorities:
            drawn_among = np.full(len(tables), np.inf)
            np.divide(totals.mass, part.fractions, out=drawn_among, where=part.fractions > 0)
        # A correction counts entries of all replays, although only slots of this one are at hand.
        whole = CountedTables(tables, part.rows if self.age is None else drawn_among, drawn_among)
        columns, correction = self.describe(whole, table, slots, part.shares)
        return *as_tensors(slots, columns), ShardDraw(probability, totals, correction)

    def rows_of_groups(self, batch_size: int, totals: GroupTotals) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows and the share of each table, from the lengths over all replays."""
        rows = totals.rows
        if self.age is not None and self.age.max_age is not None:
            # The others take the share of a table whose rows are all too old, as that of an empty table.
            rows = np.where(totals.mass > 0, rows, 0)
            if totals.rows.any() and not rows.any():
                raise RuntimeError(
                    f"no row of the {totals.rows.sum()} entries of tables can be drawn: all have priority 0, or are "
                    f"older than max_age {self.age.max_age}. Raise max_age, or store new rows"
                )
        return self.rows_of_tables(SummedTables(totals.names, rows), batch_size)

    @abstractmethod
    def rows_of_tables(self, tables: Tables | SummedTables, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many rows of a batch come from each table, and how likely a row is of each."""

    def describe(
        self, tables: Tables, table: np.ndarray, slots: np.ndarray, shares: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Returns further columns ``[B]`` of drawn rows, and what their weights are multiplied by, if anything."""
        # If a draw is divided, the tables have the lengths of all replays together.
        return {}, None

    def weigh(self, part: ShardRequest, drawn: ShardDraw) -> dict[str, np.ndarray]:
        """Returns ``priority_weight`` and further columns of a divided draw, float32 ``[B]``."""
        self._clocks["draws"] += 1
        ratios = self._ratios(drawn.totals, part.groups, drawn.probability) if self.uses_priorities else None
        return self.weights(part.groups, part.shares, ratios, drawn.correction)

    def weights(
        self, table: np.ndarray, shares: np.ndarray, ratios: DrawnRatios | None, correction: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Returns the weight columns of drawn rows, float32 ``[B]``, or none without priorities.

        :meta private:
        """
        if ratios is None or self.beta == 0:
            return {}
        return {"priority_weight": ratios.importance(self.beta).astype(np.float32)}

    def _ratios(self, totals: GroupTotals, table: np.ndarray, probability: np.ndarray) -> DrawnRatios:
        # All tables with a share count, not only the drawn ones. The smallest of a table without mass is infinite.
        is_drawn = self._drawable(totals.names) & np.isfinite(totals.smallest)
        least = totals.rows[is_drawn] * (totals.smallest[is_drawn] / totals.mass[is_drawn])
        return DrawnRatios(totals.rows[table] * probability, min(least.tolist(), default=math.inf))

    def _drawable(self, names: list[str]) -> np.ndarray:
        return np.ones(len(names), dtype=np.bool_)

    def _draw(
        self, storage: Storage, rows: np.ndarray, points: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # The result is tables, slots, and probabilities.
        table = np.repeat(np.arange(len(rows)), rows)
        slots, probability = draw_rows(self, storage, table, points)
        self._clocks["draws"] += 1
        if len(self.rows_drawn) != len(rows):
            self.rows_drawn = np.zeros_like(rows)
        self.rows_drawn += rows
        return table, slots, probability

    def _rows_at(self, storage: Any, groups: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tables = tables_of(storage, self)
        rows = np.bincount(groups, minlength=len(tables))
        if not self._has_trees:
            return tables.draw(rows, points)[1], 1.0 / tables.length[groups]
        ends = np.cumsum(rows)
        slots = np.empty(len(points), dtype=np.int64)
        probability = np.empty(len(points))
        for number in np.flatnonzero(rows).tolist():
            own = slice(ends[number] - rows[number], ends[number])
            places, probability[own] = self._trees[number].draw_at(points[own])
            slots[own] = tables.entries[tables.offset[number] + places.numpy()]
        return slots, probability

    def masses(self, storage: Any, group: int = 0) -> Tensor:
        """Returns the numbers in proportion to which rows of a table are drawn, float64 ``[num_slots]``.

        :meta private:
        """
        tables = tables_of(storage, self)
        place = torch.from_numpy(tables.position[group]).long()
        mass = self._trees[group].masses()[place] if self._has_trees else place.new_ones(len(place)).double()
        return mass.masked_fill_(place < 0, 0.0)

    def _check_mass(self, totals: GroupTotals, rows: np.ndarray) -> None:
        for number in np.flatnonzero((rows > 0) & ~(totals.mass > 0)).tolist():
            table = totals.names[number]
            if not totals.rows[number]:
                raise RuntimeError(f"table {table!r} holds no rows to draw from; call extend first")
            raise RuntimeError(f"all rows of table {table!r} have priority 0; use a positive priority_offset")

    def set_priorities(self, slots: Tensor, magnitudes: Tensor, storage: Storage | None) -> None:
        """Sets priorities, in every table that refers to a row. -1 is skipped, and refused ones change nothing."""
        if not self.uses_priorities or storage is None:
            return
        tables = tables_of(storage, self)
        trees = self._trees_of(tables)
        self.check_priority(magnitudes)
        index = slots.numpy()
        places = index[index >= 0]
        given = magnitudes.numpy()[index >= 0]
        if not len(places):
            return
        # A priority is kept once by slot, and in the tree of every table that refers to it.
        self._priority[places] = given
        self.raise_max_priority(float(given.max()))
        for number in range(len(trees)):
            self._set_leaves(tables, number, places)

    def priority_of(self, index: Tensor) -> Tensor | None:
        """Returns the priorities of rows before any exponent, float32 ``[n]``, or ``None`` if α is 0."""
        return torch.from_numpy(self._priority[index.numpy()]) if self.uses_priorities else None

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Stores the births of new rows, int64 ``[n]``. :meth:`on_append` adds the rows."""
        if self.age is None:
            return
        assert storage is not None
        tables = tables_of(storage, self)
        slots = as_tensor(index).reshape(-1).numpy()
        ages = self._ages_of(tables)
        ages.insert(slots, ages.register(slots, self._clocks, storage))

    def _ages_of(self, tables: Tables) -> RowAges:
        assert self._ages is not None
        if len(self._ages.births) != tables.num_slots:
            self._ages = RowAges(self._ages.age, tables.num_slots)
        return self._ages

    def _follow_ages(self, tables: Tables) -> None:
        if self.age is None:
            return
        slots = self._ages_of(tables).follow(self._clocks)
        for number, tree in enumerate(self._trees):
            tree.replace_rows(tables.position[number][slots].astype(np.int64))

    def on_append(self, tables: Tables, numbers: Iterable[int], slots: np.ndarray, are_new: bool) -> None:
        """Writes the priorities of rows that the writer appended to the tables ``numbers``.

        :meta private:
        """
        if not self._has_trees:
            return
        if self._tables is not tables:
            self._build_trees(tables)
        elif are_new:
            self._num_pushed += len(slots)
        if are_new:
            self._priority[slots] = self.default_priority
        for number in numbers:
            self._set_leaves(tables, number, slots)

    def on_leave(self, table: int, places: np.ndarray) -> None:
        """Removes the entries at ``places`` from the tree of a table.

        :meta private:
        """
        # An overwritten entry needs no removal, because the new entry takes its place in the tree.
        if self._trees:
            self._trees[table].remove(torch.from_numpy(places))

    def _trees_of(self, tables: Tables) -> list[PriorityTree]:
        # The writer pushes every entry, except entries that came before the sampler or were loaded.
        if self._tables is not tables or self._num_pushed != tables.rows_written:
            self._build_trees(tables)
        return self._trees

    def _build_trees(self, tables: Tables) -> None:
        self._size_priorities(tables)
        ages = None if self.age is None else self._ages_of(tables)
        self._trees = [PriorityTree(int(capacity), ages=ages, has_places=True) for capacity in tables.capacity]
        self._tables = tables
        self._num_pushed = tables.rows_written
        for number in range(len(tables)):
            self._set_leaves(tables, number, tables.slots_of(number))

    def _size_priorities(self, tables: Tables) -> None:
        if len(self._priority) != tables.num_slots:
            self._priority = np.full(tables.num_slots, self.default_priority, dtype=np.float32)

    def _set_leaves(self, tables: Tables, table: int, slots: np.ndarray) -> None:
        """Writes the priorities of rows into the tree of a table. Slots that the table does not hold are skipped."""
        self._trees[table].set_rows(
            slots,
            tables.position[table],
            self._priority,
            offset=self.priority_offset,
            exponent=self._priority_exponent,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns priorities by slot, without the trees, which the next draw builds."""
        own = {"priority": torch.from_numpy(self._priority.copy()), "rows_drawn": self.rows_drawn.tolist()}
        if self._ages is not None:
            own["ages"] = self._ages.state_dict()
        return own | self._shared_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state. The next draw builds the trees."""
        # The trees are not saved: the next draw builds them from the tables.
        self._empty()
        self._priority = state_dict["priority"].numpy().copy()
        if self.age is not None:
            self._ages = RowAges(self.age, len(self._priority))
            self._ages.load_state_dict(state_dict)
        self._largest = float(state_dict["max_priority"])
        if not self._differs("priority_exponent", state_dict):
            self.priority_exponent = float(state_dict["priority_exponent"])
        saved_offset = checked_number("the saved priority_offset", state_dict["priority_offset"], 0.0)
        if not self._differs("priority_offset", state_dict):
            self.priority_offset: float = saved_offset
        self.rows_drawn = np.array(state_dict["rows_drawn"], dtype=np.int64)
        self._load_shared_state(state_dict)


def as_tensors(slots: np.ndarray, columns: dict[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns slots and columns as tensors that share the arrays' memory."""
    return torch.from_numpy(slots), {name: torch.from_numpy(one) for name, one in columns.items()}


@rebuildable
class ScheduledSampler(WithinTables):
    """Draws a whole batch from the table of one task, which the scheduler chooses for every batch.

    Tasks with fewer than ``min_size`` rows are left out and the others renormalized. Distributed Parallel Curriculum
    Experience Replay (DPCER, Li and Ji 2021, https://openreview.net/forum?id=EiW3FLYBiP), Algorithm 2: learner.

    Args:
        tasks: Names of the tasks, in the order of the column ``task``.
        scheduler: Scheduler that chooses the task. It is copied. Give draws and progress to ``scheduler``, the copy.
        min_size: Number of rows that a task must hold to be drawn from.
        priority_exponent, importance_exponent, priority_offset, seed, age, replace: as
            :class:`~lightning_replay.samplers.tables.WithinTables`.

    Sampled keys:
        index: int64 ``[B]``.
        priority_weight: float32 ``[B]``, with priorities.

    Raises:
        TypeError: a ``scheduler`` of another kind, or at the draw, a writer that keeps no tables.
        ValueError: task names that are empty or given twice, or a scheduler that already serves a buffer.
        RuntimeError: at the draw, while no task that may be chosen holds ``min_size`` rows.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        scheduler: Scheduler,
        min_size: int = 1,
        priority_exponent: float = 0.0,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        seed: int | None = None,
        age: Age | Mapping[str, Any] | None = None,
        replace: bool = True,
    ) -> None:
        super().__init__(priority_exponent, importance_exponent, priority_offset, seed, age, replace)
        check_kind("scheduler", scheduler, Scheduler, "an object of lightning_replay.schedulers, such as Exp3()")
        self.tasks: list[Any] = checked_entries("tasks", tasks, "the names of the tasks, as ['hard', 'easy']")
        self.scheduler: Scheduler = copy.deepcopy(scheduler)
        self.min_size: int = checked_count("min_size", min_size, of="rows")
        self.scheduler.start(self.tasks)

    def ready(self, tables: Tables | SummedTables) -> np.ndarray:
        """Returns whether each task holds ``min_size`` rows, bool ``[L]``."""
        if self.scheduler.shares_one_table:
            return np.full(len(self.tasks), bool(tables.length[0] >= self.min_size))
        return tables.length >= self.min_size

    def rows_of_tables(self, tables: Tables | SummedTables, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws a task by the scheduler's probabilities. Raises ``RuntimeError`` if no task is ready.

        :meta private:
        """
        rows = np.zeros(len(tables.names), dtype=np.int64)
        probability = checked_probabilities(self.scheduler, self.ready(tables))
        cumulative = list(itertools.accumulate(probability.tolist()))
        if not cumulative[-1]:
            held = dict(zip(tables.names, tables.length.tolist(), strict=True))
            least = f"no task that the scheduler may choose holds {self.min_size} rows; there are {held}"
            raise RuntimeError(f"{least}. Collect more steps before the first draw, or lower min_size")
        task = bisect.bisect_right(cumulative, float(uniform_points(self._generator, 1)[0]) * cumulative[-1])
        # All rows come from one task, because the scheduler gets one progress signal for the batch.
        rows[0 if self.scheduler.shares_one_table else task] = batch_size
        self.scheduler.drawn(task, float(probability[task]))
        return rows, rows / batch_size

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the draws and of the scheduler."""
        return super().state_dict() | {
            "scheduler": self.scheduler.state_dict(),
            "scheduler_class": type(self.scheduler).__name__,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a saved state. Raises ``ValueError`` for a scheduler of another class."""
        saved = state_dict["scheduler_class"]
        kind = type(self.scheduler).__name__
        if saved != kind:
            raise ValueError(f"the saved scheduler is {saved}, here it is {kind}; build it with {saved}")
        super().load_state_dict(state_dict)
        self.scheduler.load_state_dict(state_dict["scheduler"])

    def __repr__(self) -> str:
        return f"ScheduledSampler({self.tasks}, scheduler={type(self.scheduler).__name__})"


def mixture(tables: Tables, shares: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``(1 / |B_0|) / sum_i p_i m_i / |B_i|``, in which m_i is 1 if table i holds the row.

    The weighted mean over draws is the mean over the default table. Rows that have left it count as if they were in it.
    If rows become less likely as they age, |B_i| is the sum of the weights of their ages. The mean is then that of
    draws by age from the default table.
    """
    per_entry = np.divide(shares, tables.drawn_among, out=np.zeros(len(shares)), where=shares > 0)
    probability = per_entry @ (tables.position[:, slots] >= 0)
    return 1.0 / ((float(tables.length[0]) or 1.0) * probability)


def lemma2(tables: Tables, shares: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``1 - η q`` for a row in an event table, ``1 / (1 - η)`` for one outside. η is the share of all event tables.

    A table of which nothing is drawn, with a share of 0 or too few rows, is no event table here. The proof's last
    sentence has ``1 - η`` for the outside. The formula displayed in the lemma, used here, leaves less bias, but some.
    With η 1/2 an event that has the probability 0.05 given state and action is estimated as 0.225, and without a
    correction as 0.525. An event of probability 0.3 is estimated as 0.376 and 0.65. ``lemma2_exact`` and ``mixture``
    leave no bias.
    """
    return _lemma(tables, shares, slots, lambda share, outside: 1.0 - share * outside)


def lemma2_exact(tables: Tables, shares: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``(1 - q) / (1 - q + η q)`` for a row in an event table, ``1 / (1 - η)`` for one outside."""
    return _lemma(tables, shares, slots, lambda share, q: (1.0 - q) / np.maximum(1.0 - q + share * q, 1e-12))


CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "mixture": mixture,
    "lemma2": lemma2,
    "lemma2_exact": lemma2_exact,
}
NEEDS_COUNTS = ("lemma2", "lemma2_exact")


def _lemma(tables: Tables, shares: np.ndarray, slots: np.ndarray, weight: Callable[..., np.ndarray]) -> np.ndarray:
    # Rows in an event table with a share get a weight by η and q, other rows 1 / (1 - η).
    counts: StateActionCounts | None = tables.state_action_counts
    if counts is None:
        raise TypeError(
            "lemma2 and lemma2_exact need counts of states and actions, and the writer keeps none; build it with "
            "EventTableWriter(count_state_actions=True), or use the correction 'mixture'"
        )
    drawn = np.flatnonzero(shares[1:] > 0) + 1
    share = float(shares[1:].sum())
    is_in_events = np.any(tables.position[drawn[:, None], slots] >= 0, axis=0)
    inside = weight(share, counts.share_outside(slots))
    # With a share of 1 no row outside of the event tables is drawn.
    return np.where(is_in_events, inside, 1.0 / (1.0 - share) if share < 1.0 else 1.0)


@rebuildable
class TableShares(WithinTables):
    """Draws ``batch_size * share`` rows from each table that holds enough.

    Tables below their minimum size are left out and the other shares renormalized. Stratified Sampling from Event
    Tables, Kompella et al. 2022, https://arxiv.org/abs/2211.00576, section 4.

    Without a correction the loss is a mean over the drawn rows, in which events count more than they happen. The paper
    needs no correction in deterministic environments. ``priority_weight`` is the product of the correction and, with
    priorities, of ``(|B| P) ** -importance_exponent`` over the largest of all tables that have a share. P is the
    probability of a row in a draw from its table B.

    Args:
        table_shares: Shares of a batch by table name, which sum to 1. A table with share 0 is never drawn from.
        min_sizes: Number of entries that a table must hold to be drawn from, 1 if absent.
        multinomial: Whether the number of rows of each table is drawn, with the shares as probabilities. Otherwise the
            numbers are exact in every batch, by largest remainder.
        at_least_one: Whether at least one row is drawn from every table that holds enough.
        correction: Function of :mod:`lightning_replay.samplers.tables`, or ``None``.
        normalize_over_batch: Whether weights are divided by the largest of the batch.
        priority_exponent, importance_exponent, priority_offset, seed, age, replace: as
            :class:`~lightning_replay.samplers.tables.WithinTables`.
        return_probabilities: Whether ``table_probability`` and ``raw_weight`` are added to each batch.

    Sampled keys:
        index: int64 ``[B]``.
        table: int64 ``[B]``, the number of the table each row was drawn from. 0 is the default table.
        priority_weight: float32 ``[B]``, with a correction or with priorities.
        table_probability: float32 ``[B]``, with ``return_probabilities``: how likely a draw comes from the row's table:
            its share with ``multinomial`` alone. Otherwise, or with ``at_least_one``, it is its part of this batch.
        raw_weight: float32 ``[B]``, with ``return_probabilities``: the correction times
            ``(|B| P) ** -importance_exponent`` before either is divided by a largest one. It is 1 with neither.

    Raises:
        TypeError: at the draw, a writer that keeps no tables, or no counts that the ``correction`` needs.
        ValueError: shares that do not sum to 1, or at the draw, names that differ from the writer's tables.
        RuntimeError: at the draw, while no table with a share holds enough rows.
    """

    def __init__(
        self,
        table_shares: Mapping[str, float],
        min_sizes: Mapping[str, int] | None = None,
        multinomial: bool = False,
        at_least_one: bool = False,
        correction: Correction | None = None,
        normalize_over_batch: bool = False,
        priority_exponent: float = 0.0,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        seed: int | None = None,
        return_probabilities: bool = False,
        age: Age | Mapping[str, Any] | None = None,
        replace: bool = True,
    ) -> None:
        super().__init__(priority_exponent, importance_exponent, priority_offset, seed, age, replace)
        check_kind("table_shares", table_shares, Mapping, "shares by the names of the tables")
        total = sum(checked_share(f"table_shares[{name!r}]", share) for name, share in table_shares.items())
        if abs(total - 1.0) > ROUNDING:
            raise ValueError(f"table_shares sums to {total:g}; shares of a batch must sum to 1. Got {table_shares}")
        self.table_shares: dict[str, float] = dict(table_shares)
        sizes = (min_sizes or {}).items()
        self.min_sizes: dict[str, int] = {name: checked_count(f"min_sizes[{name!r}]", size, 0) for name, size in sizes}
        self.at_least_one: bool = checked_flag("at_least_one", at_least_one)
        self.normalize_over_batch: bool = checked_flag("normalize_over_batch", normalize_over_batch)
        self.multinomial: bool = checked_flag("multinomial", multinomial)
        if correction is not None:
            check_kind("correction", correction, Callable, "one of lightning_replay.samplers.tables, or None")
        self.correction = correction
        self.return_probabilities: bool = checked_flag("return_probabilities", return_probabilities)
        # The names of the tables, in the order of the two arrays.
        self._names: list[str] = []
        self._share = self._least = np.zeros(0)
        # The last rows by table, with the key for which they were computed.
        self._allocation: Any = None

    def set_min_sizes(self, min_sizes: Mapping[str, int]) -> None:
        """Replaces the least sizes of these tables. The others keep theirs.

        :meta private:
        """
        self.min_sizes.update(min_sizes)
        # The next draw reads the names again.
        self._names = []

    def ready_shares(self, tables: Tables | SummedTables) -> np.ndarray:
        """Returns the share of each table in the next batch, float64 ``[L]``: 0 if it holds too little.

        :meta private:
        """
        if self._names != tables.names:
            self._read_names(tables.names)
        shares = self._share * (tables.length >= self._least)
        total = shares.sum()
        if not total:
            held, least = (dict(zip(tables.names, one.tolist(), strict=True)) for one in (tables.length, self._least))
            raise RuntimeError(
                f"no table with a share holds enough rows to draw from: there are {held}, needed are {least}, the "
                f"shares {self.table_shares}. Collect more steps before the first draw, or lower min_size"
            )
        return shares / total

    def rows_of_tables(self, tables: Tables | SummedTables, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of each table in a batch, by ``ready_shares``, and their shares, ``[L]`` each.

        :meta private:
        """
        if not self.multinomial and self._names == tables.names:
            key = (batch_size, (tables.length >= self._least).tobytes())
            if self._allocation is not None and self._allocation[0] == key:
                return self._allocation[1]
        shares = self.ready_shares(tables)
        if self.multinomial:
            # The last sum may be a little below 1, so points are scaled by it.
            cumulative = np.cumsum(shares)
            chosen = np.searchsorted(
                cumulative, uniform_points(self._generator, batch_size) * cumulative[-1], side="right"
            )
            rows = np.bincount(chosen, minlength=len(shares))
            if not self.at_least_one:
                return rows, shares
        else:
            rows = largest_remainder(shares, batch_size)
        if self.at_least_one:
            rows = with_one_of_each(rows, shares > 0)
        # Rounding changes the configured shares.
        drawn = rows, rows / batch_size
        if not self.multinomial:
            self._allocation = (batch_size, (tables.length >= self._least).tobytes()), drawn
        return drawn

    def _read_names(self, names: list[str]) -> None:
        given = {*self.table_shares, *self.min_sizes}
        if given - set(names) or len(self.table_shares) != len(names):
            raise ValueError(f"table_shares and min_sizes name {sorted(given)}, tables are {names}; give each a share")
        self._share = np.array([self.table_shares[name] for name in names])
        self._least = np.array([max(1, self.min_sizes.get(name, 1)) for name in names])
        self._names = list(names)
        self._allocation = None

    def describe(
        self, tables: Tables, table: np.ndarray, slots: np.ndarray, shares: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Returns the column ``table`` and the factors of the correction, ``[B]`` each."""
        # Counts of states and actions, which lemma2 and lemma2_exact read, are of this replay.
        return {"table": table}, None if self.correction is None else self.correction(tables, shares, slots)

    def weights(
        self, table: np.ndarray, shares: np.ndarray, ratios: DrawnRatios | None, correction: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Returns the product of the correction and the importance weights, with its parts if asked for."""
        beta = 0.0 if ratios is None else self.beta
        weight = correction
        columns = {}
        if self.return_probabilities:
            raw = np.ones(len(table)) if correction is None else correction
            columns = {
                "table_probability": shares[table].astype(np.float32),
                "raw_weight": (raw if ratios is None else raw * ratios.ratio**-beta).astype(np.float32),
            }
        if ratios is not None and beta != 0:
            weight = ratios.importance(beta) if correction is None else ratios.importance(beta) * correction
        if weight is not None:
            largest = weight.max() if self.normalize_over_batch else 1.0
            columns["priority_weight"] = (weight / largest).astype(np.float32)
        return columns

    def _drawable(self, names: list[str]) -> np.ndarray:
        if self._names != names:
            self._read_names(names)
        return self._share > 0

    def __repr__(self) -> str:
        return f"TableShares({self.table_shares}, priority_exponent={self.priority_exponent})"


def largest_remainder(shares: np.ndarray, count: int) -> np.ndarray:
    """Divides ``count`` in proportion to ``shares``: rounded down, the rest to the largest remainders."""
    exact = shares * count
    # Rounding errors must not turn 1 into a little less, here and in the comparison of remainders.
    rows = np.floor(exact + ROUNDING).astype(np.int64)
    left = count - int(rows.sum())
    if left:
        rows[np.argsort(np.round((rows - exact) / ROUNDING), kind="stable")[:left]] += 1
    return rows


def with_one_of_each(rows: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """Returns ``rows`` with at least one for each ready table, taken from the tables that have most."""
    rows = rows.copy()
    for table in np.flatnonzero(ready & (rows == 0)):
        richest = int(rows.argmax())
        if rows[richest] > 1:
            rows[richest] -= 1
            rows[table] += 1
    return rows
