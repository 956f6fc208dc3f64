# SPDX-License-Identifier: Apache-2.0
"""Kept rows beside the newest, which a first-in-first-out buffer would hold: their age, episode ends and TD errors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_replay.retention.index import RetainedRows
from lightning_replay.storage.stored_column import as_array
from lightning_replay.storage.transition_check import Column

BLOCKS = 64  # of the newest rows, each with counters
OLD = 3.0  # mean age over the capacity
MANY = 2.0  # times the newest rows' share of episode ends, or their TD error
ENOUGH = 100  # rows; shares of fewer are chance
UNKNOWN = -1
_FLAGS, _ENDS, _ERRORS, _ERROR_SUM = range(4)


class NewestRows:
    """Sums over the newest ``capacity`` offered rows, stored or refused, in a ring of at most 64 counters.

    A counter is of ``capacity / 64`` rows, rounded up, so the number of rows is exact to within one counter.

    Args:
        capacity: rows of a first-in-first-out buffer.
    """

    def __init__(self, capacity: int) -> None:
        self._rows_each = -(-capacity // BLOCKS)
        self._count = -(-capacity // self._rows_each)
        self._sums = np.zeros((4, self._count))
        self._block = 0  # the newest

    def add(self, first: int, count: int, is_end: np.ndarray | None, error: np.ndarray | None) -> None:
        """Counts new rows.

        Args:
            first: number of the first row; the others follow.
            count: M, how many.
            is_end: whether each ends an episode, bool ``[M]``; ``None`` where unknown.
            error: magnitudes of TD errors, float32 ``[M]``; ``None`` where unknown.
        """
        last = (first + count - 1) // self._rows_each
        self._begin(last)
        if first // self._rows_each == last:  # most calls
            sums, only = self._sums, last % self._count
            if is_end is not None:
                sums[_FLAGS, only] += count
                sums[_ENDS, only] += np.count_nonzero(is_end)
            if error is not None:
                sums[_ERRORS, only] += count
                sums[_ERROR_SUM, only] += np.add.reduce(error, dtype=np.float64)
            return
        starts = [0, *range(self._rows_each - first % self._rows_each, count, self._rows_each)][-self._count :]
        place = np.arange(last + 1 - len(starts), last + 1) % self._count
        rows = np.diff(starts, append=count)
        for counter, sum_of, values in ((_FLAGS, _ENDS, is_end), (_ERRORS, _ERROR_SUM, error)):
            if values is not None:
                self._sums[counter, place] += rows
                self._sums[sum_of, place] += np.add.reduceat(values, starts, dtype=np.float64)

    def add_one(self, number: int, is_end: int, error: float) -> None:
        """Counts a single row: 0, 1 or -1, where it is unknown, and the magnitude of its TD error, or NaN."""
        block = number // self._rows_each
        self._begin(block)
        sums, place = self._sums, block % self._count
        if is_end >= 0:
            sums[_FLAGS, place] += 1.0
            sums[_ENDS, place] += is_end
        if error == error:
            sums[_ERRORS, place] += 1.0
            sums[_ERROR_SUM, place] += error

    def _begin(self, block: int) -> None:
        if block > self._block:
            begun = block - np.arange(min(block - self._block, self._count))
            self._sums[:, begun % self._count] = 0.0
            self._block = block

    def replace(self, number: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Sets errors, float32 ``[n]`` with NaN where unknown, of rows by their numbers ``[n]``, each named once."""
        block = number // self._rows_each
        counted = (block > self._block - self._count) & (block <= self._block)
        place, before, after = block[counted] % self._count, before[counted], after[counted]
        was_known, is_known = before == before, after == after
        changes = np.where(is_known, after, 0.0).astype(np.float64) - np.where(was_known, before, 0.0)
        self._sums[_ERRORS] += np.bincount(place, is_known.astype(np.float64) - was_known, self._count)
        self._sums[_ERROR_SUM] += np.bincount(place, changes, self._count)

    @property
    def end_share(self) -> float:
        """Share of rows that end an episode; NaN where it is unknown of all."""
        return _ratio(self._sums[_ENDS].sum(), self._sums[_FLAGS].sum())

    @property
    def mean_error(self) -> float:
        """Mean of the known errors; NaN where none is."""
        return _ratio(self._sums[_ERROR_SUM].sum(), self._sums[_ERRORS].sum())

    def clear(self) -> None:
        """Forgets all rows; the next one has any number."""
        self._sums.fill(0.0)
        self._block = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters."""
        return {"sums": torch.from_numpy(self._sums.copy()), "block": self._block}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._sums[:] = state_dict["sums"].cpu().numpy()
        self._block = int(state_dict["block"])


class Diagnostics:
    """Whether a buffer hoards: keeps old rows whose surprise no training removes.

    Args:
        rows: the stored ones, with their latest surprise.
    """

    def __init__(self, rows: RetainedRows) -> None:
        self._rows = rows
        self._newest = NewestRows(rows.capacity)
        self._is_end = np.full(rows.capacity, UNKNOWN, dtype=np.int8)
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        """Bytes of what is noted of each slot."""
        return self._is_end.nbytes

    def offered(
        self, ended: Column | None, surprise: torch.Tensor, first: int, slots: np.ndarray, rows: np.ndarray
    ) -> None:
        """Notes new rows ``[M]``.

        Args:
            ended: whether each ends an episode, ``[M]`` or ``[M, 1]``; ``None`` where that is unknown.
            surprise: of each, float32 ``[M]``; NaN, of all, where unknown.
            first: number of the first row.
            slots: of those that entered.
            rows: which of the new rows these are.
        """
        if len(surprise) == 1:  # one step of an environment, in plain numbers
            flag = UNKNOWN if ended is None else int(ended.item() != 0)
            self._newest.add_one(first, flag, surprise.item() ** 0.5)
            if len(slots):
                self._is_end[slots[0]] = flag
            return
        is_end = None if ended is None else as_array(ended != 0).reshape(-1)
        known = surprise.numpy()
        self._newest.add(first, len(known), is_end, np.sqrt(known) if known[0] == known[0] else None)
        self._is_end[slots] = UNKNOWN if is_end is None else is_end[rows]

    def measured(self, slots: np.ndarray, surprise: torch.Tensor) -> None:
        """Notes feedback for stored rows before it is kept; of several for one slot the last counts."""
        slots, place = np.unique(slots[::-1], return_index=True)
        before, after = self._rows.surprise(slots), surprise.numpy()[::-1][place]
        self._newest.replace(self._rows.order.arrival(slots), np.sqrt(before), np.sqrt(after))

    def renumbered(self) -> None:
        """Counts the stored rows alone as the newest, after they were numbered anew."""
        slots = self._rows.stored()
        slots = slots[np.argsort(self._rows.order.arrival(slots))]
        self._newest.clear()
        errors = np.sqrt(self._rows.surprise(slots)).tolist()
        for number, (flag, error) in enumerate(zip(self._is_end[slots].tolist(), errors, strict=True)):
            self._newest.add_one(number, flag, error)

    def stats(self, slots: np.ndarray, age_mean: float) -> dict[str, float]:
        """Returns the figures of ``RetentionWriter.stats`` that are known; warns once where they show hoarding.

        Args:
            slots: of all stored rows.
            age_mean: their mean age.
        """
        stats = {"age_over_capacity": age_mean / self._rows.capacity}
        is_end, error = self._is_end[slots], np.sqrt(self._rows.surprise(slots))
        is_known = error == error
        share = _ratio((is_end > 0).sum(), (is_end >= 0).sum())
        newest = max(self._newest.end_share, 1 / self._rows.capacity)  # NaN stays; none counts as one
        stats |= {"terminal_share": share, "terminal_over_newest": share / newest}
        mean = _ratio(error[is_known].sum(dtype=np.float64), is_known.sum())
        stats["td_error_over_newest"] = _ratio(mean, self._newest.mean_error)
        if not self._has_warned and len(slots) >= ENOUGH and _hoards(stats):
            self._has_warned = True
            _warn(stats, self._newest.end_share)
        return {name: value for name, value in stats.items() if value == value}

    def clear(self) -> None:
        """Forgets all rows."""
        self._newest.clear()
        self._is_end.fill(UNKNOWN)

    def state_dict(self) -> dict[str, Any]:
        """Returns counters of the newest rows, and which slots hold the end of an episode."""
        return {"newest": self._newest.state_dict(), "is_end": torch.from_numpy(self._is_end.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Restores what :meth:`state_dict` returned; ``None``, of earlier saves, leaves all unknown."""
        self.clear()
        if state_dict is not None:
            self._newest.load_state_dict(state_dict["newest"])
            self._is_end[:] = state_dict["is_end"].cpu().numpy()


def _hoards(stats: Mapping[str, float]) -> bool:
    is_old = stats["age_over_capacity"] >= OLD
    return is_old and (stats["terminal_over_newest"] >= MANY or stats["td_error_over_newest"] >= MANY)


def _warn(stats: Mapping[str, float], newest_share: float) -> None:
    shown = [f"their mean age is {stats['age_over_capacity']:.1f} times the capacity (0.5 first in, first out)"]
    if stats["terminal_share"] == stats["terminal_share"]:
        shown.append(f"{stats['terminal_share']:.0%} of them end an episode ({newest_share:.0%} of the newest)")
    if stats["td_error_over_newest"] == stats["td_error_over_newest"]:
        shown.append(f"their TD error is {stats['td_error_over_newest']:.1f} times that of the newest")
    warnings.warn(
        f"the buffer hoards rows that training does not explain: {'; '.join(shown)}. Where chance decides rewards or "
        "successors, as with sticky actions or returns over several steps, it counts as surprise that stays. Compare "
        "with rule=OldestLeaves(), use n_steps=1, or lower surprise_exponent; see docs/retention.md",
        stacklevel=5,
    )


def _ratio(amount: float, whole: float) -> float:
    return float(amount / whole) if whole else float("nan")
