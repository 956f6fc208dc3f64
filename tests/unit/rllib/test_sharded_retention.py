# SPDX-License-Identifier: Apache-2.0
"""Rows that shards keep by surprise and action values of Learners: those that one buffer keeps of the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.shard import options_of_shard

from .episodes import numbered
from .local_shards import first_numbers, read, replays

OPTIONS = {"capacity": 40, "seed": 0}
EPISODES, LENGTH = 16, 7


pytestmark = pytest.mark.usefixtures("local_shards")


def signals(observation: np.ndarray) -> np.ndarray:
    """Equal TD errors, and of each row a surprise and values of two actions of its own, ``[B, 4]``."""
    noise = np.random.default_rng(7).random((2000, 3))[observation.astype(np.int64)]
    return np.column_stack((np.ones(len(observation)), 100.0 * noise[:, 0], noise[:, 1:]))


def learn(replay: Any, read_blocks: Any) -> None:
    """Draws every row, and returns what a Learner computes of it."""
    (block,) = read_blocks(replay.sample(num_items=600))
    replay.update_priorities(signals(first_numbers(block)), "default_policy")


def kept(replay: Any) -> list[float]:
    return sorted(replay.storage.get(slice(0, len(replay)))["observation"][:, 0].tolist())


def test_shards_keep_the_rows_that_one_buffer_keeps_of_the_same_steps() -> None:
    sharded = ShardedEpisodeReplayBuffer("surprise_retention", num_shards=2, **OPTIONS)
    single = [
        RecipeEpisodeReplayBuffer("surprise_retention", layout="flagged", **options_of_shard(OPTIONS, 2, one))
        for one in range(2)
    ]
    for buffer in (sharded, *single):
        buffer.form_returns(1, 0.99)
    newest: list[list[float]] = [[], []]
    for number in range(EPISODES):
        episode = numbered(f"e{number}", LENGTH, offset=100.0 * number, terminated=True)
        sharded.add([episode])
        learn(sharded, read)
        single[number % 2].add([episode])
        learn(single[number % 2], list)
        newest[number % 2] += [100.0 * number + step for step in range(LENGTH)]
    for shard, buffer, of_stream in zip(replays(sharded), single, newest, strict=True):
        assert kept(shard) == kept(buffer.replay) and len(shard) == 20
        assert kept(shard) != of_stream[-20:]
        stored = shard.storage.get(slice(0, 20))["observation"][:, 0].numpy()
        every = signals(np.array(of_stream))[:, 1]
        assert signals(stored)[:, 1].mean() > 1.3 * every.mean()
