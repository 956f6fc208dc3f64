# SPDX-License-Identifier: Apache-2.0
"""The order in which the rows of a batch come back from the Learners it was dealt out to."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from rllib_ext.draws import Piece

Owned = tuple[str, Piece]  # a module and a piece of its rows


def deal(pieces: Mapping[str, list[Piece]], num_learners: int) -> tuple[list[Owned], dict[str, np.ndarray]]:
    """Pieces in the order to hand them to RLlib, and the places of each module's rows as their TD errors come back.

    RLlib sorts episodes by length, deals them out to the Learners and cuts some; the TD errors of a module come back
    Learner after Learner. Where there are several modules every long piece is first cut in as many as there are
    Learners, so that each Learner gets rows of each module.

    Args:
        pieces: of each module, the longest first.
        num_learners: remote Learners; with 0 or 1 the order stays.

    Returns:
        The pieces with their modules, and for each module int64 ``[B]``.
    """
    owned = [(module, piece) for module, parts in pieces.items() for piece in parts]
    if num_learners > 1 and len(pieces) > 1:
        owned = [(module, part) for module, piece in owned for part in _cut(piece, num_learners)]
    if num_learners <= 1 or len(owned) == 1:  # each module's pieces are sorted already, and one piece is cut in order
        return owned, {
            module: np.concatenate([piece.places for piece in parts]) if len(parts) > 1 else parts[0].places
            for module, parts in pieces.items()
        }
    order = learner_order([len(piece.places) for _, piece in owned], num_learners)
    lengths = [len(piece.places) for _, piece in owned]
    places = np.concatenate([piece.places for _, piece in owned])[order]
    owner = np.repeat([module for module, _ in owned], lengths)[order]
    return owned, {module: places[owner == module] for module in pieces}


def learner_order(lengths: list[int], num_learners: int) -> np.ndarray:
    """The order in which the rows of episodes of these lengths come back from ``num_learners`` Learners.

    The iterator of RLlib that deals is asked itself, with stand-ins, so the order is right by construction.

    Example:
        >>> learner_order([2, 1, 1], num_learners=2).tolist()
        [0, 1, 2, 3]
        >>> learner_order([1, 1, 1, 1], num_learners=2).tolist()
        [0, 2, 1, 3]
    """
    starts = np.cumsum([0, *lengths])
    spans = [_Span(np.arange(start, stop)) for start, stop in pairwise(starts.tolist())]
    shards = ShardEpisodesIterator(spans, num_shards=num_learners)
    return np.concatenate([span.rows for shard in shards for span in shard])


class _Span:
    """Stands for an episode where RLlib shards: only its length and where its rows lie."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> _Span:
        return _Span(self.rows[rows])

    def slice(self, rows: slice, *, len_lookback_buffer: int | None = None) -> _Span:
        return self[rows]


def _cut(piece: Piece, parts: int) -> list[Piece]:
    """As many pieces of one length, which are dealt out in turns, and one row each of what remains."""
    size = len(piece.places) // parts
    if size == 0:
        return [piece]
    bounds = [*range(0, size * parts + 1, size), *range(size * parts + 1, len(piece.places) + 1)]
    return [Piece(piece.episode[start:stop], piece.places[start:stop]) for start, stop in pairwise(bounds)]
