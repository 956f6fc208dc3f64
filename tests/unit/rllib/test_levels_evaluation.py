# SPDX-License-Identifier: Apache-2.0
"""The test protocol in a real EnvRunner: each level counts once however long its episode is, and no EnvRunner twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import rllib_ext
from rllib_ext.levels import playing
from rllib_ext.levels.evaluation import RESULTS, measure_gap
from rllib_ext.levels.evaluation import test_of as level_test_of

from .test_levels_config import Numbered

HELD_OUT = range(100, 106)


class Uneven(Numbered):
    """Every fourth level takes 50 steps, the others 2; each step gives the level as reward."""

    fails_at: int | None = None  # step, counted from now on

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if Uneven.fails_at is not None:
            Uneven.fails_at -= 1
            if Uneven.fails_at == 0:
                Uneven.fails_at = None
                raise OSError("the simulator is gone")
        observation, *_ = super().step(action)
        return observation, float(self.level), self.count == length(self.level), False, {}


def length(level_id: int) -> int:
    return 50 if level_id % 4 == 0 else 2


def returns_on(levels: Any) -> list[float]:
    return [float(level_id * length(level_id)) for level_id in levels]


def evaluating(environments: int = 2, worker_index: int = 0, runners: int = 0, **options: Any) -> SingleAgentEnvRunner:
    """An EnvRunner that evaluates, without Ray."""
    config = PPOConfig().environment(Uneven).debugging(seed=3)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=environments)
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=runners)
    rllib_ext.configure(config, levels={"levels": 12}, held_out_levels=HELD_OUT, require_cpus=False, **options)
    config.freeze()
    return SingleAgentEnvRunner(config=config.get_evaluation_config_object(), worker_index=worker_index)


@pytest.mark.parametrize("environments", [1, 2, 5])
def test_each_level_counts_once_however_long_its_episode(environments: int) -> None:
    runner = evaluating(environments)
    levels = [3, 4, 5, 6, 8, 9, 12, 7]
    assert sorted(level_test_of(runner, HELD_OUT).play(runner, levels)) == sorted(returns_on(levels))
    runner.stop()


def test_held_out_levels_count_once_though_rllib_breaks_the_long_ones_off() -> None:
    runner = evaluating()
    first, second = HELD_OUT[:3], HELD_OUT[3:]
    for levels in ([*HELD_OUT], first, second, [*HELD_OUT] * 2):
        assert len(runner.sample(num_episodes=len(levels))) == len(levels)
        runner.get_metrics()
        assert sorted(level_test_of(runner, HELD_OUT).finish(runner)) == sorted(returns_on(levels))
        assert not runner.get_metrics()["num_episodes"].peek() > 0
    runner.stop()


def test_a_level_that_was_broken_off_is_given_again() -> None:
    runner = evaluating()
    for _ in range(2):  # 100 is long, in the first environment
        ended = runner.sample(num_episodes=1)
        assert runner.env.unwrapped.envs[0].level_id == 100
    assert ended[0].custom_data["level_id"] == 102
    runner.stop()


def test_without_the_gap_levels_are_played_in_turn() -> None:
    runner = evaluating(1, generalization_gap=False)
    ended = [episode.custom_data["level_id"] for _ in range(2) for episode in runner.sample(num_episodes=4)]
    assert ended == [*HELD_OUT, *HELD_OUT[:2]]
    runner.stop()


def test_a_level_without_an_end_counts_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "MAX_EPISODE_STEPS", 20)
    runner = evaluating()
    levels = [3, 4, 5]  # level 4 takes 50 steps
    with pytest.warns(UserWarning, match="an evaluation episode in <.*> had not ended after 20 steps"):
        played = level_test_of(runner, HELD_OUT).play(runner, levels)
    assert played == [3.0 * 2, 4.0 * 20, 5.0 * 2]
    runner.stop()


@pytest.mark.parametrize("fails_at", [1, 30])
def test_levels_are_played_anew_after_an_environment_failed(fails_at: int) -> None:
    runner = evaluating()
    Uneven.fails_at = fails_at
    levels = [4, 5, 8, 9]
    assert level_test_of(runner, HELD_OUT).play(runner, levels) == returns_on(levels)
    assert Uneven.fails_at is None
    runner.stop()


class Group:
    """Some EnvRunners of an algorithm's evaluation."""

    def __init__(self, runners: list[SingleAgentEnvRunner]) -> None:
        self.runners = runners

    def num_remote_env_runners(self) -> int:
        return sum(bool(runner.worker_index) for runner in self.runners)

    def foreach_env_runner(self, function: Any, **ignored: Any) -> list[Any]:
        return [function(runner) for runner in self.runners]


@pytest.mark.parametrize("episodes", [{0: 2}, {2: 1}, {1: 1, 3: 1}, {1: 1, 3: 0}, {1: 2, 3: None}])
def test_the_gap_needs_no_env_runner_of_a_certain_index(episodes: dict[int, int | None]) -> None:
    runners = [evaluating(1, index, max(episodes)) for index in episodes]
    for runner, count in zip(runners, episodes.values(), strict=True):
        if count is not None:  # an EnvRunner that came back has played nothing
            runner.sample(num_episodes=count)
    duration = sum(count or 0 for count in episodes.values())
    algorithm = SimpleNamespace(
        eval_env_runner_group=Group(runners),
        levels=SimpleNamespace(played_levels=lambda: [3, 4], gap_generator=np.random.default_rng(0)),
        config=SimpleNamespace(evaluation_sample_timeout_s=None),
    )
    results: dict[str, Any] = {}
    measure_gap(algorithm=algorithm, evaluation_metrics=results)
    figures = results[RESULTS]
    assert figures["held_out_episodes"] == figures["training_episodes"] == duration
    mean = figures["training_return_mean"]
    assert mean in returns_on([3, 4]) if duration == 1 else mean == np.mean(returns_on([3, 4]))
    assert figures["generalization_gap"] == mean - figures["held_out_return_mean"]
    for runner in runners:
        runner.stop()
