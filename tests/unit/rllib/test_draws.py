# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator
from tensordict import TensorDict

from rllib_ext.columns import Columns
from rllib_ext.draws import LAYOUTS, DrawnRows, learner_order

from .episodes import column


def drawn(terminated: list[int], truncated: list[int], count: int = 6, **extra: torch.Tensor) -> DrawnRows:
    number = torch.arange(count)
    ends = torch.zeros(2, count, 1, dtype=torch.bool)
    ends[0, terminated], ends[1, truncated] = True, True
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
    return DrawnRows(batch, observation, Columns("action", np.zeros(1, np.int64)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("terminated", "truncated"), [([], []), ([2], []), ([], [5]), ([0, 3], [3, 5]), (range(6), [])]
)
def test_every_row_travels_once_with_its_own_end(layout: str, terminated: list[int], truncated: list[int]) -> None:
    episodes, order = LAYOUTS[layout](drawn(list(terminated), list(truncated)))
    order = np.arange(6) if order is None else order
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


def test_weights_and_steps_are_columns() -> None:
    rows = drawn([1], [], priority_weight=torch.arange(6) / 6, steps_to_next_obs=torch.arange(6).view(-1, 1))
    for layout in LAYOUTS.values():
        episodes, order = layout(rows)
        order = np.arange(6) if order is None else order
        np.testing.assert_allclose(column(episodes, "get_extra_model_outputs", "weights"), order / 6, rtol=1e-6)
        np.testing.assert_array_equal(column(episodes, "get_extra_model_outputs", "n_step"), order)
    assert rows.mean_n_step == 2.5


def test_without_them_rows_weigh_one_and_take_one_step() -> None:
    (block,), _ = drawn([], []).blocks()
    assert block.get_extra_model_outputs("weights", slice(0, 6)).tolist() == [1.0] * 6
    assert block.get_extra_model_outputs("n_step", slice(0, 6)).tolist() == [1] * 6


def test_one_done_row_ends_the_long_block() -> None:
    #  rows   0 1 2 3 4 5     done: 1 and 4
    #  blocks 0 2 3 5 1 | 4
    (long, short), order = drawn([1], [4]).blocks()
    assert order.tolist() == [0, 2, 3, 5, 1, 4]
    assert (len(long), long.is_terminated, len(short), short.is_truncated) == (5, True, 1, True)


@pytest.mark.parametrize("num_learners", [1, 2, 3])
@pytest.mark.parametrize("done", [0, 1, 2, 5, 9, 12])
def test_learner_order_is_that_of_the_real_shards(num_learners: int, done: int) -> None:
    episodes, order = drawn(list(range(done)), [], count=12).blocks()
    order = np.arange(12) if order is None else order
    dealt = learner_order([len(episode) for episode in episodes], num_learners)
    shards = ShardEpisodesIterator(episodes, num_shards=num_learners)
    returned = np.concatenate([column(shard, "get_actions") for shard in shards])
    np.testing.assert_array_equal(order[dealt], returned)
    if num_learners == 1:
        assert dealt.tolist() == list(range(12))
