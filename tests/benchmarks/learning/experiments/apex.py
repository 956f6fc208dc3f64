# SPDX-License-Identifier: Apache-2.0
"""The asynchronous loop of Ape-X compared with RLlib's synchronous one, with equal draws for each step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.recorder import Recorder


def algorithm_config(settings: Settings, seed: int) -> Any:
    """Returns the configuration: CartPole, two EnvRunners, returns over three steps, 16 rows drawn for each step."""
    from ray.rllib.algorithms.dqn import DQNConfig

    import rllib_ext
    from rllib_ext.apex import ApexDQNConfig

    if settings["is_asynchronous"]:
        config = ApexDQNConfig().training(samples_per_insert=settings["samples_per_insert"])
        config.env_runners(rollout_fragment_length=16)
    else:
        # A round brings two fragments of 4 steps; 16 draws for each are two batches of 64. RLlib counts one
        # EnvRunner more than there are: its ratio is 64 / (3 * 4) for one update.
        config = DQNConfig().training(epsilon=[(0, 1.0), (5_000, 0.02)], training_intensity=2 * 64 / 12)
        config.env_runners(rollout_fragment_length=4)
    config.environment("CartPole-v1").env_runners(num_env_runners=2)
    config.rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
    config.training(
        replay_buffer_config=rllib_ext.replay_config("prioritized", capacity=50_000, priority_exponent=0.6),
        n_step=3,
        lr=1e-3,
        target_network_update_freq=200,
        train_batch_size_per_learner=64,
        num_steps_sampled_before_learning_starts=500,
    )
    config.evaluation(evaluation_interval=1, evaluation_duration=10)
    config.reporting(min_sample_timesteps_per_iteration=settings["env_steps"] // 20, min_time_s_per_iteration=0)
    config.debugging(seed=seed, log_level="ERROR")
    return rllib_ext.configure(config)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the greedy return over ten episodes, twenty times, and at the end the ratio of draws to steps."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import logging

    import ray

    (seed,) = seeds
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    algorithm = algorithm_config(settings, seed).build_algo()
    sampled = 0
    while sampled < settings["env_steps"]:
        result = algorithm.train()
        sampled = int(result["num_env_steps_sampled_lifetime"])
        out.record(sampled, episode_return=[result["evaluation"]["env_runners"]["episode_return_mean"]])
    buffer = algorithm.local_replay_buffer
    out.final(samples_per_insert=[buffer.get_sampled_timesteps() / (buffer.get_added_timesteps() - 500)])
    algorithm.stop()


EXPERIMENTS = (
    Experiment(
        name="apex-cartpole",
        title="RLlib's DQN on CartPole: the asynchronous loop of Ape-X and the synchronous one",
        claim="none for one machine: with equal draws for each step both loops learn alike "
        "(Horgan et al. 2018, https://arxiv.org/abs/1803.00933, gain by hundreds of EnvRunners).",
        task="Two EnvRunners; greedy return over ten episodes, twenty times along the run. The asynchronous loop is "
        "not repeatable: the order in which steps arrive depends on Ray.",
        length="{env_steps:,} steps",
        arms={"DQN": {"is_asynchronous": False}, "Ape-X": {"is_asynchronous": True}},
        settings={"env_steps": 20_000, "samples_per_insert": 16.0},
        fast={"env_steps": 1_200},
        seeds=range(3),
        pilot_seeds=(),
        measure=mean_of("episode_return", "return along the way", digits=1),
        also=(last_of("episode_return", 5, "return at the end", digits=1),),
        panels=(Panel("episode_return", "greedy return over ten episodes"),),
        run=run,
    ),
)
