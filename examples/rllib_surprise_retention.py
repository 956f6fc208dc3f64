# SPDX-License-Identifier: Apache-2.0
"""RLlib's DQN on Atari frames from a small buffer that keeps what is surprising, each frame stored once.

python examples/rllib_surprise_retention.py                     # 100,000 steps of Breakout, rows for 10,000: hours
python examples/rllib_surprise_retention.py --fast              # 300 steps on one EnvRunner, to see it run
python examples/rllib_surprise_retention.py --recipe uniform    # first in, first out, to compare

A full buffer evicts the row of the lowest surprise times on-policyness, and refuses a candidate that is itself lowest.
The Learner reports TD errors and action values, and the surprise of candidates to the present networks.
Needs the extra atari: pip install 'lightning-replay[rllib,atari]'.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext

RECIPES = ["surprise_retention", "uniform", "prioritized"]
NATURE = {"conv_filters": [[32, 8, 4], [64, 4, 2], [64, 3, 1]], "head_fcnet_hiddens": [512]}
TINY = {"conv_filters": [[8, 8, 4], [16, 4, 2]], "head_fcnet_hiddens": [64]}


def make_config(recipe: str, game: str, steps: int, capacity: int, network: dict[str, Any], runners: int) -> DQNConfig:
    options = {"surprise_retention": {"priority_exponent": 0.5, "q_inverse_temperature": 1.0}}.get(recipe, {})
    config = (
        DQNConfig()
        # uint8 [4, 84, 84]; an episode is a life, and rewards are clipped
        .environment("lightning_replay.envs:Atari-v0", env_config={"game": game})
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=2 // runners)
        .training(
            replay_buffer_config=rllib_ext.replay_config(recipe, capacity=capacity, frame_stack=4, **options),
            n_step=5,  # formed before rows are stored, where they are kept by importance
            gamma=0.99,
            lr=1e-4,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=steps // 10,
            target_network_update_freq=steps // 20,
            epsilon=[(0, 1.0), (steps // 2, 0.05)],
        )
        .rl_module(model_config=network)
        .reporting(min_sample_timesteps_per_iteration=steps // 10, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    # The Learner's signals, returns formed on the way in, and a module that takes bytes and makes floats of them.
    return rllib_ext.configure(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--fast", action="store_true", help="a short run of a tiny network")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, capacity, network, runners = (300, 100, TINY, 1) if options.fast else (100_000, 10_000, NATURE, 2)

    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    algorithm = make_config(options.recipe, options.game, steps, capacity, network, runners).build_algo()
    replay = algorithm.local_replay_buffer.replay
    print("env_steps  return  stored  admitted  refused  frames/row  bytes/row")
    env_steps = 0
    while env_steps < steps:
        result = algorithm.train()
        env_steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        episode_return = result["env_runners"].get("episode_return_mean", float("nan"))
        stats = replay.stats()
        admitted, refused = stats.get("admitted", env_steps), stats.get("refused", 0)
        frames = stats["frames_per_transition"]
        held = frames * stats["frame_bytes"]
        print(
            f"{env_steps:9d}  {episode_return:6.2f}  {len(replay):6d}  {admitted:8d}  {refused:7d}  {frames:10.2f}  "
            f"{held:9,.0f}",
            flush=True,
        )
    algorithm.stop()
    ray.shutdown()
    print(f"frames of {len(replay)} rows: {held * len(replay):,.0f} bytes, stored once; as two stacks in each row they")
    print(f"would take {len(replay) * 2 * 4 * stats['frame_bytes']:,} bytes")


if __name__ == "__main__":
    main()
