# SPDX-License-Identifier: Apache-2.0
"""What ``configure`` checks and adds for tables and tasks; a real EnvRunner plays the tasks it is told."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import rllib_ext
from lightning_replay.envs.building import TaskChoice
from lightning_replay.schedulers import EasyToHard, Exp3, OneTask, UniformTasks
from rllib_ext.tasks import find_problem, set_tasks

TASKS = ["target", "far", "near"]
GOAL = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}


class Levels(TaskChoice, gym.Env):
    """Observes the index of its task; every second step ends an episode."""

    TASKS = ("target", "near", "far")
    observation_space = gym.spaces.Box(0, 2, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._playing, self._count = self._begin_task(options), 0
        return np.array([self._playing], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        return np.array([self._playing], np.float32), 0.0, self._count == 2, False, {}


class NoDefault(Levels):
    """Has no task before one is set."""

    task: Any = None

    def __init__(self, config: Any = None) -> None:
        pass

    def _begin_task(self, options: Any) -> int:
        return self.TASKS.index(self.task)


def config_of(**options: Any) -> AlgorithmConfig:
    given = {"tasks": TASKS, "capacity_per_task": 1000, "progress": None, **options}
    return of_recipe("parallel_curriculum", **given).environment(Levels)


def of_recipe(recipe: str, **options: Any) -> AlgorithmConfig:
    return DQNConfig().training(replay_buffer_config=rllib_ext.replay_config(recipe, **options))


def configured(config: AlgorithmConfig, **options: Any) -> AlgorithmConfig:
    return rllib_ext.configure(config, require_cpus=False, **options)


def runner_of(config: AlgorithmConfig, worker_index: int) -> SingleAgentEnvRunner:
    return SingleAgentEnvRunner(config=configured(config), worker_index=worker_index)


def tasks_played(runner: SingleAgentEnvRunner, steps: int = 12) -> list[str]:
    """The task of each episode, in the order they end; asserts that its tag is the task that was played."""
    episodes = runner.sample(num_timesteps=steps, random_actions=True)
    tags = [episode.custom_data["task"] for episode in episodes]
    assert tags == [Levels.TASKS[int(episode.get_observations(0)[0])] for episode in episodes]
    return tags


@pytest.mark.parametrize(
    ("runners", "worker_index", "expected"),
    [(0, 0, {"target", "far"}), (3, 1, {"target", "far"}), (3, 2, {"near", "target"}), (3, 3, {"far", "near"})],
)
def test_environments_count_on_over_the_runners(runners: int, worker_index: int, expected: set[str]) -> None:
    runner = runner_of(config_of().env_runners(num_env_runners=runners, num_envs_per_env_runner=2), worker_index)
    assert set(tasks_played(runner)) == expected
    set_tasks(runner, ["near"] * 6)  # holds from the next episode on
    assert set(tasks_played(runner)) <= {*expected, "near"}
    assert set(tasks_played(runner)) == {"near"}
    runner.stop()


def test_environments_that_evaluate_play_the_first_task() -> None:
    config = config_of(scheduler=OneTask("near")).env_runners(num_env_runners=1)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=1)
    configured(config)
    config.freeze()
    runner = SingleAgentEnvRunner(config=config.get_evaluation_config_object(), worker_index=1)
    assert set(tasks_played(runner)) == {"target"}
    runner.stop()
    runner = SingleAgentEnvRunner(config=config, worker_index=1)
    assert set(tasks_played(runner)) == {"near"}
    runner.stop()


def test_what_an_environment_lacks_is_said() -> None:
    runner = runner_of(config_of().env_runners(num_env_runners=1), 1)
    assert find_problem(runner, TASKS) is None
    problem = find_problem(runner, ["easy"])
    assert "which the environments do not have; they have ['target', 'near', 'far']" in str(problem)
    runner.stop()
    without = SingleAgentEnvRunner(config=DQNConfig().environment("CartPole-v1"), worker_index=1)
    assert "the environments have no attribute 'task'" in str(find_problem(without, TASKS))
    without.stop()


def test_the_task_is_set_before_the_first_reset() -> None:
    runner = runner_of(config_of().environment(NoDefault), 1)
    assert set(tasks_played(runner)) <= set(TASKS)
    runner.stop()


@pytest.mark.parametrize(
    ("options", "runners", "warnings"),
    [
        ({}, 3, []),
        ({}, 2, ["none plays ['near']. Give an environment to each of the 3 tasks"]),
        ({"scheduler": Exp3()}, 3, ["gets no progress signals"]),
        ({"scheduler": EasyToHard(["near", "target"])}, 1, ["gets no progress signals"]),  # all stages come
        ({"scheduler": UniformTasks()}, 3, []),  # neither of these two would listen
        ({"scheduler": OneTask("target")}, 1, []),
    ],
)
def test_curricula_that_would_not_work_are_warned_of(
    options: dict, runners: int, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rllib_ext"):
        configured(config_of(**options).env_runners(num_env_runners=runners))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rllib_ext")]
    assert len(said) == len(warnings) and all(part in text for part, text in zip(warnings, said, strict=True))


def test_capacities_are_those_of_each_task() -> None:
    config = config_of(capacity_per_task=100).env_runners(num_env_runners=6, rollout_fragment_length=51)
    with pytest.raises(ValueError, match="capacity_per_task is 100, and one round of sampling brings 102 steps"):
        configured(config)
    configured(config.env_runners(rollout_fragment_length=50))
    with pytest.raises(ValueError, match="capacity_per_task is 100, below the 101 rows of a train batch"):
        configured(config.training(train_batch_size_per_learner=101))


@pytest.mark.parametrize(("environments", "given", "most"), [(3, None, 128), (100, None, 200), (100, 100, 100)])
def test_event_tables_have_room_for_the_episodes_that_run(environments: int, given: Any, most: int) -> None:
    tables = [{"name": "goal", "condition": GOAL, "history_length": 5, "capacity": 50}]
    options = {} if given is None else {"max_trajectories": given}
    config = of_recipe("event_tables", capacity=1000, tables=tables, **options).environment("CartPole-v1")
    configured(config.env_runners(num_env_runners=1, num_envs_per_env_runner=environments))
    assert config.replay_buffer_config["max_trajectories"] == most


def test_event_tables_with_too_little_room_are_refused() -> None:
    tables = [{"name": "goal", "condition": GOAL, "history_length": 5, "capacity": 50}]
    config = of_recipe("event_tables", capacity=1000, tables=tables, max_trajectories=3)
    with pytest.raises(ValueError, match="max_trajectories is 3, and 4 environments run an episode each"):
        configured(config.env_runners(num_env_runners=2, num_envs_per_env_runner=2))
