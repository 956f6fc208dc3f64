# SPDX-License-Identifier: Apache-2.0
"""How the next batch is drawn: the probability of each row, and how many rows that amounts to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_replay.levels.concentration import effective_number
from lightning_replay.report.reading import array_of
from lightning_replay.report.tables import Table

_UNIFORM = ("UniformSampler", "RandomSampler")


class Draws(NamedTuple):
    """Probabilities and priorities of stored rows.

    ``probability``, float64 ``[N]``, sums to 1: of the next draw of one row, of the first row where pairs are drawn.
    ``priority``, float64 ``[N]``, before any exponent; ``None`` for samplers without priorities. ``default_priority``
    is what new rows get. ``of_tables``: shares of the tables that the probabilities presume, ``None`` without tables.
    """

    probability: np.ndarray
    priority: np.ndarray | None = None
    default_priority: float | None = None
    of_tables: list[float] | None = None

    @property
    def effective_rows(self) -> float:
        """Effective sample size ``1 / Σ p²``: the number of equally likely rows that would repeat as often."""
        return effective_number(self.probability)

    def share_of_top(self, top: float) -> float:
        """Returns the share of all draws that go to the likeliest ``top`` of the rows, such as 0.1 for a tenth.

        Example:
            >>> round(Draws(np.array([0.7, 0.1, 0.1, 0.1])).share_of_top(0.25), 3)
            0.7
        """
        count = max(1, round(top * len(self.probability)))
        return float(np.partition(self.probability, -count)[-count:].sum())


def draws_of(names: Sequence[str], sampler: Mapping[str, Any], slots: np.ndarray, tables: list[Table]) -> Draws | None:
    """Returns how rows are drawn; ``None`` for an empty buffer and for samplers whose rule is not known here.

    Args:
        names: classes of the sampler and of the one that draws its first rows.
        sampler: its state.
        slots: that hold a row, int64 ``[N]``, ascending.
        tables: of the buffer, if any.
    """
    if not len(slots):
        return None
    while isinstance(sampler.get("first"), Mapping):
        sampler = sampler["first"]
    if tables:
        return _of_tables(sampler, slots, tables)
    if "tree" in sampler and "priority_exponent" in sampler:
        leaves = array_of(sampler["tree"]["leaves"])[slots].astype(np.float64)
        total, exponent = leaves.sum(), float(sampler["priority_exponent"])
        if not total > 0:
            return None
        priority = default = None
        if exponent > 0:
            priority = np.maximum(leaves ** (1 / exponent) - float(sampler["priority_offset"]), 0.0)
            default = _default_priority(sampler)
        return Draws(leaves / total, priority, default)
    if names[-1] in _UNIFORM:
        return Draws(np.full(len(slots), 1 / len(slots)))
    return None


def _of_tables(sampler: Mapping[str, Any], slots: np.ndarray, tables: list[Table]) -> Draws | None:
    """Returns probabilities over all tables: by fixed shares, else by the shares drawn so far."""
    if "rows_drawn" not in sampler:  # draws among all slots
        return None
    filled = np.array([len(table.slots) > 0 for table in tables])
    if all(table.share is not None for table in tables):
        shares = np.array([table.share for table in tables], dtype=np.float64)
    else:
        shares = np.array([table.drawn for table in tables], dtype=np.float64)
    shares = shares * filled
    if not shares.sum() > 0:
        shares = filled.astype(np.float64)
    if not shares.sum() > 0:
        return None
    shares /= shares.sum()
    exponent, offset = float(sampler["priority_exponent"]), float(sampler.get("priority_offset", 0.0))
    by_slot, priority, default = None, None, None
    if exponent > 0 and len(sampler["priority"]):
        by_slot = array_of(sampler["priority"]).astype(np.float64)
        priority, default = by_slot[slots], _default_priority(sampler)
    probability = np.zeros(len(slots))
    for table, share in zip(tables, shares.tolist(), strict=True):
        if share > 0:
            weight = np.ones(len(table.slots)) if by_slot is None else (by_slot[table.slots] + offset) ** exponent
            if weight.sum() > 0:
                probability[np.searchsorted(slots, table.slots)] += share * weight / weight.sum()
    return Draws(probability / probability.sum(), priority, default, shares.tolist()) if probability.any() else None


def _default_priority(sampler: Mapping[str, Any]) -> float:
    largest = float(sampler["largest_priority"])
    return largest if largest > 0 else 1.0
