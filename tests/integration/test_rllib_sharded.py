# SPDX-License-Identifier: Apache-2.0
"""A replay divided over two actors: one algorithm of two Learners goes through training, saves and losses."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

from rllib_ext.learner.remote_blocks import BlockReader
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.routing import EpisodeReference
from tests.unit.rllib_ext.episodes import numbered
from tests.unit.rllib_ext.local_shards import awaited

from .rllib_algorithms import Counting, EchoLearner, built, small, trained
from .shard_contents import homes, lose, observations, on_shards, stored, watch

pytestmark = pytest.mark.slow

BATCH = 50


@pytest.fixture(scope="module")
def algorithm(shared_ray: None) -> Iterator[Algorithm]:
    config = small(DQNConfig, Counting, "prioritized", num_shards=2, priority_exponent=0.7, seed=3)
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=2)
    config.learners(num_learners=2, learner_class=EchoLearner).training(train_batch_size_per_learner=BATCH // 2)
    algorithm = built(config)
    yield algorithm
    algorithm.stop()


@pytest.fixture
def replay(algorithm: Algorithm) -> ShardedEpisodeReplayBuffer:
    return algorithm.local_replay_buffer


def test_training_moves_references_alone_and_every_step_is_in_one_shard(
    algorithm: Algorithm, replay: ShardedEpisodeReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = set()
    add = replay.add
    monkeypatch.setattr(replay, "add", lambda episodes: (kinds.update(map(type, episodes)), add(episodes)))
    result = trained(algorithm)
    assert kinds == {EpisodeReference}
    stats = replay.stats()
    sampled = result["env_runners"]["num_env_steps_sampled_lifetime"]
    assert stats["num_shards"] == 2 and stats["num_rows"] == len(replay) == sum(stats["rows"]) == sampled >= 80
    assert stats["alive"] == [True, True] and stats["epochs"] == [1, 1] and stats["bytes"] > 0
    assert max(stats["rows"]) - min(stats["rows"]) <= 4
    assert result["env_runners"]["episode_return_mean"] == 2.0  # metrics have the episodes themselves
    assert result["replay_buffer"]["num_env_steps_added_lifetime"] == sampled
    assert result["replay_buffer"]["num_env_steps_stored"] == sampled
    assert result["replay_buffer"]["shards"]["num_alive"] == 2
    parts = on_shards(replay, stored)
    episodes = [{step // 3 for step in steps} for steps, _, _ in parts]  # two environments count alike
    assert all(episodes)
    for steps, trajectories, _ in parts:
        for step, trajectory, following, same in zip(steps, trajectories, steps[1:], trajectories[1:], strict=False):
            assert (trajectory != same) or following == step + 1


def test_td_errors_come_home_from_two_learners(algorithm: Algorithm, replay: ShardedEpisodeReplayBuffer) -> None:
    on_shards(replay, watch)
    algorithm.train()
    replay.stats()
    found = on_shards(replay, homes)
    assert all(found) and all(map(all, found)) and sum(map(len, found)) >= 10 * BATCH
    assert sum(map(len, found)) % BATCH == 0


def wait_for_answers(replay: ShardedEpisodeReplayBuffer) -> None:
    """A draw may have been sent before the rows; it takes the answers that have come until then."""
    answers = [call.answer for calls in replay.shards._pending for call in calls]
    assert len(ray.wait(answers, num_returns=len(answers), timeout=60)[0]) == len(answers)


def test_an_error_inside_a_shard_is_raised_at_the_next_draw(replay: ShardedEpisodeReplayBuffer) -> None:

    rows = len(replay)
    wrong = numbered("wrong", 1, observations=[np.zeros(7)] * 2, terminated=True)
    replay.add([wrong])
    wait_for_answers(replay)
    with pytest.raises(ValueError, match="observation") as error:
        replay.sample(num_items=BATCH)
    assert not hasattr(error.value, "__notes__")
    for shard in range(2):
        replay.shards.send(shard, "add", [ray.put([wrong])], {}, {})
    wait_for_answers(replay)
    with pytest.raises(ValueError, match="observation") as error:
        replay.sample(num_items=BATCH)
    (note,) = error.value.__notes__
    assert "Another shard has raised" in note and "observation" in note
    assert len(replay) == rows and len(observations(replay.sample(num_items=BATCH))) == BATCH


def test_a_checkpoint_restores_rows_and_the_next_draws(algorithm: Any, replay: Any, tmp_path: Path) -> None:
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    before, drawn = on_shards(replay, stored), [observations(replay.sample(num_items=BATCH)) for _ in range(2)]
    saved, replay.shards.last_save = replay.shards.last_save, None
    algorithm.train()
    assert on_shards(replay, stored) != before
    algorithm.restore_from_path(path)
    assert on_shards(replay, stored) == before and replay.shards.last_save == saved
    for expected in drawn:
        np.testing.assert_array_equal(observations(replay.sample(num_items=BATCH)), expected)
    manifests = {file.parent.name for file in Path(path).rglob("buffer.json")}
    assert manifests == {"shard-0", "shard-1"} and (Path(path) / "replay_buffer" / "shards.json").is_file()
    result = algorithm.train()
    assert result["replay_buffer"]["num_env_steps_stored"] == len(replay)


def test_a_lost_shard_starts_again_and_training_goes_on(algorithm: Any, replay: Any, caplog: Any) -> None:
    stats, before = replay.stats(), on_shards(replay, stored)
    blocks = replay.sample(num_items=BATCH)
    from_lost = int((awaited(replay).shard == 1).sum())
    assert 0 < from_lost < BATCH
    lose(replay.shards.handles[1])
    reader = BlockReader()
    for _ in range(120):  # until Ray has noticed that the owner of the rows is gone
        lost_rows = list(blocks)
        reader.read(lost_rows)
        if reader.num_lost:
            break
        time.sleep(0.5)
    weights = np.concatenate([one.get_extra_model_outputs("weights", slice(0, len(one))) for one in lost_rows])
    assert (weights == 0).sum() == reader.num_lost == from_lost and len(weights) == BATCH
    replay.update_priorities(np.ones(BATCH), "default_policy")
    for _ in range(40):
        result = algorithm.train()
        if all(replay.shards.alive) and replay.shards.reports[1].rows:
            break
    again = replay.stats()
    assert again["epochs"] == [1, 2] and again["alive"] == [True, True]
    # and at most the steps that were sent until the driver noticed
    assert again["rows_lost"] >= stats["rows"][1] and again["td_errors_dropped"] >= from_lost
    assert f"shard 1 was lost with {again['rows_lost']} rows" in caplog.text
    assert result["replay_buffer"]["shards"]["rows_lost"] == again["rows_lost"]
    kept, new = on_shards(replay, stored)
    assert kept[0][: len(before[0][0])] == before[0][0] and new[0]
    assert again["num_rows"] + again["rows_lost"] == result["env_runners"]["num_env_steps_sampled_lifetime"]


def test_a_lost_shard_starts_empty_where_its_last_save_was_deleted(
    algorithm: Algorithm, replay: ShardedEpisodeReplayBuffer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay.shards.options = dataclasses.replace(replay.shards.options, restart_shards="last_save")
    shutil.rmtree(algorithm.save_to_path(tmp_path / "checkpoint"))
    before = on_shards(replay, stored)
    ray.kill(replay.shards.handles[0])
    for _ in range(40):  # a draw notices the loss
        replay.sample(num_items=BATCH)
        if replay.shards.epochs[0] == 3 and all(replay.shards.alive):
            break
        replay.shards.wait_for_starts()
    assert on_shards(replay, stored) == [([], [], []), before[1]]
    assert "shard 0 could not be started with its save" in caplog.text and "starts empty" in caplog.text
    algorithm.train()
    assert replay.shards.epochs.tolist() == [3, 2] and all(replay.stats()["rows"])
