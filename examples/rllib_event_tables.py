# SPDX-License-Identifier: Apache-2.0
"""DQN with event tables in RLlib: half of each batch comes from steps that led to the gap and to the goal.

    python examples/rllib_event_tables.py           # 28,000 steps in two rooms, about two minutes on two cores
    python examples/rllib_event_tables.py --fast    # 1,500 steps, to see it run
    python examples/rllib_event_tables.py --recipe uniform

The reward is 1 at the goal and 0 elsewhere. Conditions are import paths, as in a YAML file
(configs/rllib/sset_dqn_two_rooms.yaml); functions of this file work as well.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig

import rllib_ext

OBSERVED = 13 + 7 + 4  # one-hot vectors of x, y and direction
GAP_X = 6  # the column of the wall between the rooms of start and goal, entered in its gap alone
TABLES: list[dict[str, Any]] = [
    {
        "name": "goal",
        "condition": {"class_path": "lightning_replay.events.reward_at_least", "init_args": {"threshold": 1.0}},
        "history_length": 200,
        "capacity": 5_000,
    },
    {
        "name": "gap",
        "condition": {
            "class_path": "lightning_replay.events.key_in_region",
            "init_args": {
                "key": ["next", "observation"],
                "low": [1.0 if component == GAP_X else None for component in range(OBSERVED)],
            },
        },
        "history_length": 200,
        "capacity": 5_000,
    },
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="event_tables", choices=["event_tables", "uniform"])
    parser.add_argument("--fast", action="store_true", help="a short run")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow networks this small down
    total_steps, warmup_steps, batch_size = (1_500, 300, 32) if options.fast else (28_000, 1_000, 64)
    tables = {"tables": TABLES} if options.recipe == "event_tables" else {}

    # Each remote EnvRunner requests one CPU; without enough of them Ray waits for ever.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    config = (
        DQNConfig()
        .environment("lightning_replay.envs:TwoRooms-v0", env_config={"max_steps": 500, "one_hot": True})
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2, rollout_fragment_length=2)
        .training(
            replay_buffer_config=rllib_ext.replay_config(options.recipe, capacity=20_000, **tables),
            train_batch_size_per_learner=batch_size,
            num_steps_sampled_before_learning_starts=warmup_steps,
            lr=1e-3,
            gamma=0.97,
            epsilon=[[0, 1.0], [total_steps // 2, 0.3]],
            target_network_update_freq=500,
            double_q=True,
            dueling=False,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=total_steps // 12, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    algorithm = rllib_ext.configure(config).build_algo()
    print("env_steps  return  stored  goal  gap  drawn_from_goal  drawn_from_gap")
    for _ in range(12):
        print_line(algorithm.train(), algorithm.local_replay_buffer)
    algorithm.stop()
    ray.shutdown()


def print_line(result: dict[str, Any], buffer: Any) -> None:
    """Prints steps, mean return, and for each table its rows and its share of all rows drawn."""
    runners, tables = result["env_runners"], result.get("replay_buffer", {}).get("tables", {})
    steps, episode_return = runners["num_env_steps_sampled_lifetime"], runners.get("episode_return_mean", float("nan"))
    goal, gap = (tables.get(name, {"size": 0, "share_drawn": 0.0}) for name in ("goal", "gap"))
    print(
        f"{steps:9.0f}  {episode_return:6.2f}  {len(buffer):6d}  {goal['size']:4d}  {gap['size']:4d}"
        f"  {goal['share_drawn']:15.2f}  {gap['share_drawn']:14.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
