# SPDX-License-Identifier: Apache-2.0
"""Kept rows compared with the newest, which a first-in-first-out buffer would hold: age, terminal rows, TD errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_replay.retention.index import RetainedRows
from lightning_replay.retention.rules import RetentionRule, SurpriseOnly, SurpriseOnPolicyness
from lightning_replay.storage.stored_column import as_array
from lightning_replay.storage.transition_check import Column

HOARDING_AGE = 3.0  # mean age over the capacity
HOARDING_RATIO = 2.0  # of the share of episode ends, or of the TD error, to that of the newest rows
MIN_ROWS = 100  # shares of fewer rows are chance
UNKNOWN = -1


class Diagnostics:
    """Figures of hoarding: whether a buffer keeps old rows whose surprise training does not remove.

    The kept rows are compared with the newest ``capacity`` offered ones, stored or refused, whose flags and surprise
    lie in a ring: a row is at the place of its number modulo the capacity.

    Args:
        rows: the stored ones, with their latest surprise.
        rule: decides which rows are kept; the warning advises for it.
    """

    def __init__(self, rows: RetainedRows, rule: RetentionRule) -> None:
        self._rows, self._rule = rows, rule
        self._is_terminal = np.full(rows.capacity, UNKNOWN, dtype=np.int8)  # by slot
        self._newest_is_terminal = self._is_terminal.copy()  # these two by place in the ring
        self._newest_surprise = np.full(rows.capacity, np.nan, dtype=np.float32)
        self._next = 0  # number of the next row
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        return self._is_terminal.nbytes + self._newest_is_terminal.nbytes + self._newest_surprise.nbytes

    def add(
        self, ended: Column | None, surprise: torch.Tensor, first: int, slots: np.ndarray, rows: np.ndarray
    ) -> None:
        """Records offered rows ``[M]``, stored or refused.

        Args:
            ended: whether each is a terminal step, ``[M]`` or ``[M, 1]``; ``None`` where that is unknown.
            surprise: of each, float32 ``[M]``; NaN where unknown.
            first: number of the first row.
            slots: of those that entered.
            rows: which of the new rows these are.
        """
        is_terminal = UNKNOWN if ended is None else as_array(ended != 0).reshape(-1)
        self._add_newest(first, is_terminal, surprise.numpy())
        self._is_terminal[slots] = UNKNOWN if isinstance(is_terminal, int) else is_terminal[rows]

    def _add_newest(self, first: int, is_terminal: np.ndarray | int, surprise: np.ndarray) -> None:
        count, capacity = len(surprise), self._rows.capacity
        self._next, start = first + count, first % capacity
        # Of several rows in one place the last stays; a slice is written faster.
        at = slice(start, start + count) if start + count <= capacity else np.arange(first, first + count) % capacity
        self._newest_is_terminal[at], self._newest_surprise[at] = is_terminal, surprise

    def update(self, slots: np.ndarray, surprise: torch.Tensor) -> None:
        """Records feedback for stored rows; of several for one slot the last counts."""
        number, capacity = self._rows.order.arrival(slots), self._rows.capacity
        recent = number >= self._next - capacity
        self._newest_surprise[number[recent] % capacity] = surprise.numpy()[recent]

    def restart(self) -> None:
        """Takes the stored rows as the newest; called after their arrivals were renumbered."""
        slots = self._rows.stored()
        slots = slots[np.argsort(self._rows.order.arrival(slots))]
        self._clear_newest()
        self._add_newest(0, self._is_terminal[slots], self._rows.surprise(slots))

    def stats(self, slots: np.ndarray, age_mean: float) -> dict[str, float]:
        """Returns the figures of ``RetentionWriter.stats`` that are known; warns once where they show hoarding.

        Args:
            slots: of all stored rows.
            age_mean: their mean age.
        """
        stats = {"age_over_capacity": age_mean / self._rows.capacity}
        share, newest_share = _share(self._is_terminal[slots]), _share(self._newest_is_terminal)
        newest = max(newest_share, 1 / self._rows.capacity)  # NaN stays; none counts as one
        stats |= {"terminal_share": share, "terminal_over_newest": share / newest}
        errors = _mean_error(self._rows.surprise(slots)), _mean_error(self._newest_surprise)
        stats["td_error_over_newest"] = _ratio(*errors)
        if not self._has_warned and len(slots) >= MIN_ROWS and _hoards(stats):
            self._has_warned = True
            _warn(stats, newest_share, self._rule)
        return {name: value for name, value in stats.items() if not math.isnan(value)}

    def clear(self) -> None:
        """Removes all rows; the next one has any number."""
        self._clear_newest()
        self._is_terminal.fill(UNKNOWN)

    def _clear_newest(self) -> None:
        self._newest_is_terminal.fill(UNKNOWN)
        self._newest_surprise.fill(np.nan)
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the newest rows, and which slots hold the end of an episode."""
        flags, surprise = self._newest_is_terminal.copy(), self._newest_surprise.copy()
        newest = {"is_terminal": torch.from_numpy(flags), "surprise": torch.from_numpy(surprise), "next": self._next}
        return {"newest": newest, "is_terminal": torch.from_numpy(self._is_terminal.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Restores what :meth:`state_dict` returned; ``None``, of earlier saves, leaves all unknown."""
        self.clear()
        if state_dict is not None:
            newest = state_dict["newest"]
            self._newest_is_terminal[:] = newest["is_terminal"].cpu().numpy()
            self._newest_surprise[:] = newest["surprise"].cpu().numpy()
            self._next = int(newest["next"])
            self._is_terminal[:] = state_dict["is_terminal"].cpu().numpy()


def _share(is_terminal: np.ndarray) -> float:
    """Returns the share of terminal rows among those of known flags; NaN if none is known."""
    return _ratio((is_terminal > 0).sum(), (is_terminal >= 0).sum())


def _hoards(stats: Mapping[str, float]) -> bool:
    ratios = (stats["terminal_over_newest"], stats["td_error_over_newest"])  # NaN if unknown
    return stats["age_over_capacity"] >= HOARDING_AGE and any(ratio >= HOARDING_RATIO for ratio in ratios)


def _warn(stats: Mapping[str, float], newest_share: float, rule: RetentionRule) -> None:
    shown = [f"their mean age is {stats['age_over_capacity']:.1f} times the capacity (0.5 first in, first out)"]
    if not math.isnan(stats["terminal_share"]):
        shown.append(f"{stats['terminal_share']:.0%} of them end an episode ({newest_share:.0%} of the newest)")
    if not math.isnan(stats["td_error_over_newest"]):
        shown.append(f"their TD error is {stats['td_error_over_newest']:.1f} times that of the newest")
    warnings.warn(
        f"the buffer hoards rows that training does not explain: {'; '.join(shown)}. Where chance decides rewards or "
        "successors, as with sticky actions or returns over several steps, it counts as surprise that stays. "
        f"{_advice(rule)} with first in, first out, rule=OldestLeaves(), of this and of a larger capacity; see "
        "docs/retention.md",
        stacklevel=5,
    )


def _advice(rule: RetentionRule) -> str:
    if not isinstance(rule, SurpriseOnly | SurpriseOnPolicyness):
        return f"Compare {type(rule).__name__}"
    if rule.draw_discount < 1.0:
        return f"draw_discount={rule.draw_discount:g} does not suffice here: give a lower one, and compare"
    return "Give draw_discount=0.9, and compare"


def _mean_error(surprise: np.ndarray) -> float:
    """Returns the mean root of the known surprise; NaN where none is."""
    known = surprise[~np.isnan(surprise)]
    return _ratio(np.sqrt(known).sum(dtype=np.float64), len(known))


def _ratio(amount: float, whole: float) -> float:
    return float(amount / whole) if whole else float("nan")
