# SPDX-License-Identifier: Apache-2.0
"""Ape-X in RLlib: asynchronous collection, and an epsilon of its own for every environment.

python examples/rllib_apex.py          # 10,000 steps of CartPole on two EnvRunners
python examples/rllib_apex.py --fast   # a few hundred, to see it run
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import torch

import rllib_ext
from rllib_ext.apex import ApexDQNConfig


def make_config(steps: int, warmup_steps: int) -> ApexDQNConfig:
    config = (
        ApexDQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2, rollout_fragment_length=10)
        .fault_tolerance(restart_failed_env_runners=True)
        .training(
            replay_buffer_config=rllib_ext.replay_config("prioritized", capacity=50_000, priority_exponent=0.6),
            samples_per_insert=16.0,  # an update with 64 rows for every fourth step
            lr=5e-4,
            train_batch_size_per_learner=64,
            num_steps_sampled_before_learning_starts=warmup_steps,
            target_network_update_freq=500,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=steps // 10, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    return rllib_ext.configure(config)


def epsilons(env_runner: Any) -> list[float]:
    if env_runner.env is None:  # that of this process only holds weights
        return []
    return [round(one, 4) for one in env_runner.module.epsilon_schedule.get_current_value().tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a short run")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow networks this small down
    steps, warmup_steps = (600, 100) if options.fast else (10_000, 500)

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    algorithm = make_config(steps, warmup_steps).build_algo()
    print("epsilons", [one for one in algorithm.env_runner_group.foreach_env_runner(epsilons) if one])
    print("env_steps  updates  return  drawn per step  balance")
    sampled = 0
    while sampled < steps:
        result = algorithm.train()
        sampled = int(result["num_env_steps_sampled_lifetime"])
        counts, mean = result["rate_limiter"], result["env_runners"].get("episode_return_mean", float("nan"))
        print(
            f"{sampled:9d}  {result['num_updates_lifetime']:7d}  {mean:6.1f}  {counts['samples_per_insert']:14.2f}  "
            f"{counts['balance']:7.0f}",
            flush=True,
        )
    print(f"error_buffer {algorithm.rate_limiter.error_buffer:.0f}")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
