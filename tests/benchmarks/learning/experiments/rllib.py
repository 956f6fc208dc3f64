# SPDX-License-Identifier: Apache-2.0
"""Returns of RLlib's algorithms with our buffer, with RLlib's own prioritized one and with shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.benchmarks.learning.experiment import Experiment, Measure, Panel, Settings, last_of
from tests.benchmarks.learning.recorder import Recorder


def dqn() -> Any:
    """Returns DQN's configuration for CartPole, an update every second step."""
    from ray.rllib.algorithms.dqn import DQNConfig

    config = DQNConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [64, 64]})
    return config.env_runners(rollout_fragment_length=2).training(
        lr=1e-3,
        epsilon=[(0, 1.0), (5_000, 0.02)],
        target_network_update_freq=200,
        train_batch_size_per_learner=64,
        num_steps_sampled_before_learning_starts=500,
    )


def dqn_3_steps() -> Any:
    """Returns :func:`dqn` with returns over three steps and an update every third step, where the buffers differ.

    RLlib 2.60 draws another row where fewer than three steps are left, so the last two actions of an episode, those
    before the pole falls, are never learned from. Ours forms the shorter return.
    """
    return dqn().env_runners(rollout_fragment_length="auto").training(n_step=3)


def sac() -> Any:
    """Returns SAC's configuration for Pendulum."""
    from ray.rllib.algorithms.sac import SACConfig

    config = SACConfig().environment("Pendulum-v1")
    config.rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
    return config.training(
        actor_lr=1e-3,
        critic_lr=1e-3,
        alpha_lr=1e-3,
        train_batch_size_per_learner=128,
        num_steps_sampled_before_learning_starts=300,
    )


ALGORITHMS: dict[str, Callable[[], Any]] = {"dqn": dqn, "sac": sac, "dqn_3_steps": dqn_3_steps}


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the mean return of the last ten episodes, forty times."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import logging

    import ray

    import rllib_ext

    (seed,) = seeds
    ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    buffer = settings["buffer"]
    given = rllib_ext.replay_config("prioritized", **buffer) if settings["is_ours"] else buffer
    config = ALGORITHMS[settings["algorithm"]]().training(replay_buffer_config=given)
    config.debugging(seed=seed, log_level="ERROR")
    config.reporting(
        metrics_num_episodes_for_smoothing=10,
        min_sample_timesteps_per_iteration=settings["env_steps"] // 40,
        min_time_s_per_iteration=0,
    )
    if settings["is_ours"]:
        rllib_ext.configure(config)
    built = config.build_algo()
    sampled, mean = 0, float("nan")
    while sampled < settings["env_steps"]:
        runners = built.train()["env_runners"]
        sampled = int(runners["num_env_steps_sampled_lifetime"])
        new = runners.get("episode_return_mean", float("nan"))
        mean = new if np.isfinite(new) else mean  # no episode ended in this iteration
        out.record(sampled, episode_return=[mean])
    built.stop()


PRIORITIES = {"capacity": 50_000, "priority_exponent": 0.6, "importance_exponent": 0.4}
RLLIBS = {"type": "PrioritizedEpisodeReplayBuffer", "capacity": 50_000, "alpha": 0.6, "beta": 0.4}


def experiment_of(
    name: str, title: str, claim: str, algorithm: str, env_steps: int, arms: dict[str, Settings], seeds: int
) -> Experiment:
    """Returns an experiment that compares buffers with one algorithm."""
    return Experiment(
        name=name,
        title=title,
        claim=claim,
        task="Mean return of the last ten episodes, forty times along the run.",
        length="{env_steps:,} steps",
        arms=arms,
        settings={"algorithm": algorithm, "env_steps": env_steps},
        fast={"env_steps": 800},
        seeds=range(seeds),
        pilot_seeds=(),
        measure=Measure("return along the way", lambda run: float(np.nanmean(run.curves["episode_return"])), digits=1),
        also=(last_of("episode_return", 5, "return at the end", digits=1),),
        panels=(Panel("episode_return", "mean return of the last ten episodes"),),
        run=run,
    )


def with_rllibs(algorithm: str, title: str, env_steps: int) -> Experiment:
    """Returns an experiment that compares RLlib's buffer with ours."""
    return experiment_of(
        f"rllib-{algorithm.replace('_', '-')}",
        f"RLlib's {title}: our prioritized buffer and RLlib's own",
        "none of a paper: with the same settings both buffers learn alike.",
        algorithm,
        env_steps,
        {"RLlib's buffer": {"is_ours": False, "buffer": RLLIBS}, "our buffer": {"is_ours": True, "buffer": PRIORITIES}},
        seeds=3,
    )


EXPERIMENTS = (
    with_rllibs("dqn", "DQN on CartPole, an update every second step", 12_000),
    with_rllibs("dqn_3_steps", "DQN on CartPole, returns over three steps", 15_000),
    with_rllibs("sac", "SAC on Pendulum", 4_000),
    experiment_of(
        "rllib-shards",
        "RLlib's DQN on CartPole, an update every second step: one buffer and four shards",
        "none of a paper: draws over shards are those of one buffer, so both learn alike.",
        "dqn",
        12_000,
        {
            "one buffer": {"is_ours": True, "buffer": PRIORITIES},
            "four shards": {"is_ours": True, "buffer": {**PRIORITIES, "num_shards": 4, "num_cpus_per_shard": 0}},
        },
        seeds=5,
    ),
)
