# SPDX-License-Identifier: Apache-2.0
"""A cluster of several nodes in training, of which one part of each kind is killed: no step is lost but those counted.

Eight EnvRunners, four shards and two Learners on three nodes of this machine. At each fifth of the run something is
lost: a shard, an EnvRunner, a node with all that runs on it, a Learner. RLlib cannot train on without a Learner, so the
run resumes from the checkpoint before.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext
from tests.attack.report import Report

CAPACITY = 200_000  # above the steps of every run: rows leave with their shard alone
FRAGMENT = 10
NODES = 3
ITERATION = 2_000  # steps


class Numbered(gym.Env):
    """Observes which environment of which process this is, and its step; an episode has 40 steps on average."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        random = np.random.default_rng()  # also another one in a process that replaces this one
        self.name, self.step_number, self.random = random.integers(2**23, size=2), -1, random

    def _observed(self) -> np.ndarray:
        self.step_number += 1
        return np.array([*self.name, self.step_number], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self._observed(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        ends = self.random.random(2) < 1 / 80
        return self._observed(), float(self.step_number), bool(ends[0]), bool(ends[1] and not ends[0]), {}


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def stored(shard: Any) -> np.ndarray:
    replay = shard.held.replay
    rows = replay.storage.get(slice(0, len(replay)))
    columns = (rows["observation"], rows["next", "observation"], rows["next", "reward"].reshape(-1, 1))
    return np.concatenate([column.numpy() for column in columns], axis=1)


class Run:
    def __init__(self, cluster: Cluster, report: Report, folder: Path) -> None:
        self.cluster, self.report, self.folder = cluster, report, folder
        self.steps = 0
        self.algorithm = self.build()

    def build(self) -> Algorithm:
        config = (
            DQNConfig()
            .environment(Numbered)
            .env_runners(num_env_runners=8, num_cpus_per_env_runner=0.25, rollout_fragment_length=FRAGMENT)
            .learners(num_learners=2, num_cpus_per_learner=0.5)
            .fault_tolerance(restart_failed_env_runners=True)
            .training(
                replay_buffer_config=rllib_ext.replay_config(
                    "prioritized", capacity=CAPACITY, num_shards=4, num_cpus_per_shard=0.25
                ),
                train_batch_size_per_learner=32,
                num_steps_sampled_before_learning_starts=200,
            )
            .rl_module(model_config={"fcnet_hiddens": [16], "head_fcnet_hiddens": []})
            .reporting(min_sample_timesteps_per_iteration=ITERATION, min_time_s_per_iteration=0)
            .debugging(log_sys_usage=False, log_level="ERROR")
        )
        return rllib_ext.configure(config).build_algo()

    @property
    def replay(self) -> Any:
        return self.algorithm.local_replay_buffer

    def train(self, steps: int) -> None:
        """Trains until there are as many environment steps, and compares what is stored with what was played."""
        while self.steps < steps:
            result = self.algorithm.train()
            self.steps = int(result["num_env_steps_sampled_lifetime"])
        self.check()

    def train_and_lose(self, steps: int) -> None:
        """Trains for so many steps, and loses something of each kind meanwhile."""
        self.train(steps // 5)
        for number, loss in enumerate((self.lose_shard, self.lose_env_runner, self.lose_node), 2):
            self.lose(loss)
            self.train(number * steps // 5)
        self.lose_learner()
        self.train(steps)
        self.report.count("steps", self.steps)

    def rows(self) -> list[np.ndarray]:
        return [ray.get(handle.__ray_call__.remote(stored)) for handle in self.replay.shards.handles]

    def check(self) -> None:
        """Refuses a step that is missing and not counted, one that is there twice, and rows of mixed steps."""
        self.replay.shards.wait_for_starts()
        stats = self.replay.stats()
        rows = np.concatenate(self.rows())
        unaccounted = self.steps - len(rows) - stats["rows_lost"]
        assert len(rows) == stats["num_rows"]
        assert 0 <= unaccounted <= FRAGMENT * stats["fragments_lost"], f"{unaccounted} steps are missing: {stats}"
        assert len(np.unique(rows[:, :3], axis=0)) == len(rows), "a step is stored twice"
        assert (rows[:, 3:5] == rows[:, :2]).all() and (rows[:, 5] == rows[:, 2] + 1).all(), "rows are of mixed steps"
        assert (rows[:, 6] == rows[:, 5]).all(), "a row has another row's reward"
        self.report.count("rows compared", len(rows))

    def lose(self, what: Callable[[], list[int]]) -> None:
        """Loses something, and waits until training goes on with every shard.

        Args:
            what: loses it; returns the shards that are lost with it.
        """
        before, stats = self.rows(), self.replay.stats()
        lost = what()
        self.train(self.steps + 1)
        epochs = self.replay.stats()["epochs"]
        again = [shard for shard in range(len(epochs)) if epochs[shard] > stats["epochs"][shard]]
        assert again == lost, f"shards {again} were started again, and {lost} were lost"
        rows_lost = self.replay.stats()["rows_lost"] - stats["rows_lost"]
        held = sum(len(before[shard]) for shard in lost)
        assert held <= rows_lost <= held + ITERATION, f"{rows_lost} rows are counted as lost, of {held}"
        for shard, rows in enumerate(self.rows()):
            if shard not in lost:
                assert (rows[: len(before[shard])] == before[shard]).all(), f"shard {shard} has lost rows"
        self.report.count("rows lost with shards", rows_lost)

    def lose_shard(self) -> list[int]:
        ray.kill(self.replay.shards.handles[1])
        return [1]

    def lose_env_runner(self) -> list[int]:
        ray.kill(self.algorithm.env_runner_group._worker_manager.actors()[3], no_restart=False)
        return []

    def lose_node(self) -> list[int]:
        """Kills a node with shards and without Learners, once another is there."""
        self.cluster.add_node(num_cpus=4)
        learners = {result.get() for result in self.algorithm.learner_group.foreach_learner(node_of)}
        homes = ray.get([handle.__ray_call__.remote(node_of) for handle in self.replay.shards.handles])
        node = next(home for home in homes if home not in learners)
        self.cluster.remove_node(next(one for one in self.cluster.list_all_nodes() if one.node_id == node))
        return [shard for shard, home in enumerate(homes) if home == node]

    def lose_learner(self) -> None:
        """Kills a Learner, and resumes in a new algorithm from the checkpoint before."""
        path = self.algorithm.save_to_path(self.folder / "checkpoint")
        saved, steps = self.rows(), self.steps
        self.train(self.steps + 1)
        ray.kill(next(iter(self.algorithm.learner_group._worker_manager.actors().values())))
        try:
            for _ in range(5):
                self.algorithm.train()
        except Exception:
            self.report.count("runs resumed from a checkpoint")
        else:
            raise AssertionError("training went on without a Learner")
        self.algorithm.stop()
        self.algorithm = self.build()
        self.algorithm.restore_from_path(path)
        assert all((now == then).all() for now, then in zip(self.rows(), saved, strict=True)), "restored rows differ"
        self.steps = steps
        self.check()


def node_of(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


def attack(steps: int) -> Report:
    report = Report()
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        with tempfile.TemporaryDirectory() as folder, report.round("a cluster"):
            run = Run(cluster, report, Path(folder))
            try:
                run.train_and_lose(steps)
            finally:
                run.algorithm.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return report
