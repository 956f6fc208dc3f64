# SPDX-License-Identifier: Apache-2.0
"""A fixed share of every batch from each table, with the weights that correct for it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lightning_replay.draw_parts import GroupRows
from lightning_replay.samplers.table_corrections import Correction
from lightning_replay.samplers.table_sampler import DrawnRatios, SummedTables, WithinTables
from lightning_replay.saving.spec import recorded
from lightning_replay.schedules import Schedule
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import check_callable, check_kind, checked_count, checked_flag, checked_share

ROUNDING = 1e-6


@recorded
class TableShares(WithinTables):
    """Draws ``batch_size * share`` rows from each table that holds enough, with replacement.

    Tables below their minimum size are left out and the other shares renormalised. Stratified Sampling from Event
    Tables, Kompella et al. 2022, https://arxiv.org/abs/2211.00576, section 4.

    Without a correction the loss is a mean over the drawn rows, in which events count more than they happen; the paper
    needs none in deterministic environments. ``priority_weight`` is the product of the correction and, with priorities,
    of ``(|B| P) ** -importance_exponent`` over the largest of all tables that have a share, where P is the probability
    of a row in a draw from its table B.

    Args:
        table_shares: share of a batch by table name; they sum to 1. Of a table with 0 nothing is ever drawn.
        min_sizes: entries that a table must hold to be drawn from; 1 where absent.
        multinomial: draw the number of rows of each table too, with the shares as probabilities; otherwise they are
            exact in every batch, by largest remainder.
        at_least_one: draw at least one row from every table that holds enough.
        correction: a function of :mod:`lightning_replay.samplers.table_corrections`, or ``None``.
        normalize_over_batch: divide the weights by the largest of the batch.
        priority_exponent, importance_exponent, priority_offset, seed: as
            :class:`~lightning_replay.samplers.table_sampler.WithinTables`.
        return_probabilities: add ``table_probability`` and ``raw_weight`` to each batch.

    Sampled keys:
        index: int64 ``[B]``.
        table: int64 ``[B]``, the number of the table each row was drawn from; 0 is the default table.
        priority_weight: float32 ``[B]``, with a correction or with priorities.
        table_probability: float32 ``[B]``, with ``return_probabilities``: how likely a draw comes from the row's table:
            its share with ``multinomial`` alone; otherwise, or with ``at_least_one``, its part of this batch.
        raw_weight: float32 ``[B]``, with ``return_probabilities``: the correction times
            ``(|B| P) ** -importance_exponent`` before either is divided by a largest one; 1 with neither.

    Raises:
        ValueError: shares that do not sum to 1 or are negative.
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
    ) -> None:
        super().__init__(priority_exponent, importance_exponent, priority_offset, seed)
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
            check_callable("correction", correction, "one of lightning_replay.samplers.table_corrections, or None")
        self.correction = correction
        self.return_probabilities: bool = checked_flag("return_probabilities", return_probabilities)
        self._names: list[str] = []  # of the tables, in the order of the two arrays
        self._share = self._least = np.zeros(0)
        self._allocation: tuple[tuple[int, bytes], GroupRows] | None = None  # the last rows of tables, and for what

    def set_min_sizes(self, min_sizes: Mapping[str, int]) -> None:
        """Replaces the least sizes of these tables; the others keep theirs."""
        self.min_sizes.update(min_sizes)
        self._names = []  # read again at the next draw

    def ready_shares(self, tables: Tables | SummedTables) -> np.ndarray:
        """Returns the share of each table in the next batch, float64 ``[L]``: 0 where it holds too little.

        Raises:
            RuntimeError: no table that has a share holds enough.
        """
        if self._names != tables.names:
            self._read_names(tables.names)
        shares = self._share * (tables.length >= self._least)
        total = shares.sum()
        if not total:
            held = dict(zip(tables.names, tables.length.tolist(), strict=True))
            raise RuntimeError(
                f"no table with a share holds enough rows to draw from: there are {held}, needed are "
                f"{dict(zip(tables.names, self._least.tolist(), strict=True))}, the shares {self.table_shares}. "
                "Collect more steps before the first draw, or lower min_size"
            )
        return shares / total

    def rows_of_tables(self, tables: Tables | SummedTables, batch_size: int) -> GroupRows:
        """Divides ``batch_size`` rows by the shares of the tables that hold enough."""
        if not self.multinomial and self._names == tables.names:
            key = (batch_size, (tables.length >= self._least).tobytes())
            if self._allocation is not None and self._allocation[0] == key:
                return self._allocation[1]
        shares = self.ready_shares(tables)
        if self.multinomial:
            # In units of the last sum, which may be a little below 1: no draw falls behind the last table with a share.
            cumulative = np.cumsum(shares)
            chosen = np.searchsorted(cumulative, self._uniform(batch_size) * cumulative[-1], side="right")
            rows = np.bincount(chosen, minlength=len(shares))
            if not self.at_least_one:
                return GroupRows(rows, shares)
        else:
            rows = largest_remainder(shares, batch_size)
        if self.at_least_one:
            rows = with_one_of_each(rows, shares > 0)
        drawn = GroupRows(rows, rows / batch_size)  # rounding makes other shares of the configured ones
        if not self.multinomial:
            self._allocation = (batch_size, (tables.length >= self._least).tobytes()), drawn
        return drawn

    def _read_names(self, names: list[str]) -> None:
        given = {*self.table_shares, *self.min_sizes}
        if given - set(names) or len(self.table_shares) != len(names):
            raise ValueError(
                f"table_shares and min_sizes name {sorted(given)}; the tables are {names}. Give a share to each"
            )
        self._share = np.array([self.table_shares[name] for name in names])
        self._least = np.array([max(1, self.min_sizes.get(name, 1)) for name in names])
        self._names = list(names)
        self._allocation = None

    def describe(
        self, tables: Tables, table: np.ndarray, slots: np.ndarray, shares: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Returns the table of each row, and the correction if there is one.

        Counts of states and actions, which ``lemma2`` and ``lemma2_exact`` read, are those of this replay.
        """
        return {"table": table}, None if self.correction is None else self.correction(tables, shares, slots)

    def weights(
        self, table: np.ndarray, shares: np.ndarray, ratios: DrawnRatios | None, correction: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Returns the weights if any, and the columns of ``return_probabilities``, float32 ``[B]``."""
        beta = 0.0 if ratios is None else self.beta
        weight = correction
        columns = {}
        if self.return_probabilities:
            raw = np.ones(len(table)) if correction is None else correction
            columns["table_probability"] = shares[table].astype(np.float32)
            columns["raw_weight"] = (raw if ratios is None else raw * ratios.ratio**-beta).astype(np.float32)
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
    """Divides ``count`` in proportion to ``shares``: rounded down, the rest to the largest remainders.

    Equal remainders go to the earlier table.

    Example:
        >>> largest_remainder(np.array([0.5, 0.3, 0.2]), 7)
        array([4, 2, 1])
    """
    exact = shares * count
    # A share of a third times three is a one, not a little less; so too where remainders are compared.
    rows = np.floor(exact + ROUNDING).astype(np.int64)
    left = count - int(rows.sum())
    if left:
        rows[np.argsort(np.round((rows - exact) / ROUNDING), kind="stable")[:left]] += 1
    return rows


def with_one_of_each(rows: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """Returns ``rows`` with at least one for each ready table, taken from those that have most.

    Example:
        >>> with_one_of_each(np.array([7, 0, 1, 0]), np.array([True, True, True, False]))
        array([6, 1, 1, 0])
    """
    rows = rows.copy()
    for table in np.flatnonzero(ready & (rows == 0)):
        richest = int(rows.argmax())
        if rows[richest] > 1:
            rows[richest] -= 1
            rows[table] += 1
    return rows
