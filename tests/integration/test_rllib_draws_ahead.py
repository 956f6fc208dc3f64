# SPDX-License-Identifier: Apache-2.0
"""Ape-X on two shards with two draws in flight: nothing waits for what was sent later, and no TD error goes astray."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rllib_ext.apex import ApexDQN, ApexDQNConfig
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from tests.unit.rllib_ext.local_shards import awaited

from .rllib_algorithms import Counting, EchoLearner, built, small, trained
from .shard_contents import homes, observations, on_shards, watch

pytestmark = pytest.mark.slow

BATCH = 16


@pytest.fixture(scope="module")
def algorithm(shared_ray: None) -> Iterator[ApexDQN]:
    config = small(ApexDQNConfig, Counting, "prioritized", num_shards=2, num_prefetch=2, priority_exponent=0.7, seed=3)
    config.env_runners(num_env_runners=1, rollout_fragment_length=10).learners(learner_class=EchoLearner)
    config.training(n_step=1, samples_per_insert=4.0, broadcast_interval=1)
    algorithm = built(config)
    yield algorithm
    algorithm.stop()


@pytest.fixture
def replay(algorithm: ApexDQN) -> ShardedEpisodeReplayBuffer:
    return algorithm.local_replay_buffer


def test_training_holds_the_ratio_and_td_errors_come_home(algorithm: Any, replay: Any) -> None:
    algorithm.train()
    assert len(replay.draws.in_flight) == 2
    replay.stats()
    on_shards(replay, watch)
    before = replay.get_sampled_timesteps()
    result = trained(algorithm)
    stats = replay.stats()
    found = [one for part in on_shards(replay, homes) for one in part]
    assert len(found) == replay.get_sampled_timesteps() - before >= 10 * BATCH and all(found)
    counts = result["rate_limiter"]
    assert counts["num_rows_sampled_lifetime"] == replay.get_sampled_timesteps()
    assert abs(counts["balance"]) <= algorithm.rate_limiter.error_buffer
    # Steps that filled the buffer are counted to the step, although its length is not waited for later.
    inserted = counts["num_rows_inserted_lifetime"]
    assert counts["num_rows_sampled_lifetime"] == 4 * (inserted - 40) - counts["balance"]
    assert stats["num_rows"] == inserted == len(replay) and stats["draws_in_flight"] == 2


def test_draws_in_flight_wait_for_nothing_that_was_sent_later(replay: Any, tmp_path: Path, caplog: Any) -> None:
    done, later = tmp_path / "done", tmp_path / "later"

    def hang(shard: Any, until: Path) -> None:
        while not until.exists():
            time.sleep(0.05)

    options = replay.shards.options
    replay.sample(num_items=BATCH)
    replay.shards.settle()  # both draws in flight have been answered
    rows = len(replay)
    replay.shards.options = dataclasses.replace(options, shard_timeout_s=2.0)
    hanging = replay.shards.handles[1].__ray_call__.remote(hang, done)
    replay.shards.send(1, "report")  # as the steps and TD errors of a training step would be
    for _ in range(2):
        assert len(observations(replay.sample(num_items=BATCH))) == BATCH
        assert len(replay) == rows and replay.get_num_timesteps("default_policy") == rows
    assert replay.shards.alive == [True, True] and len(replay.draws.in_flight) == 2
    replay.sample(num_items=BATCH)  # sent after it: the shard is late
    assert replay.shards.alive == [True, False] and set(awaited(replay).shard) == {0}
    assert "shard 1 has not answered for 2 s" in caplog.text
    # It comes back once it has answered what it was late with, although it has got other calls since.
    replay.shards.handles[1].__ray_call__.remote(hang, later)
    replay.shards.send(1, "report")
    done.touch()
    ray.get(hanging)
    for _ in range(200):
        replay.shards.settle({})
        if all(replay.shards.alive):
            break
        time.sleep(0.05)
    assert replay.shards.alive == [True, True]
    later.touch()
    replay.shards.options = options
    for _ in range(4):
        replay.sample(num_items=BATCH)
    assert set(awaited(replay).shard) == {0, 1}
