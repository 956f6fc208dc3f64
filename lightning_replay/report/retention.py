# SPDX-License-Identifier: Apache-2.0
"""Rows that were kept by importance, and what is known of those that left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lightning_replay.report.reading import array_of
from lightning_replay.retention.eviction_order import ARRIVAL_BITS, priority_of

_ARRIVALS = (1 << ARRIVAL_BITS) - 1


class Retained(NamedTuple):
    """Rows kept by importance. Arrays ``[N]`` are of the rows in ``slots``, int64 ``[N]``, ascending.

    ``arrival`` is the number of each row among all that were offered, int64 ``[N]``; ``priority`` its retention
    priority and ``surprise`` its latest surprise, NaN where unknown, float32 ``[N]``. ``newest_surprise``, float32, is
    that of the newest rows offered, kept or not, which a first-in-first-out buffer would hold.
    """

    slots: np.ndarray
    arrival: np.ndarray
    priority: np.ndarray
    surprise: np.ndarray
    newest_surprise: np.ndarray
    offered: int
    refused: int
    evicted: int

    def kept_by_arrival(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the share of rows still stored, of equal stretches of all rows offered.

        Args:
            most: stretches; fewer if fewer rows were offered.

        Returns:
            The first number of each stretch, with the end, int64 ``[P + 1]``, and the shares, float64 ``[P]``.
        """
        edges = np.unique(np.linspace(0, max(self.offered, 1), most + 1).round().astype(np.int64))
        kept, _ = np.histogram(self.arrival, edges)
        return edges, kept / np.diff(edges)


def retained_of(writer: Mapping[str, Any]) -> Retained | None:
    """Returns the rows of a :class:`~lightning_replay.writers.RetentionWriter` from its state; of others ``None``."""
    rows = writer.get("rows")
    if not isinstance(rows, Mapping) or "keys" not in rows:
        return None
    keys = array_of(rows["keys"])
    slots = np.delete(np.arange(len(keys)), rows["holes"])
    surprise = np.full(len(keys), np.nan, np.float32)
    saved = array_of(rows["surprise"])  # format 3 began with it only where a schedule needs it
    surprise[: len(saved)] = saved
    diagnostics = writer.get("diagnostics")
    newest = np.zeros(0, np.float32) if diagnostics is None else array_of(diagnostics["newest"]["surprise"])
    return Retained(
        slots=slots,
        arrival=(keys & _ARRIVALS)[slots],
        priority=priority_of(keys[slots]),
        surprise=surprise[slots],
        newest_surprise=newest[~np.isnan(newest)],
        offered=int(writer["offered"]),
        refused=int(writer["refused"]),
        evicted=int(writer["evicted"]),
    )
