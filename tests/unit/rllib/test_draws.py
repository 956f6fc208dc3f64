# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator
from tensordict import TensorDict

from rllib_ext.episodes import Columns
from rllib_ext.learner.blocks import LAYOUTS, BatchCutter, Piece, deal, learner_order

from .episodes import column


def drawn(
    terminated: list[int], truncated: list[int], count: int = 6, module_id: str | None = None, **extra: torch.Tensor
) -> BatchCutter:
    number = torch.arange(count)
    ends = torch.zeros(2, count, 1, dtype=torch.bool)
    for flags, rows in zip(ends, (terminated, truncated), strict=True):
        flags[[row for row in rows if row < count]] = True
    batch = TensorDict(
        {
            "observation": {"a": number.float(), "b": {"0": number.view(-1, 1)}},
            "action": number,
            "next": {
                "observation": {"a": number + 100.0, "b": {"0": number.view(-1, 1) + 100}},
                "reward": number.view(-1, 1).float(),
                "terminated": ends[0],
                "truncated": ends[1],
            },
            **extra,
        },
        [count],
    )
    observation = Columns("observation", {"a": np.zeros(1, np.float32), "b": (np.zeros((1, 1), np.int64),)})
    return BatchCutter(batch, observation, Columns("action", np.zeros(1, np.int64)), module_id)


def apart(pieces: list[Piece]) -> tuple[list[Any], np.ndarray]:
    """Episodes, and the places of all their rows."""
    return [piece.episode for piece in pieces], np.concatenate([piece.places for piece in pieces])


@pytest.mark.parametrize("layout", ["blocks", "rows"])
@pytest.mark.parametrize(
    ("terminated", "truncated"), [([], []), ([2], []), ([], [5]), ([0, 3], [3, 5]), (range(6), [])]
)
def test_every_row_travels_once_with_its_own_end(layout: str, terminated: list[int], truncated: list[int]) -> None:
    episodes, order = apart(LAYOUTS[layout](drawn(list(terminated), list(truncated))))
    assert sorted(order.tolist()) == list(range(6))
    np.testing.assert_array_equal(column(episodes, "get_actions"), order)
    np.testing.assert_array_equal(column(episodes, "get_rewards"), order)
    ends = [[False] * (len(episode) - 1) + [episode.is_terminated] for episode in episodes]
    assert np.flatnonzero(np.concatenate(ends)[np.argsort(order)]).tolist() == list(terminated)
    ends = [[False] * (len(episode) - 1) + [episode.is_truncated] for episode in episodes]
    assert np.flatnonzero(np.concatenate(ends)[np.argsort(order)]).tolist() == list(truncated)
    episodes = [episode.to_numpy() for episode in episodes]
    following = np.concatenate([e.get_observations(slice(1, len(e) + 1))["b"][0][:, 0] for e in episodes])
    np.testing.assert_array_equal(following, order + 100)
    assert len({episode.id_ for episode in episodes}) == len(episodes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_learners", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", [(12, 12), (12, 7, 1), (5,)])
def test_places_of_each_module_are_those_the_learners_return(
    layout: str, num_learners: int, counts: tuple[int, ...]
) -> None:
    pieces = {
        f"module{number}": LAYOUTS[layout](drawn([0, 2, 4], [1], count, module_id=f"module{number}"))
        for number, count in enumerate(counts)
    }
    dealt, places = deal(pieces, num_learners)
    shards = ShardEpisodesIterator([piece.episode for _, piece in dealt], num_shards=max(num_learners, 1))
    if num_learners == 0:
        shards = [[piece.episode for _, piece in dealt]]
    shards = [[part.to_numpy() for part in shard] for shard in shards]
    for name, expected in places.items():
        of_module = [[part for part in shard if part.module_id == name] for shard in shards]
        returned = np.concatenate([column(parts, "get_actions") for parts in of_module if parts])
        np.testing.assert_array_equal(returned, expected)
        assert sorted(expected.tolist()) == list(range(len(expected)))
        if len(expected) >= 12:  # every Learner gets its share of every module
            assert min(sum(map(len, parts)) for parts in of_module) >= len(expected) // max(num_learners, 1) - 2


def test_a_flagged_block_has_every_row_and_refuses_to_be_an_episode() -> None:
    ((block, places),) = drawn([0, 3], [3, 5]).flagged()
    assert places.tolist() == list(range(6))
    assert block.ends[0].tolist() == [True, False, False, True, False, False]
    assert block[2:4].ends[1].tolist() == [False, True]
    with pytest.raises(ValueError, match="is_terminated was read from FlaggedBlock.*rllib_ext.configure"):
        _ = block.is_terminated


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
