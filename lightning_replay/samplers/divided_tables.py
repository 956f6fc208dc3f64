# SPDX-License-Identifier: Apache-2.0
"""Draws inside tables that are divided over several replays: each table is a group."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.draw_parts import DividedRows, DrawPart, GroupRows, GroupTotals, PartDraw
from lightning_replay.parts import SamplerHooks
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.samplers.table_draws import DrawnRatios, HeldTables, SummedTables, tables_of
from lightning_replay.samplers.torchrl_compat import TorchRLNames
from lightning_replay.tables.tables import Tables


class DividedTables(TorchRLNames):
    """A sampler of rows of tables, each row equally likely in its table or in proportion to priorities."""

    _trees: list[PriorityTree]
    rows_drawn: np.ndarray

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "describe" in vars(cls) and not {"describe_part", "sample_part"} & vars(cls).keys():
            # The rows of a part would be without the columns of this class.
            kind: Any = cls
            kind.sample_part = SamplerHooks.sample_part

    @abstractmethod
    def rows_of_tables(self, tables: HeldTables, batch_size: int) -> np.ndarray:
        """Returns how many rows come from each table, int64 ``[L]``, ``batch_size`` together.

        Args:
            tables: the names of the tables and their lengths; summed over all replays where a draw is divided.
            batch_size: rows.

        Raises:
            RuntimeError: no table can be drawn from.
        """

    @abstractmethod
    def _attach_tables(self, tables: Tables) -> None:
        """Sizes everything for the tables, at the first call."""

    @abstractmethod
    def _sync_trees(self, tables: Tables) -> None:
        """Updates the trees by what has entered and left the tables since the last call."""

    def _drawable(self, names: list[str]) -> np.ndarray:
        """Returns whether rows of each table may be in a batch once it holds enough, bool ``[L]``."""
        return np.ones(len(names), dtype=np.bool_)

    def group_totals(self, storage: Storage) -> GroupTotals:
        """Returns the number of rows of each table or, with priorities, their sum as rows are drawn by them."""
        tables = tables_of(storage, self)
        totals = GroupTotals.alike(tables.length, tables.names)
        if not self.uses_priorities:
            return totals
        self._attach_tables(tables)
        self._sync_trees(tables)
        mass, smallest = np.array([tree.bounds() for tree in self._trees], dtype=np.float64).T
        return GroupTotals(totals.names, mass, totals.rows, smallest, float(self._largest))

    def sample_part(self, storage: Storage, part: DrawPart) -> tuple[Tensor, dict[str, Any], PartDraw]:
        """Draws the rows at the points, int64 ``[n]`` on the storage's device.

        Raises:
            RuntimeError: a table of which rows are asked holds none, or none of positive priority.
        """
        tables, totals = tables_of(storage, self), self.group_totals(storage)
        self._attach_tables(tables)
        for number in np.unique(part.groups).tolist():
            if not totals.mass[number] > 0:
                raise self.without_rows(tables.names[number], int(totals.rows[number]))
        if self.uses_priorities:
            slots, probability = self._drawn_at(tables, part)
        else:
            slots, probability = tables.entries_at(part.groups, part.points), 1.0 / totals.mass[part.groups]
        self._clocks["draws"] += 1
        self.rows_drawn += np.bincount(part.groups, minlength=len(tables))
        info, correction = self.describe_part(tables, part, slots)
        index = torch.from_numpy(slots)
        if storage.device.type != "cpu":
            index, info = index.to(storage.device), {key: value.to(storage.device) for key, value in info.items()}
        return index, info, PartDraw(probability, totals, correction)

    def _drawn_at(self, tables: Tables, part: DrawPart) -> tuple[np.ndarray, np.ndarray]:
        """Returns slots, int64 ``[n]``, and their probabilities in their tables, by priority."""
        slots, probability = np.empty(len(part), dtype=np.int64), np.empty(len(part))
        for number in np.unique(part.groups).tolist():
            own = part.groups == number
            place, probability[own] = self._trees[number].draw_at(part.points[own])
            slots[own] = tables.entries[tables.offset[number] + place.numpy()]
        return slots, probability

    def without_rows(self, table: str, held: int) -> RuntimeError:
        """Returns the error for a draw from a table of ``held`` rows, none of which can be drawn."""
        if not held:
            return RuntimeError(f"table {table!r} holds no rows to draw from; call extend first")
        return RuntimeError(
            f"every row of table {table!r} has priority 0 and priority_offset is {self.priority_offset}, so none can "
            "be drawn; use a positive priority_offset"
        )

    def describe_part(
        self, tables: Tables, part: DrawPart, slots: np.ndarray
    ) -> tuple[dict[str, Tensor], np.ndarray | None]:
        """Returns further columns of the rows of a part, and what their weights are multiplied by, if anything.

        Args:
            tables: of this replay.
            part: of n rows.
            slots: of these rows, int64 ``[n]``.
        """
        return {}, None

    def rows_of_groups(self, batch_size: int, totals: GroupTotals) -> GroupRows:
        """Divides a batch over the tables by their lengths in all replays together."""
        rows = self.rows_of_tables(SummedTables(totals.names, totals.rows), batch_size)
        return GroupRows(rows, rows / batch_size)

    def weigh(self, drawn: DividedRows) -> dict[str, np.ndarray]:
        """Returns ``priority_weight``, float32 ``[B]``, with priorities."""
        ratios = self._ratios(drawn)
        if ratios is None or self.beta == 0:
            return {}
        return {"priority_weight": ratios.importance(self.beta).astype(np.float32)}

    def _ratios(self, drawn: DividedRows) -> DrawnRatios | None:
        """Returns how often rows are drawn, ``None`` without priorities; counts a draw."""
        self._clocks["draws"] += 1
        if not self.uses_priorities:
            return None
        is_drawn = self._drawable(drawn.names) & np.isfinite(drawn.least)
        smallest = min((drawn.rows * drawn.least)[is_drawn].tolist(), default=math.inf)
        return DrawnRatios(drawn.rows[drawn.group] * drawn.probability, smallest)
