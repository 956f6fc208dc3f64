# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from rllib_ext.learner.blocks import Piece, TransitionBlock, deal, learner_order


def piece(module_id: str, places: np.ndarray) -> Piece:
    """Rows whose actions are their places in the drawn batch."""
    columns = [places, places, places, np.zeros(len(places))]
    return Piece(TransitionBlock(f"rows_{places[0]}_of_{module_id}", columns, {}, module_id=module_id), places)


def drawn(module_id: str, rows: int, singles: int, seed: int) -> list[Piece]:
    """A batch as the layout "blocks" gives it: one long piece, and a piece for each of ``singles`` rows."""
    places = np.random.default_rng(seed).permutation(rows)
    parts = np.split(places, range(rows - singles, rows))
    return [piece(module_id, part) for part in parts if len(part)]


@pytest.mark.parametrize(
    ("lengths", "num_learners", "order"),
    [
        ([6], 3, [0, 1, 2, 3, 4, 5]),
        ([2, 1, 1], 2, [0, 1, 2, 3]),
        ([1, 1, 1, 1], 2, [0, 2, 1, 3]),
        ([3, 1, 1, 1], 2, [0, 1, 2, 3, 4, 5]),
        ([1, 1, 1, 1, 1], 3, [0, 3, 4, 1, 2]),  # all that is left once the first Learner has its share goes to it
    ],
)
def test_the_order_in_which_rows_come_back(lengths: list[int], num_learners: int, order: list[int]) -> None:
    assert learner_order(lengths, num_learners).tolist() == order


@settings(max_examples=300)
@given(
    num_learners=st.integers(1, 4),
    rows=st.integers(4, 20),
    singles=st.lists(st.integers(0, 19), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_places_are_those_of_the_rows_as_they_come_back_and_no_learner_lacks_a_module(
    num_learners: int, rows: int, singles: list[int], seed: int
) -> None:
    pieces = {f"m{number}": drawn(f"m{number}", rows, min(n, rows - 1), seed) for number, n in enumerate(singles)}
    dealt, places = deal(pieces, num_learners)
    shards = list(ShardEpisodesIterator([part.episode for _, part in dealt], num_shards=num_learners))
    for module_id in pieces:
        parts = [episode for shard in shards for episode in shard if episode.module_id == module_id]
        back = np.concatenate([episode.get_actions(slice(0, len(episode))) for episode in parts])
        assert back.tolist() == places[module_id].tolist()
        assert sorted(back.tolist()) == list(range(rows))
    if num_learners > 1 and len(pieces) > 1:
        orders = {tuple(dict.fromkeys(episode.module_id for episode in shard)) for shard in shards}
        assert len(orders) == 1 and set(*orders) == set(pieces)
