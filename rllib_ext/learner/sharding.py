# SPDX-License-Identifier: Apache-2.0
"""The order in which the rows of a batch come back from the Learners it was dealt out to."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from rllib_ext.learner.blocks import Piece

Owned = tuple[str, Piece]  # a module and a piece of its rows


def deal(pieces: Mapping[str, list[Piece]], num_learners: int) -> tuple[list[Owned], dict[str, np.ndarray]]:
    """Returns pieces in the order for RLlib, and the places of each module's rows as their TD errors come back.

    RLlib sorts episodes by length, deals them out to the Learners and cuts some; the TD errors of a module come back
    Learner after Learner. With several modules the pieces are cut so that each Learner gets rows of each module, in
    the same order: Learners average gradients in the order in which they have them, of whatever module, and their
    weights would drift apart silently otherwise.

    Args:
        pieces: of each module, the longest first.
        num_learners: remote Learners; with 0 or 1 the order stays.
    """
    if num_learners > 1 and len(pieces) > 1:
        owned = _in_rounds(pieces, num_learners)
    else:
        owned = [(module, piece) for module, parts in pieces.items() for piece in parts]
    if num_learners <= 1 or len(owned) == 1:  # each module's pieces are sorted already, and one piece is cut in order
        return owned, {
            module: np.concatenate([piece.places for piece in parts]) if len(parts) > 1 else parts[0].places
            for module, parts in pieces.items()
        }
    lengths = [len(piece.places) for _, piece in owned]
    order = learner_order(lengths, num_learners)
    places = np.concatenate([piece.places for _, piece in owned])[order]
    owner = np.repeat([module for module, _ in owned], lengths)[order]
    return owned, {module: places[owner == module] for module in pieces}


def learner_order(lengths: list[int], num_learners: int) -> np.ndarray:
    """Returns the order in which the rows of episodes of these lengths come back from ``num_learners`` Learners.

    Example:
        >>> learner_order([2, 1, 1], num_learners=2).tolist()
        [0, 1, 2, 3]
        >>> learner_order([1, 1, 1, 1], num_learners=2).tolist()
        [0, 2, 1, 3]
    """
    return np.concatenate([rows for shard in dealt_rows(lengths, num_learners) for rows in shard])


def dealt_rows(lengths: list[int], num_learners: int) -> list[list[np.ndarray]]:
    """Returns for each Learner the rows of the episodes and parts of episodes it gets, int64 ``[n]`` each."""
    starts = np.cumsum([0, *lengths])
    spans = [_Span(np.arange(start, stop)) for start, stop in pairwise(starts.tolist())]
    return [[span.rows for span in shard] for shard in ShardEpisodesIterator(spans, num_shards=num_learners)]


class _Span:
    """A stand-in for an episode, by the places of its rows, so that RLlib's own sharding determines the order."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, rows: slice, *, len_lookback_buffer: int | None = None) -> _Span:
        return _Span(self.rows[rows])

    __getitem__ = slice


def _in_rounds(pieces: Mapping[str, list[Piece]], num_learners: int) -> list[Owned]:
    """Returns for each module a round of as many pieces of one length as there are Learners, then single rows.

    RLlib deals such rounds out evenly; the single rows after them may go to any Learner.
    """
    rounds: list[Owned] = []
    others: list[Owned] = []
    for module, (longest, *singles) in pieces.items():
        parts = [*_cut(longest, num_learners), *singles]
        rounds += [(module, part) for part in parts[:num_learners]]
        others += [(module, part) for part in parts[num_learners:]]
    return rounds + others


def _cut(piece: Piece, parts: int) -> list[Piece]:
    """Returns as many pieces of one length, where there are rows enough, and one row each of the rest."""
    count = len(piece.places)
    if count == 1:
        return [piece]
    size = count // parts
    bounds = [*range(0, size * parts, size or 1), *range(size * parts, count + 1)]
    return [Piece(piece.episode[start:stop], piece.places[start:stop]) for start, stop in pairwise(bounds)]
