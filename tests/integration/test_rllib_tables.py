# SPDX-License-Identifier: Apache-2.0
"""A curriculum in RLlib: who plays what, and what a lost EnvRunner changes."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from tensordict import TensorDictBase

from lightning_replay.schedulers import EasyToHard, Exp3, MeanReturn

from .rllib_algorithms import Levels, built, small, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

TASKS = ["target", "near", "far"]  # not the order of the environment


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def curriculum(scheduler: Any, **options: Any) -> AlgorithmConfig:
    progress = MeanReturn(low=0.0, high=1.0, window=4, every=2)
    given = {"tasks": TASKS, "capacity_per_task": 500, "scheduler": scheduler, "progress": progress, "seed": 0}
    config = small(DQNConfig, Levels, "parallel_curriculum", **given, **options)
    return config.fault_tolerance(restart_failed_env_runners=True)


def played(buffer: Any) -> dict[tuple[int, int], set[str]]:
    """Tasks by EnvRunner and process, from the rows; asserts that rows have the task that was played."""
    by_runner = defaultdict(set)
    for name in buffer.replay.tables.names:
        rows = buffer.replay.table(name)
        check_tasks(rows)
        for task, (_, worker, process, _) in zip(rows["task"].tolist(), rows["observation"].tolist(), strict=True):
            by_runner[int(worker), int(process)].add(TASKS[task])
    return dict(by_runner)


def check_tasks(rows: TensorDictBase) -> None:
    assert [TASKS[task] for task in rows["task"]] == [Levels.TASKS[int(task)] for task in rows["observation"][:, 0]]


def test_each_environment_plays_its_task_also_after_its_runner_was_lost(tmp_path: Path) -> None:
    config = curriculum(Exp3(exploration=0.2)).env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=0, evaluation_duration=3)
    algorithm = built(config)
    buffer = algorithm.local_replay_buffer
    result = trained(algorithm)
    assert result["evaluation"]["env_runners"]["episode_return_mean"] == 0.0
    first = played(buffer)
    expected = {1: {"target", "near"}, 2: {"far", "target"}}
    assert {worker: tasks for (worker, _), tasks in first.items()} == expected
    weights = result["replay_buffer"]["tasks"]
    assert weights["near"]["progress"] == 1.0 and weights["far"]["progress"] == 0.5
    probability = {task: figures["probability"] for task, figures in weights.items()}
    assert max(probability["near"], probability["far"]) > probability["target"] > 0.2 / 3
    ray.kill(list(algorithm.env_runner_group._worker_manager.actors().values())[1], no_restart=False)
    for _ in range(20):
        result = algorithm.train()
        new = {runner: tasks for runner, tasks in played(buffer).items() if runner not in first}
        if new and all(len(tasks) == 2 for tasks in new.values()):
            break
    assert [(worker, tasks) for (worker, _), tasks in new.items()] == [(2, {"far", "target"})]
    episodes = {task: figures["num_episodes_lifetime"] for task, figures in result["replay_buffer"]["tasks"].items()}
    assert episodes["near"] > weights["near"]["num_episodes_lifetime"]

    probabilities, state = buffer.replay.probabilities(), buffer.modules["default_policy"].task_progress.state()
    path = algorithm.save_to_path(tmp_path / "saved")
    again = Algorithm.from_checkpoint(path)
    restored = again.local_replay_buffer
    assert restored.replay.probabilities() == probabilities
    assert restored.modules["default_policy"].task_progress.state() == state
    again.train()
    assert {worker: tasks for (worker, _), tasks in played(restored).items()} == expected
    later = restored.modules["default_policy"].task_progress.episodes
    assert all(later[task] >= count for task, count in episodes.items()) and later["near"] > episodes["near"]


def test_stages_reach_environments_in_other_processes_and_runners_that_come_back(tmp_path: Path) -> None:
    config = curriculum(EasyToHard(order=["near", "far", "target"], advance_at=0.5))
    config.env_runners(num_env_runners=1, gym_env_vectorize_mode="async")
    algorithm = built(config)
    buffer = algorithm.local_replay_buffer
    for _ in range(20):
        algorithm.train()
        if buffer.replay.actor_tasks(1) == [0]:
            break
    tasks = order_of_tasks(buffer)
    assert list(dict.fromkeys(tasks))[:2] == ["near", "far"]
    path = algorithm.save_to_path(tmp_path / "saved")

    again = built(config.copy(copy_frozen=False).env_runners(gym_env_vectorize_mode="sync"))  # others take seconds
    again.restore_from_path(path)

    def check_new_ones(known: set[tuple[int, int]]) -> None:
        """Asserts that processes that were not known play the last stage, not that with which they are built."""
        for _ in range(20):
            again.train()
            new = {one: tasks for one, tasks in played(again.local_replay_buffer).items() if one not in known}
            if new:
                break
        assert set.union(*new.values()) == {"target"}

    check_new_ones(set(played(again.local_replay_buffer)))
    known = set(played(again.local_replay_buffer))
    ray.kill(next(iter(again.env_runner_group._worker_manager.actors().values())), no_restart=False)
    check_new_ones(known)


def order_of_tasks(buffer: Any) -> list[str]:
    return [TASKS[task] for task in buffer.replay.table("all tasks")["task"]]


def test_environments_that_cannot_play_the_tasks_are_refused() -> None:
    config = curriculum(Exp3()).environment("CartPole-v1").env_runners(num_env_runners=0)
    with pytest.raises(ValueError, match="the environments have no attribute 'task'"):
        built(config)
