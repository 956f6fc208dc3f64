# SPDX-License-Identifier: Apache-2.0
"""Trials of Ray Tune, each built as its process does: with the values drawn, and refusing those that do not fit.

A whole search, in processes of its own, is the example in ``test_rllib_examples.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig

import rllib_ext
from rllib_ext.search_spaces import samples_of

from .rllib_algorithms import SMALL, small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray")]

GOAL = {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}}


def trial(config: AlgorithmConfig, place: int = 0) -> Algorithm:
    """What the process of a trial builds."""
    return config.algo_class(config=samples_of(config.to_dict())[place])


def test_a_trial_has_the_values_that_were_drawn() -> None:
    options = {"capacity": tune.choice([300, 400]), "priority_exponent": tune.uniform(0.0, 1.0)}
    config = small(DQNConfig, "CartPole-v1", tune.choice(["prioritized"]), **options)
    config.training(lr=tune.loguniform(1e-4, 1e-2), n_step=tune.grid_search([2, 3]))
    algorithm = trial(rllib_ext.configure(config), 1)
    result = algorithm.train()
    replay, drawn = algorithm.local_replay_buffer.replay, algorithm.config
    algorithm.stop()
    given = drawn.replay_buffer_config
    assert (replay.capacity, replay.sampler.priority_exponent) == (given["capacity"], given["priority_exponent"])
    assert given["capacity"] in (300, 400) and 0.0 < given["priority_exponent"] < 1.0
    assert drawn.n_step == 3 and 2 < result["replay_buffer"]["actual_n_step"] <= 3 and 1e-4 < drawn.lr < 1e-2
    assert result["learners"]["default_policy"]["default_optimizer_learning_rate"] == drawn.lr


def test_levels_are_built_from_the_values_of_the_trial() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).rl_module(model_config=SMALL)
    config.training(
        gamma=tune.grid_search([0.9, 0.8]), train_batch_size_per_learner=60, minibatch_size=30, num_epochs=2
    )
    config.debugging(seed=tune.sample_from(lambda spec: round(10 * spec.config.gamma)))
    rllib_ext.configure(config, levels={"levels": 20, "staleness_weight": tune.uniform(0.1, 0.5)})
    algorithm = trial(config, 1)
    result = algorithm.train()
    levels = rllib_ext.level_buffer(algorithm).whole_state()["levels"]
    staleness_weight = algorithm.config.levels["staleness_weight"]
    algorithm.stop()
    assert (algorithm.config.gamma, algorithm.config.seed) == (0.8, 8) and 0.1 <= staleness_weight <= 0.5
    assert result["timesteps_total"] == result["num_env_steps_sampled_lifetime"] == 60
    assert result["num_updates_lifetime"] >= 4
    assert levels["kind"] == "LevelBuffer"


def refuses(config: AlgorithmConfig, message: str) -> None:
    """The trial of the second sample ends with our error, before it learns."""
    with pytest.raises(ValueError, match=message):
        trial(config, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: small(DQNConfig, "CartPole-v1", "prioritized", priority_exponent=tune.grid_search([0.5, -1.0])),
            "priority_exponent is -1.0; it must be",
        ),
        (
            lambda: small(DQNConfig, "CartPole-v1", "uniform").training(
                train_batch_size_per_learner=tune.grid_search([16, 2000])
            ),
            "capacity is 1000, below the 2000 rows of a train batch",
        ),
        (
            lambda: small(DQNConfig, "CartPole-v1", "surprise_retention").training(
                n_step=tune.grid_search([3, (1, 3)])
            ),
            r"n_step is \(1, 3\), an interval to draw lengths from",
        ),
        (
            lambda: small(
                DQNConfig,
                "CartPole-v1",
                "event_tables",
                max_trajectories=tune.grid_search([8, 2]),
                tables=[{"name": "goal", "condition": GOAL, "history_length": 5, "capacity": 50}],
            ).env_runners(num_envs_per_env_runner=4),
            "max_trajectories is 2, and 4 environments run an episode each",
        ),
    ],
)
def test_a_trial_whose_values_do_not_fit_fails_with_the_reason(config: Any, message: str) -> None:
    refuses(rllib_ext.configure(config()), message)


def test_a_trial_whose_levels_do_not_fit_fails_with_the_reason() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).rl_module(model_config=SMALL)
    rllib_ext.configure(config, levels={"levels": 20, "staleness_weight": tune.grid_search([0.3, 3.0])})
    refuses(config, "staleness_weight is 3.0; it must be a number in")


def test_the_process_of_a_trial_counts_as_a_cpu() -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    config = small(DQNConfig, "CartPole-v1", "uniform").env_runners(num_env_runners=cpus)
    rllib_ext.configure(config)
    with pytest.raises(ValueError, match=f"need {cpus + 1} CPUs and Ray has {cpus}: the trial would wait for ever"):
        rllib_ext.configure(config.training(lr=tune.loguniform(1e-4, 1e-2)))
