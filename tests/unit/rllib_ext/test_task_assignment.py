# SPDX-License-Identifier: Apache-2.0
"""What ``configure`` checks and adds for tables and tasks; a real EnvRunner plays the tasks it is told."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

import rllib_ext
from lightning_replay.schedulers import EasyToHard, Exp3, OneTask, UniformTasks
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.tasks import find_problem, set_tasks
from tests.integration import rllib_algorithms as integration

from .episodes import buffer_of, numbered

TASKS = ["target", "far", "near"]
GOAL = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}


class Levels(integration.Levels):
    """Every second step ends an episode."""

    TASKS, LENGTH = ("target", "near", "far"), 2


class NoDefault(Levels):
    """Has no task before one is set."""

    task: Any = None
    _worker = 0

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


def test_environments_that_evaluate_play_the_first_task() -> None:
    config = config_of(scheduler=OneTask("near")).env_runners(num_env_runners=1)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=1)
    configured(config)
    config.freeze()
    runner = SingleAgentEnvRunner(config=config.get_evaluation_config_object(), worker_index=1)
    assert set(tasks_played(runner)) == {"target"}
    runner = SingleAgentEnvRunner(config=config, worker_index=1)
    assert set(tasks_played(runner)) == {"near"}


def test_what_an_environment_lacks_is_said() -> None:
    runner = runner_of(config_of().env_runners(num_env_runners=1), 1)
    assert find_problem(runner, TASKS) is None
    problem = find_problem(runner, ["easy"])
    assert "which the environments do not have; they have ['target', 'near', 'far']" in str(problem)


def test_the_task_is_set_before_the_first_reset() -> None:
    runner = runner_of(config_of().environment(NoDefault), 1)
    assert set(tasks_played(runner)) <= set(TASKS)


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
def test_curricula_that_would_not_work_are_warned_of(options: Any, runners: int, warnings: Any, caplog: Any) -> None:
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


MEAN = {"class_path": "lightning_replay.schedulers.MeanReturn", "init_args": {"low": 0.0, "high": 100.0, "every": 1}}


def curriculum(**options: Any) -> RecipeEpisodeReplayBuffer:
    given = {"tasks": TASKS, "capacity_per_task": 100, "scheduler": Exp3(0.3), "progress": MEAN, "seed": 0, **options}
    return buffer_of(rllib_ext.replay_config("parallel_curriculum", **given))


def of(task: str, name: str, length: int, **options: Any) -> SingleAgentEpisode:
    """Steps of an episode; the reward of step t is t."""
    episode = numbered(name, length, **options)
    episode.custom_data["task"] = task
    return episode


def signals(buffer: RecipeEpisodeReplayBuffer) -> dict[str, float]:
    progress = buffer.modules["default_policy"].task_progress
    assert progress is not None
    return progress.signals


def test_returns_are_summed_over_fragments_of_interleaved_runners() -> None:
    taught = curriculum()
    taught.add([of("far", "a", 4), of("near", "b", 3)])  # 0 to 3, 0 to 2
    assert signals(taught) == {}
    taught.add([of("near", "b", 2, start=3, lookback=1, terminated=True), of("far", "a", 3, start=4)])
    assert signals(taught) == {"near": 0.1}  # 0 + 1 + 2 + 3 + 4
    taught.add([of("near", "b", 2, start=3, lookback=1, terminated=True)])  # sent twice
    taught.add([of("far", "a", 4, start=6, truncated=True)])  # overlaps by a step: 0 to 9
    assert signals(taught) == {"near": 0.1, "far": 0.45}
    taught.add([of("near", "c", 11, terminated=True)])
    assert signals(taught)["near"] == (0.1 + 0.55) / 2


def test_episodes_with_a_hole_or_without_a_beginning_do_not_count() -> None:
    taught = curriculum()
    taught.add([of("far", "a", 4), of("near", "b", 3, start=2)])
    taught.add([of("far", "a", 4, start=6, terminated=True), of("near", "b", 3, start=5, terminated=True)])
    assert signals(taught) == {} and len(taught) == 14


def test_signals_reach_the_scheduler_once_each() -> None:
    taught = curriculum()
    taught.add([of(task, task, 20) for task in TASKS])
    for _ in range(60):  # each task is drawn
        taught.sample(num_items=8)
    before = taught.replay.probabilities()
    assert set(before.values()) == {1 / 3}
    taught.add(of("near", "near", 1, start=20, terminated=True))  # 210: clipped to 1
    weight = np.exp(0.3 * 1.0 / (1 / 3 * 3))
    expected = 0.7 * weight / (weight + 2) + 0.1
    assert taught.replay.probabilities()["near"] == pytest.approx(expected)
    taught.add(of("near", "running", 3))
    assert taught.replay.probabilities()["near"] == pytest.approx(expected)


def test_the_least_size_follows_the_batch() -> None:
    taught = curriculum()
    taught.add([of("target", "a", 10), of("far", "b", 19), of("near", "c", 20)])
    assert _tasks_drawn(taught, 20) == {"near"} and _tasks_drawn(taught, 15) == {"far", "near"}
    assert _tasks_drawn(taught, 50) == {"near"}  # nothing holds 50
    given = curriculum(min_size=10)
    given.add([of("target", "a", 10), of("far", "b", 9)])
    assert _tasks_drawn(given, 32) == {"target"}


def _tasks_drawn(buffer: RecipeEpisodeReplayBuffer, rows: int) -> set[str]:
    buffer.sample(num_items=rows)  # sets the least size
    return {buffer.replay.tasks[int(buffer.replay.sample(4)["task"][0])] for _ in range(40)}


def test_stages_move_all_actors() -> None:
    taught = curriculum(scheduler=EasyToHard(order=["near", "far", "target"], advance_at=0.5))
    assert taught.replay.actor_tasks(2) == [2, 2]
    taught.add(of("near", "a", 10, terminated=True))
    assert taught.replay.actor_tasks(2) == [2, 2]
    taught.add(of("near", "b", 12, terminated=True))
    assert taught.replay.actor_tasks(2) == [1, 1]


def test_figures_of_tasks() -> None:
    taught = curriculum()
    taught.add([of("near", "a", 5, terminated=True), of("near", "b", 6, terminated=True), of("far", "c", 6)])
    taught.sample(num_items=4)
    logger = MetricsLogger(root=True)
    logger.aggregate([taught.get_metrics()], key="replay_buffer")
    tasks, tables = (logger.peek(("replay_buffer", name)) for name in ("tasks", "tables"))
    assert [tasks[name]["num_episodes_lifetime"] for name in TASKS] == [0, 0, 2]
    assert tasks["near"]["progress"] == 0.125 and "progress" not in tasks["far"]
    assert sum(one["probability"] for one in tasks.values()) == pytest.approx(1) and not tasks["target"]["probability"]
    assert tables["near"]["size"] == 11 and tables["far"]["fill"] == 0.06 and tables["target"]["share_drawn"] == 0


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("uniform", {"capacity": 10, "progress": MEAN}, "progress is for the tasks of a curriculum"),
        ("parallel_curriculum", {"tasks": TASKS, "capacity": 9}, "has no option 'capacity'"),
        ("parallel_curriculum", {"tasks": TASKS}, "needs capacity_per_task, the most transitions kept"),
        (
            "parallel_curriculum",
            {"capacity_per_task": 9, "tasks": TASKS, "progress": {**MEAN, "init_args": {}}},
            "'low'",
        ),
    ],
)
def test_bad_curricula_are_refused_when_the_config_is_written(recipe: str, options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        rllib_ext.replay_config(recipe, **options)
