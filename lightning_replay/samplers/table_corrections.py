# SPDX-License-Identifier: Apache-2.0
"""Weights that correct for drawing events more often than they happen; Kompella et al. 2022, section 4, Lemma 2.

Functions of the tables, the shares of the batch as drawn (float64 ``[L]``, the default table first) and the slots drawn
(int64 ``[B]``), which return float64 ``[B]``:

* :func:`mixture`: exact for any state space, and for tables left out of the batch;
* :func:`lemma2`: the paper's formula, for discrete states and actions;
* :func:`lemma2_exact`: the exact ratio of the lemma's own sampling model; the two agree where q is 0.

Lemma 2 needs q(s, a), the probability that a transition from (s, a) is in no event table, which is estimated from
:class:`~lightning_replay.tables.counts.StateActionCounts` of ``EventTableWriter(count_state_actions=True)``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_replay.tables.counts import StateActionCounts
from lightning_replay.tables.tables import Tables

Correction = Callable[[Tables, np.ndarray, np.ndarray], np.ndarray]


def mixture(tables: Tables, shares: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``(1 / |B_0|) / sum_i p_i m_i / |B_i|``, where m_i is 1 if table i holds the row.

    The weighted mean over draws is the mean over the default table. Rows that have left it count as if they were in it.
    """
    per_entry = shares / np.maximum(tables.drawn_among, 1)
    probability = per_entry @ (tables.position[:, slots] >= 0)
    return 1.0 / (max(int(tables.length[0]), 1) * probability)


def lemma2(tables: Tables, shares: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``1 - η q`` for a row in an event table, ``1 / (1 - η)`` for one outside; η is the share of all event tables.

    A table of which nothing is drawn, with a share of 0 or too few rows, is no event table here. The proof's last
    sentence has ``1 - η`` for the outside; the formula displayed in the lemma, used here, removes the bias.
    """
    share, outside = _outside(tables, shares, slots)
    return _weights(tables, shares, slots, 1.0 - share * outside)


def lemma2_exact(tables: Tables, shares: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``(1 - q) / (1 - q + η q)`` for a row in an event table, ``1 / (1 - η)`` for one outside."""
    share, outside = _outside(tables, shares, slots)
    inside = (1.0 - outside) / np.maximum(1.0 - outside + share * outside, 1e-12)
    return _weights(tables, shares, slots, inside)


CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "mixture": mixture,
    "lemma2": lemma2,
    "lemma2_exact": lemma2_exact,
}
NEEDS_COUNTS = ("lemma2", "lemma2_exact")


def _outside(tables: Tables, shares: np.ndarray, slots: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns η, and q of each row."""
    counts: StateActionCounts | None = tables.state_action_counts
    if counts is None:
        raise TypeError(
            "lemma2 and lemma2_exact need counts of states and actions, and the writer keeps none; build it with "
            "EventTableWriter(count_state_actions=True), or use the correction 'mixture'"
        )
    return float(shares[1:].sum()), counts.share_outside(slots)


def _weights(tables: Tables, shares: np.ndarray, slots: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Returns the weights ``inside`` ``[B]`` of rows in an event table with a share, ``1 / (1 - η)`` for others."""
    drawn, share = np.flatnonzero(shares[1:] > 0) + 1, float(shares[1:].sum())
    is_in_events = np.any(tables.position[drawn[:, None], slots] >= 0, axis=0)
    return np.where(is_in_events, inside, 1.0 / (1.0 - share) if share < 1.0 else 1.0)  # with 1 no other is drawn
