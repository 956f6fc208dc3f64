# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator
from tensordict import TensorDict

from lightning_replay.sharded.rows import Block
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.episodes import Columns
from rllib_ext.learner.blocks import LAYOUTS, BatchCutter, Piece, TransitionBlock, learner_order
from rllib_ext.learner.remote_blocks import RemoteBlock
from tests.unit.rllib_ext.episodes import column, numbered


@pytest.fixture
def block() -> TransitionBlock:
    return TransitionBlock(
        "rows_0",
        [
            {"arm": np.arange(4.0), "goal": (np.arange(4),)},
            {"arm": np.arange(4.0) + 10, "goal": (np.arange(4) + 10,)},
            np.arange(4) + 20,
            np.arange(4.0) + 30,
        ],
        {"weights": np.arange(4.0) + 40},
        terminated=True,
    )


def test_columns_are_answered_as_the_connectors_ask(block: TransitionBlock) -> None:
    assert isinstance(block, SingleAgentEpisode)
    assert len(block) == block.env_steps() == block.agent_steps() == 4
    assert block.get_observations(slice(0, 4))["arm"].tolist() == [0, 1, 2, 3]
    assert block.get_observations(slice(1, 5))["goal"][0].tolist() == [10, 11, 12, 13]
    assert block.get_actions(slice(0, 4)).tolist() == [20, 21, 22, 23]
    assert block.get_rewards(slice(0, 4)).tolist() == [30, 31, 32, 33]
    assert block.get_extra_model_outputs(key="weights", indices=slice(0, 4)).tolist() == [40, 41, 42, 43]
    assert block.get_infos(slice(0, 4)) == [{}] * 4
    assert (block.is_terminated, block.is_truncated, block.is_done, block.is_numpy) == (True, False, True, True)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda block: block.get_observations(),
        lambda block: block.get_observations(0),
        lambda block: block.get_observations(-1),
        lambda block: block.get_observations([0, 1]),
        lambda block: block.get_observations(slice(0, 5)),
        lambda block: block.get_observations(slice(-2, 4), neg_index_as_lookback=True),
        lambda block: block.get_observations(slice(0, 4), fill=0.0),
        lambda block: block.get_actions(slice(0, 2)),
        lambda block: block.get_rewards(slice(1, 4)),
        lambda block: block.get_extra_model_outputs("weights"),
        lambda block: block.get_return(),
        lambda block: block.get_state(),
        lambda block: block.rewards,
        lambda block: block.set_rewards(new_data=np.zeros(4)),
        lambda block: block[::2],
    ],
)
def test_everything_that_means_steps_in_a_row_is_refused(block: TransitionBlock, request_of: Any) -> None:
    with pytest.raises(ValueError, match=r"4 rows that do not follow each other in time.*layout=\"rows\""):
        request_of(block)


def test_a_slice_keeps_the_end_only_with_the_last_row(block: TransitionBlock) -> None:
    first, second = block[:3], block.slice(slice(3, None), len_lookback_buffer=1)
    assert (len(first), first.is_done, len(second), second.is_terminated) == (3, False, 1, True)
    assert first.get_observations(slice(1, 4))["arm"].tolist() == [10, 11, 12]
    assert second.get_observations(slice(0, 1))["goal"][0].tolist() == [3]
    assert second.get_extra_model_outputs("weights", slice(0, 1)).tolist() == [43]
    assert len({block.id_, first.id_, second.id_}) == 3 and all("_" in part.id_ for part in (first, second))


@pytest.mark.parametrize("layout", ["flagged", "blocks"])
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_no_row_of_a_drawn_batch_is_pickled_in_band(layout: str, recipe: str) -> None:
    """Drawn columns are views of packed rows; in band are names, dtypes and shapes, whatever the number of rows."""
    buffer = RecipeEpisodeReplayBuffer(recipe, capacity=1000, layout=layout, seed=0)
    buffer.add(numbered("a", 900))
    in_band = []
    for count in (8, 512):
        (block,) = buffer.sample(num_items=count, n_step=1)
        assert not block.get_observations(slice(0, count)).flags.c_contiguous
        buffers: list[pickle.PickleBuffer] = []
        in_band.append(len(cloudpickle.dumps(block, protocol=5, buffer_callback=buffers.append)))
        columns = 6 if layout == "blocks" else 8
        row = 2 * 8 + 8 + 4 + 4 + 8 + (2 if layout == "flagged" else 0)
        assert len(buffers) == columns and sum(len(one.raw()) for one in buffers) == count * row
    assert abs(in_band[0] - in_band[1]) < 32 and in_band[1] < 1200


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


def remote(lengths: list[int]) -> RemoteBlock:
    """Parts ``a``, ``b``, ...; weights are the places of the rows."""
    spans: list[Any] = [Block(chr(97 + part), 10, 10 + length) for part, length in enumerate(lengths)]  # type: ignore[arg-type]
    return RemoteBlock("rows_of_batch", spans, np.arange(sum(lengths), dtype=np.float32), "m")


def rows(one: RemoteBlock) -> list[tuple[Any, int]]:
    return [(reference, row) for reference, start, stop in one.spans for row in range(start, stop)]


def test_a_slice_names_the_rows_of_each_part() -> None:
    part = remote([3, 1, 4])[2:6]
    assert part.spans == [("a", 12, 13), ("b", 10, 11), ("c", 10, 12)]
    assert part.weights.tolist() == [2, 3, 4, 5] and len(part) == 4 and part.module_id == "m"
    assert part[1:2].spans == [("b", 10, 11)] and part.id_ != remote([1]).id_


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), num_learners=st.integers(1, 5))
def test_learners_get_every_row_once_in_order(lengths: list[int], num_learners: int) -> None:
    whole = remote(lengths)
    if len(whole) < num_learners:
        return
    parts = [part for shard in ShardEpisodesIterator([whole], num_shards=num_learners) for part in shard]
    assert [row for part in parts for row in rows(part)] == rows(whole)
    assert np.concatenate([part.weights for part in parts]).tolist() == whole.weights.tolist()
    assert all(len(rows(part)) == len(part) for part in parts)
