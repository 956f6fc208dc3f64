# SPDX-License-Identifier: Apache-2.0
"""A cluster of several nodes on this machine: EnvRunners and Learners live on other nodes than the buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext
from rllib_ext.rllib_compat import values

from .rllib_algorithms import Counting, EchoLearner, small, trained, watch_columns, watch_td_errors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster(forked_ray_workers: None) -> Iterator[None]:
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield
    ray.shutdown()
    cluster.shutdown()


def node_of(_: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def learner_state(learner: Any) -> Any:
    return learner.get_state(components="rl_module")["rl_module"]["default_policy"]


def nodes(algorithm: Algorithm) -> tuple[set[str], set[str]]:
    """Where EnvRunners and Learners run."""
    runners = algorithm.env_runner_group.foreach_env_runner(node_of, local_env_runner=False)
    learners = [result.get() for result in algorithm.learner_group.foreach_learner(node_of)]
    assert (len(runners), len(learners)) == (1, 2)
    return set(runners), set(learners)


def test_training_and_a_checkpoint_across_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(DQNConfig, Counting, "prioritized").training(n_step=(1, 3), train_batch_size_per_learner=25)
    config.env_runners(num_env_runners=1).learners(num_learners=2, learner_class=EchoLearner)
    algorithm = rllib_ext.configure(config).build_algo()
    buffer = algorithm.local_replay_buffer
    here = ray.get_runtime_context().get_node_id()
    runners, learners = nodes(algorithm)
    assert here not in runners | learners and len(runners | learners) == 2  # three actors, two CPUs on each node
    home = watch_td_errors(algorithm, monkeypatch)
    values(algorithm.learner_group.foreach_learner(watch_columns))
    for layout in ("rows", "blocks", "flagged"):
        known = len(home)
        buffer.use_layout(layout)
        result = trained(algorithm)
        assert len(home) >= known + 2 * 25 * 10 and all(home), layout
        assert len(buffer) == result["env_runners"]["num_env_steps_sampled_lifetime"] >= 80
        assert buffer.replay.storage.get(slice(0, len(buffer)))["next", "done"].float().mean() > 0.4
        drawn = buffer.get_sampled_timesteps()
        assert result["num_updates_lifetime"] == drawn / (2 * 25) > 1
        metrics = result["replay_buffer"]
        assert metrics["num_env_steps_sampled_lifetime"] == drawn
        assert metrics["num_late_updates_dropped_lifetime"] == 0
    for seen in values(algorithm.learner_group.foreach_learner(lambda learner: learner.columns_seen)):
        # Out of band, a remote Learner reads columns in the object store: they must not be written to.
        assert seen and not any(writeable or shared for writeable, shared in seen)
    weights = [state.get() for state in algorithm.learner_group.foreach_learner(learner_state)]
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    rows, stats = buffer.replay.storage.get(slice(0, len(buffer))), buffer.replay.stats()
    (drawn,) = buffer.sample(num_items=40, n_step=(1, 3))
    updated = len(home)
    algorithm.train()

    algorithm.restore_from_path(path)
    assert len(buffer) == len(rows) and (buffer.replay.storage.get(slice(0, len(buffer))) == rows).all()
    assert buffer.replay.stats()["priorities_updated"] == stats["priorities_updated"] == updated
    (block,) = buffer.sample(num_items=40, n_step=(1, 3))
    np.testing.assert_array_equal(block.get_observations(slice(0, 40)), drawn.get_observations(slice(0, 40)))
    for state in algorithm.learner_group.foreach_learner(learner_state):
        for name, array in state.get().items():
            np.testing.assert_array_equal(array, weights[0][name])
    algorithm.train()
    algorithm.stop()
    assert len(buffer) > len(rows)
