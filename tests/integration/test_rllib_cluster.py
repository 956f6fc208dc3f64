# SPDX-License-Identifier: Apache-2.0
"""A cluster of several nodes on this machine: EnvRunners, Learners and shards live on other nodes than the driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

from lightning_replay.sharded.actors import Answer, ShardActors, ShardReport
from lightning_replay.sharded.options import ShardOptions
from rllib_ext.rllib_compat import values
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from tests.ray_cpus import become_free
from tests.stored import stored_rows
from tests.unit.rllib_ext.episodes import numbered

from .rllib_algorithms import Counting, EchoLearner, built, small, trained, watch_columns, watch_td_errors
from .shard_contents import homes, observations, on_shards, stored, watch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster(small_ray: None) -> Iterator[None]:
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _free_cpus(_cluster: None) -> None:
    """Shards go where CPUs are free, and none of the test before must be in use."""
    assert become_free(4)


def node_of(_: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def learner_state(learner: Any) -> Any:
    return learner.get_state(components="rl_module")["rl_module"]["default_policy"]


def nodes(algorithm: Algorithm) -> tuple[set[str], set[str]]:
    runners = algorithm.env_runner_group.foreach_env_runner(node_of, local_env_runner=False)
    learners = [result.get() for result in algorithm.learner_group.foreach_learner(node_of)]
    assert (len(runners), len(learners)) == (1, 2)
    return set(runners), set(learners)


def test_training_and_a_checkpoint_across_nodes(tmp_path: Path) -> None:
    config = small(DQNConfig, Counting, "prioritized").training(n_step=(1, 3), train_batch_size_per_learner=25)
    config.env_runners(num_env_runners=1).learners(num_learners=2, learner_class=EchoLearner)
    algorithm = built(config)
    buffer = algorithm.local_replay_buffer
    here = ray.get_runtime_context().get_node_id()
    runners, learners = nodes(algorithm)
    assert here not in runners | learners and len(runners | learners) == 2  # three actors, two CPUs on each node
    home = watch_td_errors(algorithm.local_replay_buffer.replay)
    values(algorithm.learner_group.foreach_learner(watch_columns))
    for layout in ("rows", "blocks", "flagged"):
        known = len(home)
        buffer.options.layout = layout
        result = trained(algorithm)
        assert len(home) >= known + 2 * 25 * 10 and all(home), layout
        assert len(buffer) == result["env_runners"]["num_env_steps_sampled_lifetime"] >= 80
        assert stored_rows(buffer.replay)["next", "done"].float().mean() > 0.4
        drawn = buffer.get_sampled_timesteps()
        assert result["num_updates_lifetime"] == drawn / (2 * 25) > 1
        metrics = result["replay_buffer"]
        assert metrics["num_env_steps_sampled_lifetime"] == drawn
        assert metrics["num_stale_updates_dropped_lifetime"] == 0
    for seen in values(algorithm.learner_group.foreach_learner(lambda learner: learner.columns_seen)):
        # Out of band, a remote Learner reads columns in the object store: they must not be written to.
        assert seen and not any(writeable or shared for writeable, shared in seen)
    weights = [state.get() for state in algorithm.learner_group.foreach_learner(learner_state)]
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    rows, stats = stored_rows(buffer.replay), buffer.replay.stats()
    (drawn,) = buffer.sample(num_items=40, n_step=(1, 3))
    updated = len(home)
    algorithm.train()

    algorithm.restore_from_path(path)
    assert len(buffer) == len(rows) and (stored_rows(buffer.replay) == rows).all()
    assert buffer.replay.stats()["priorities_updated"] == stats["priorities_updated"] == updated
    (block,) = buffer.sample(num_items=40, n_step=(1, 3))
    np.testing.assert_array_equal(block.get_observations(slice(0, 40)), drawn.get_observations(slice(0, 40)))
    for state in algorithm.learner_group.foreach_learner(learner_state):
        for name, array in state.get().items():
            np.testing.assert_array_equal(array, weights[0][name])
    algorithm.train()
    algorithm.stop()
    assert len(buffer) > len(rows)


class Empty:
    """A shard that holds nothing, which starts in less time than one of RLlib."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def report(self) -> Answer:
        return Answer(None, ShardReport())


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def nodes_of_shards(shards: ShardActors) -> list[str]:
    return ray.get([handle.__ray_call__.remote(node_of) for handle in shards.handles])


def placed(nodes: list[str], **options: Any) -> list[str]:
    """Where shards are if they are to be on these nodes."""
    shards = ShardActors(Empty, lambda shard: (), ShardOptions(**options))
    shards.start(nodes)
    found = nodes_of_shards(shards)
    shards.stop()
    return found


def test_shards_are_spread_or_packed_as_far_as_there_is_room() -> None:
    here = ray.get_runtime_context().get_node_id()
    first, other = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
    assert set(placed([], num_shards=4, num_cpus_per_shard=0.5)) == {first, other}
    assert placed([first], num_shards=4, num_cpus_per_shard=0) == [first] * 4
    assert placed([other, first], num_shards=4, num_cpus_per_shard=0) == [other, first] * 2
    assert sorted(placed([first], num_shards=3, num_cpus_per_shard=1)) == sorted([first, first, other])


def test_shards_are_packed_on_the_node_of_the_learner(tmp_path: Path) -> None:
    options = {"num_shards": 2, "shard_placement": "pack", "num_cpus_per_shard": 0, "num_prefetch": 1}
    config = small(DQNConfig, Counting, "prioritized", **options).training(train_batch_size_per_learner=32)
    config.env_runners(num_env_runners=1).learners(num_learners=1, learner_class=EchoLearner)
    algorithm = built(config)
    replay = algorithm.local_replay_buffer
    (learner,) = values(algorithm.learner_group.foreach_learner(node_of))
    assert nodes_of_shards(replay.shards) == [learner] * 2
    on_shards(replay, watch)
    result = trained(algorithm)
    assert replay.stats()["num_rows"] == result["env_runners"]["num_env_steps_sampled_lifetime"] >= 80
    home = [one for part in on_shards(replay, homes) for one in part]
    assert len(home) >= 10 * 32 and all(home)
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    rows = on_shards(replay, stored)
    algorithm.train()
    algorithm.restore_from_path(path)
    assert on_shards(replay, stored) == rows
    algorithm.stop()


def test_a_shard_with_files_starts_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_shards": 2, "memmap": str(tmp_path), "seed": 0, "priority_exponent": 0.7}
    replay = ShardedEpisodeReplayBuffer("prioritized", capacity=200, **options)
    replay.add([numbered(f"e{number}", 6, offset=100.0 * number, terminated=True) for number in range(8)])
    assert len(set(nodes_of_shards(replay.shards))) == 2
    replay.sample(num_items=40)
    before = on_shards(replay, stored)
    assert [len(steps) for steps, _, _ in before] == [24, 24]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-0", "shard-1"]
    ray.kill(replay.shards.handles[1])
    while replay.shards.epochs[1] == 1 or not all(replay.shards.alive):
        replay.shards.send(1, "report")
        replay.shards.settle()
        replay.shards.wait_for_starts()
    stats = replay.stats()
    assert stats["rows"] == [24, 0] and stats["rows_lost"] == 24
    replay.add([numbered(f"n{number}", 6, offset=5000.0 + 100.0 * number, terminated=True) for number in range(8)])
    drawn = set(observations(replay.sample(num_items=400)).astype(int).tolist())
    after = on_shards(replay, stored)
    assert after[0][0][:24] == before[0][0]  # what the other holds has not been touched
    assert len(after[1][0]) == 24 and min(after[1][0]) >= 5000
    assert drawn & set(after[1][0]) and drawn <= {*after[0][0], *after[1][0]}
    replay.stop()
