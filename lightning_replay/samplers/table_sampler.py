# SPDX-License-Identifier: Apache-2.0
"""Draws inside tables: uniform, or in proportion to priorities of which each transition has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.draw_parts import DrawPart, PartDraw
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers.divided_tables import DividedTables
from lightning_replay.samplers.table_draws import DrawnRatios, tables_of
from lightning_replay.schedules import Schedule
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import checked_number


class WithinTables(DividedTables):
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
        """Slots that have a priority."""
        return len(self._priority)

    @property
    def device(self) -> torch.device:
        """Returns where priorities are: tables are kept by the CPU."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of the priorities."""
        return self._priority.nbytes + sum(tree.nbytes for tree in self._trees)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Gives rows written just now the largest priority so far; called by the writers."""
        if self.uses_priorities and storage is not None:
            self._attach_tables(tables_of(storage, self))
            self._priority[torch.as_tensor(index, device="cpu").numpy()] = self.default_priority

    def sample_part(self, storage: Storage, part: DrawPart) -> tuple[Tensor, dict[str, Any], PartDraw]:
        """Draws the rows at the points of a part, as its base class; defined beside ``sample``, see ReplaySampler."""
        return super().sample_part(storage, part)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws ``batch_size`` slots with replacement, int64 ``[B]`` on the storage's device, table after table.

        Raises:
            RuntimeError: no table can be drawn from.
        """
        tables = tables_of(storage, self)
        rows = self.rows_of_tables(tables, batch_size)
        self._attach_tables(tables)
        uniform = self._uniform(batch_size)
        if self.uses_priorities:
            self._sync_trees(tables)
            table = np.repeat(np.arange(len(rows)), rows)
            places, drawn = self._by_priority(tables, torch.from_numpy(uniform), rows)
            slots = tables.entries[tables.offset[table] + places]
        else:
            (table, slots), drawn = tables.draw(rows, uniform), None
        self._clocks["draws"] += 1
        self.rows_drawn += rows
        index, info = torch.from_numpy(slots), self.describe(tables, table, slots, drawn)
        if storage.device.type != "cpu":
            index, info = index.to(storage.device), {key: value.to(storage.device) for key, value in info.items()}
        return index, info

    def _uniform(self, count: int) -> np.ndarray:
        """Draws numbers from [0, 1), float64 ``[count]``."""
        generator = self._generator
        device = generator.device
        uniform = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
        return (uniform if device.type == "cpu" else uniform.cpu()).numpy()

    def describe(
        self, tables: Tables, table: np.ndarray, slots: np.ndarray, drawn: DrawnRatios | None
    ) -> dict[str, Tensor]:
        """Returns further columns of a batch, from ``table`` and ``slots`` of its rows, int64 ``[B]``.

        Args:
            drawn: how often each row is drawn; ``None`` without priorities.
        """
        beta = 0.0 if drawn is None else self.beta
        if drawn is None or beta == 0:
            return {}
        return {"priority_weight": torch.from_numpy(drawn.importance(beta)).float()}

    def _by_priority(self, tables: Tables, uniform: Tensor, rows: np.ndarray) -> tuple[np.ndarray, DrawnRatios]:
        """Draws ``rows`` entries of each table in proportion to their priorities."""
        places, ratios, smallest = [], [], math.inf
        length, drawable = tables.length, self._drawable(tables.names)
        for number, (tree, part) in enumerate(zip(self._trees, uniform.split(rows.tolist()), strict=True)):
            total, least = tree.bounds()
            scale = float(length[number]) / total if total > 0 else 0.0  # turns a value of the tree into a ratio
            if drawable[number] and total > 0:
                smallest = min(smallest, least * scale)
            if not rows[number]:
                continue
            if total <= 0:
                raise self.without_rows(tables.names[number], int(length[number]))
            place, over_smallest = tree.draw(part)
            places.append(place.numpy())
            ratios.append(over_smallest.double().numpy() * least * scale)
        return np.concatenate(places), DrawnRatios(np.concatenate(ratios), smallest)

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
        """Sizes everything for the tables, at the first call."""
        count = len(tables.names)
        if len(self.rows_drawn) != count:
            self.rows_drawn = np.zeros(count, dtype=np.int64)
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

    def draw_state(self) -> Any:
        """Returns what a draw changes: the generator's state, the clocks and the rows drawn."""
        return super().draw_state(), self.rows_drawn.copy()

    def undo_draw(self, state: Any) -> None:
        """Undoes the draws since :meth:`draw_state`."""
        shared, self.rows_drawn = state
        super().undo_draw(shared)

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
