# SPDX-License-Identifier: Apache-2.0
"""Learning with our buffer and with RLlib's own prioritized one, the same settings and seeds: the same returns?

    python tests/benchmarks/learning_rllib.py --save                # all settings, three seeds, about 40 minutes
    python tests/benchmarks/learning_rllib.py --algorithms dqn --seeds 1 --steps 2000

Welch's t-test compares the mean returns along the way and at the end over seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
from experiment_tables import RESULTS
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig
from scipy.stats import ttest_ind

import rllib_ext

BUFFERS: dict[str, dict[str, Any]] = {
    "rllib": {"type": "PrioritizedEpisodeReplayBuffer", "capacity": 50_000, "alpha": 0.6, "beta": 0.4},
    "ours": rllib_ext.replay_config("prioritized", capacity=50_000, priority_exponent=0.6, importance_exponent=0.4),
}
STEPS = {"dqn": 12_000, "sac": 4_000, "dqn_3_steps": 15_000}
LAST = 5  # iterations whose mean is the return at the end


def dqn() -> AlgorithmConfig:
    """CartPole, an update every second step."""
    config = DQNConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [64, 64]})
    return config.env_runners(rollout_fragment_length=2).training(
        lr=1e-3,
        epsilon=[(0, 1.0), (5_000, 0.02)],
        target_network_update_freq=200,
        train_batch_size_per_learner=64,
        num_steps_sampled_before_learning_starts=500,
    )


def dqn_3_steps() -> AlgorithmConfig:
    """Returns over three steps, an update every third: here the buffers differ.

    RLlib 2.60 draws another row where fewer than three steps are left, so the last two actions of an episode, those
    before the pole falls, are never learned from. Ours forms the shorter return.
    """
    return dqn().env_runners(rollout_fragment_length="auto").training(n_step=3)


def sac() -> AlgorithmConfig:
    """Pendulum."""
    config = SACConfig().environment("Pendulum-v1")
    config.rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
    return config.training(
        actor_lr=1e-3,
        critic_lr=1e-3,
        alpha_lr=1e-3,
        train_batch_size_per_learner=128,
        num_steps_sampled_before_learning_starts=300,
    )


ALGORITHMS = {"dqn": dqn, "sac": sac, "dqn_3_steps": dqn_3_steps}


def learning_curve(algorithm: str, buffer: str, seed: int, steps: int) -> tuple[list[float], float]:
    """Mean return of the last ten episodes, forty times along the run, and the seconds it took."""
    config = ALGORITHMS[algorithm]().training(replay_buffer_config=BUFFERS[buffer])
    config.debugging(seed=seed, log_level="ERROR")
    config.reporting(
        metrics_num_episodes_for_smoothing=10,
        min_sample_timesteps_per_iteration=steps // 40,
        min_time_s_per_iteration=0,
    )
    if buffer == "ours":
        rllib_ext.configure(config)
    built = config.build_algo()
    start = time.perf_counter()
    curve: list[float] = []
    sampled = 0.0
    while sampled < steps:
        runners = built.train()["env_runners"]
        sampled = runners["num_env_steps_sampled_lifetime"]
        mean = runners.get("episode_return_mean", float("nan"))
        # An iteration in which no episode ended says nothing new.
        curve.append(mean if np.isfinite(mean) or not curve else curve[-1])
    seconds = time.perf_counter() - start
    built.stop()
    return [float(value) for value in curve], seconds


def compare(algorithm: str, seeds: int, steps: int) -> dict[str, Any]:
    """Curves of both buffers over seeds, and how their means differ."""
    runs: dict[str, list[list[float]]] = {name: [] for name in BUFFERS}
    seconds: dict[str, list[float]] = {name: [] for name in BUFFERS}
    for seed in range(seeds):
        for name in BUFFERS:
            curve, took = learning_curve(algorithm, name, seed, steps)
            runs[name].append(curve)
            seconds[name].append(took)
            print(
                f"{algorithm} {name:6} seed {seed}: along the way {np.nanmean(curve):7.1f}  "
                f"at the end {np.mean(curve[-LAST:]):7.1f}  {took:5.0f} s",
                flush=True,
            )
    summary: dict[str, Any] = {"steps": steps, "curves": runs, "seconds": seconds}
    for what, of in (("along the way", np.nanmean), ("at the end", lambda curve: np.mean(curve[-LAST:]))):
        values = {name: [float(of(curve)) for curve in curves] for name, curves in runs.items()}
        pvalue = float(ttest_ind(*values.values(), equal_var=False).pvalue) if seeds > 1 else float("nan")
        summary[what] = {"returns": values, "welch_p": pvalue}
        means = "  ".join(f"{name} {np.mean(of_buffer):.1f}" for name, of_buffer in values.items())
        print(f"{algorithm} {what}: {means}  (Welch p = {pvalue:.2f})", flush=True)
    ratio = sum(seconds["rllib"]) / sum(seconds["ours"])
    print(f"{algorithm}: ours took {ratio:.2f} times less time", flush=True)
    return summary


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="environment steps, instead of those of each algorithm")
    parser.add_argument("--save", action="store_true", help="write results/learning_rllib_<algorithm>.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for algorithm in options.algorithms:
        summary = compare(algorithm, options.seeds, options.steps or STEPS[algorithm])
        if options.save:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"learning_rllib_{algorithm}.json"
            path.write_text(json.dumps(summary, indent=1) + "\n")
            print(f"written: {path}")
    ray.shutdown()


if __name__ == "__main__":
    main()
