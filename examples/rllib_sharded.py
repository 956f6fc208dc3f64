# SPDX-License-Identifier: Apache-2.0
"""Prioritized replay divided over several Ray actors: two Learners, one shard that is lost, and a checkpoint.

python examples/rllib_sharded.py          # 4,000 steps of CartPole, four shards
python examples/rllib_sharded.py --fast   # a few hundred, two shards, the Learner in this process, to see it run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext


def make_config(num_shards: int, num_learners: int, steps: int, warmup_steps: int) -> DQNConfig:
    replay = rllib_ext.replay_config(
        "prioritized", capacity=50_000, priority_exponent=0.6, num_shards=num_shards, num_cpus_per_shard=0.5
    )
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=4, rollout_fragment_length=4)
        .learners(num_learners=num_learners)
        .training(
            replay_buffer_config=replay,
            lr=5e-4,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=warmup_steps,
            target_network_update_freq=500,
            epsilon=[(0, 1.0), (steps // 2, 0.05)],
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=steps // 4, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    return rllib_ext.configure(config)


def train(algorithm: Algorithm, iterations: int) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for _ in range(iterations):
        result = algorithm.train()
        stats = algorithm.local_replay_buffer.stats()
        episode_return = result["env_runners"].get("episode_return_mean", float("nan"))
        print(
            f"{int(result['num_env_steps_sampled_lifetime']):9d}  {episode_return:6.1f}  {stats['num_rows']:6d}  "
            f"{stats['rows_lost']:4d}  {stats['rows']}",
            flush=True,
        )
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a short run")
    parser.add_argument("--directory", type=Path, default=Path("runs/rllib_sharded"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow networks this small down
    num_shards, num_learners, steps, warmup_steps = (2, 0, 320, 50) if options.fast else (4, 2, 4_000, 500)

    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    algorithm = make_config(num_shards, num_learners, steps, warmup_steps).build_algo()
    print("env_steps  return  stored  lost  rows of each shard")
    train(algorithm, 2)
    ray.kill(algorithm.local_replay_buffer.shards.handles[0])  # as if its node had gone
    train(algorithm, 2)
    path = algorithm.save_to_path(options.directory.resolve())
    rows = len(algorithm.local_replay_buffer)
    algorithm.restore_from_path(path)
    print(f"{rows} rows saved, {len(algorithm.local_replay_buffer)} restored from {path}")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
