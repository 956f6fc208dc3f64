# SPDX-License-Identifier: Apache-2.0
"""Options of a sharded replay: what is divided, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.sharded.actors import ShardActors
from lightning_replay.sharded.options import ShardOptions
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.shard import options_of_shard


def dqn(**options: Any) -> DQNConfig:
    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    return config.training(
        replay_buffer_config=rllib_ext.replay_config("prioritized", **{"capacity": 1000, "num_shards": 2, **options})
    )


def test_capacities_are_divided_and_rounded_up() -> None:
    table = EventTable("goal", condition=reward_at_least(1.0), history_length=4, capacity=10, min_size=9)
    options = {
        "capacity": 10,
        "frame_capacity": 7,
        "tables": [table],
        "memmap": "/rows",
        "min_size": 8,
        "seed": 3,
        "modules": {"pursuer": {"capacity": 4}, "evader": None},
    }
    one, other = (options_of_shard(options, 3, number) for number in (0, 2))
    assert (one["capacity"], one["frame_capacity"]) == (4, 3)
    assert (one["tables"][0].capacity, one["tables"][0].min_size, table.capacity) == (4, None, 10)
    assert (one["memmap"], other["memmap"]) == ("/rows/shard-0", "/rows/shard-2")
    assert one["modules"] == {"pursuer": {"capacity": 2}, "evader": None}
    assert "min_size" not in one and len({3, one["seed"], other["seed"]}) == 3
    whole = options_of_shard(options, 3)
    assert whole["tables"][0] is table and whole["min_size"] == 8 and whole["capacity"] == 10 and "memmap" not in whole


def test_the_driver_holds_no_rows() -> None:
    assert options_of_shard({"capacity": 10**9}, 64)["capacity"] <= 1024
    assert options_of_shard({"capacity": 10**9}, 64, 1)["capacity"] == 10**9 / 64


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"shard_timeout_s": 0}, ValueError, "shard_timeout_s is 0"),
        ({"save_timeout_s": 0}, ValueError, "save_timeout_s is 0"),
        ({"num_shards": None, "num_prefetch": 1}, ValueError, "num_prefetch is for a replay of several shards"),
        ({"num_shards": 11, "capacity": 10}, ValueError, "num_shards is 11 and capacity is 10; every shard holds"),
        ({"importance": 1.0}, ValueError, "has no option 'importance'"),
        ({"samples_per_insert": 8.0}, ValueError, "no option 'samples_per_insert'.*modules.*Ray actors num_shards, "),
        ({"num_shard": 2}, ValueError, "has no option 'num_shard'. Did you mean 'num_shards'"),
        ({"prefetch": 2}, ValueError, "has no option 'prefetch'.*num_prefetch"),
        ({"memmap": True}, TypeError, "memmap is True; it must be a directory, or None"),
        ({"layout": "rows"}, ValueError, "layout is 'rows', and Learners fetch .* Leave layout out, or num_shards"),
    ],
)
def test_refused_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        dqn(**options)


def test_no_shards_are_one_buffer() -> None:
    config = rllib_ext.replay_config("prioritized", capacity=10, num_shards=None, num_prefetch=None)
    assert config == rllib_ext.replay_config("prioritized", capacity=10)


def test_shards_without_room_are_refused_before_ray_waits(shared_ray: None) -> None:
    with pytest.raises(
        ValueError, match=r"0 Learners, 9 shards \(num_cpus_per_shard=1\) and evaluation need 9 CPUs and Ray has 8"
    ):
        rllib_ext.configure(dqn(num_shards=9))
    with pytest.raises(ValueError, match=r"num_cpus_per_shard=5, and the nodes, of 8 CPUs, have room for 1"):
        ShardedEpisodeReplayBuffer("uniform", capacity=10, num_shards=2, num_cpus_per_shard=5).start()


class Broken:
    def __init__(self, *arguments: Any) -> None:
        raise OSError("no space left on device")

    def report(self) -> None: ...


def test_shards_that_cannot_be_built_are_named_with_the_error(shared_ray: None) -> None:
    actors = ShardActors(Broken, lambda shard: (), ShardOptions(1, num_cpus_per_shard=0))
    with pytest.raises(RuntimeError, match=r"(?s)shard 0 could not be started in 3 attempts.*no space left"):
        actors.start()
    assert actors.handles == []


def test_nothing_starts_before_it_is_needed_and_the_driver_keeps_its_replay() -> None:
    replay = ShardedEpisodeReplayBuffer("prioritized", capacity=10, num_shards=2)
    assert len(replay) == 0 and replay.stats()["num_rows"] == 0 and replay.shards.handles == []
    with pytest.raises(TypeError, match="belongs to the driver that built it"):
        pickle.dumps(replay)
    with pytest.raises(ValueError, match="batch_length_T is 20: a recurrent module learns from sequences"):
        replay.sample(num_items=4, batch_length_T=20)
    with pytest.raises(ValueError, match="rows were drawn for \\[\\] since the last update"):
        replay.update_priorities(np.zeros(3), "default_policy")
    with pytest.raises(RuntimeError, match=r"not prepared for it.*rllib_ext.configure\(config\) last"):
        replay.sample(num_items=4, sample_episodes=True)  # as RLlib's algorithms call it
    replay.shards.handles = [None, None]  # as if they had started
    replay.start(object())
    with pytest.raises(ValueError, match="belongs to another algorithm"):
        replay.start(object())


def test_a_replay_that_ended_with_its_algorithm_does_not_start_again() -> None:
    replay = ShardedEpisodeReplayBuffer("prioritized", capacity=10, num_shards=2)
    replay.stop()
    with pytest.raises(RuntimeError, match="has ended with its algorithm"):
        replay.sample(num_items=4)
    assert len(replay) == 0 and replay.shards.handles == []
