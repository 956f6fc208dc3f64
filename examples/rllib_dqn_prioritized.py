# SPDX-License-Identifier: Apache-2.0
"""DQN with prioritized replay and 3-step returns in RLlib; the checkpoint holds the buffer.

python examples/rllib_dqn_prioritized.py                   # 6,000 steps of CartPole
python examples/rllib_dqn_prioritized.py --fast            # a few hundred, to see it run
python examples/rllib_dqn_prioritized.py --buffer rllib    # RLlib's own prioritized buffer, to compare the speed
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext

BUFFERS = {
    "recipe": rllib_ext.replay_config("prioritized", capacity=50_000, priority_exponent=0.6, importance_exponent=0.4),
    "rllib": {"type": "PrioritizedEpisodeReplayBuffer", "capacity": 50_000, "alpha": 0.6, "beta": 0.4},
}


def make_config(buffer: str, steps: int, warmup_steps: int) -> DQNConfig:
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .training(
            replay_buffer_config=BUFFERS[buffer],
            n_step=3,
            lr=5e-4,
            train_batch_size_per_learner=64,
            num_steps_sampled_before_learning_starts=warmup_steps,
            target_network_update_freq=500,
            epsilon=[(0, 1.0), (steps // 2, 0.05)],
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=steps // 6, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    # One block per batch, TD errors from any number of Learners, and the buffer in every checkpoint.
    return rllib_ext.configure(config) if buffer == "recipe" else config


def train(algorithm: Algorithm, iterations: int) -> None:
    for _ in range(iterations):
        started = time.perf_counter()
        before = steps_of(algorithm)
        result = algorithm.train()
        steps_per_second = (steps_of(algorithm) - before) / (time.perf_counter() - started)
        print(
            f"{steps_of(algorithm):9d}  {result['env_runners'].get('episode_return_mean', float('nan')):6.1f}  "
            f"{stored(algorithm):6d}  {steps_per_second:12.0f}",
            flush=True,
        )


def steps_of(algorithm: Algorithm) -> int:
    return int(algorithm.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"), default=0))


def stored(algorithm: Algorithm) -> int:
    """Returns the number of steps in the buffer, also in RLlib's own."""
    buffer: Any = algorithm.local_replay_buffer
    return int(buffer.get_num_timesteps())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", choices=BUFFERS, default="recipe")
    parser.add_argument("--fast", action="store_true", help="a short run")
    parser.add_argument("--directory", type=Path, default=Path("runs/rllib_dqn_prioritized"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow networks this small down
    steps, warmup_steps = (300, 50) if options.fast else (6_000, 500)

    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    algorithm = make_config(options.buffer, steps, warmup_steps).build_algo()
    print("env_steps  return  stored  steps/second")
    train(algorithm, iterations=4)
    path = algorithm.save_to_path(options.directory.resolve())
    rows = stored(algorithm)
    algorithm.stop()

    again = Algorithm.from_checkpoint(path)
    restored = stored(again)
    print(f"restored from {path}")
    train(again, iterations=2)
    again.stop()
    ray.shutdown()
    print(f"{rows} rows saved, {restored} restored")


if __name__ == "__main__":
    main()
