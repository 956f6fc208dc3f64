# SPDX-License-Identifier: Apache-2.0
"""A parallel curriculum with SAC in RLlib: one task for each EnvRunner, the scheduler in the replay buffer.

    python examples/rllib_parallel_curriculum.py           # 16,000 steps in a maze, about two minutes on two cores
    python examples/rllib_parallel_curriculum.py --fast    # 400 steps on one EnvRunner, to see it run
    python examples/rllib_parallel_curriculum.py --scheduler UniformTasks

Four EnvRunners push a ball through the same maze, starting at four distances from the goal; the reward is 1 there.
Each batch is from one of the four tables, chosen by EXP3 from how well the tasks go: it turns to what is learnt first
(the target takes far longer than this run). The environments have an attribute ``task``, which rllib_ext.configure
has each EnvRunner set, also one that was lost and came back.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import torch
from ray.rllib.algorithms.sac import SACConfig

import rllib_ext
from lightning_replay import schedulers
from lightning_replay.schedulers import MeanReturn

TASKS = ["target", "far", "near", "nearest"]
SCHEDULERS = {"Exp3": schedulers.Exp3(exploration=0.2), "UniformTasks": schedulers.UniformTasks()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", default="Exp3", choices=SCHEDULERS)
    parser.add_argument("--fast", action="store_true", help="a short run")
    options = parser.parse_args()
    torch.set_num_threads(1)  # networks this small lose by more
    total_steps, warmup_steps, batch_size, runners = (400, 100, 32, 1) if options.fast else (16_000, 1_000, 128, 4)

    # Each remote EnvRunner asks for one CPU; say that there are enough, or Ray waits for ever.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    config = (
        SACConfig()
        .environment("lightning_replay.envs:PointMazeTasks-UMaze-v0", env_config={"max_steps": 150})
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=len(TASKS) // runners,
            rollout_fragment_length=4,
        )
        .training(
            replay_buffer_config=rllib_ext.replay_config(
                "parallel_curriculum",
                tasks=TASKS,
                capacity_per_task=10_000,
                scheduler=SCHEDULERS[options.scheduler],
                progress=MeanReturn(low=0.0, high=1.0, window=20, every=2),
            ),
            train_batch_size_per_learner=batch_size,
            num_steps_sampled_before_learning_starts=warmup_steps,
            actor_lr=1e-3,
            critic_lr=1e-3,
            alpha_lr=1e-3,
            initial_alpha=0.1,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .fault_tolerance(restart_failed_env_runners=True)
        .reporting(min_sample_timesteps_per_iteration=total_steps // 10, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    algorithm = rllib_ext.configure(config).build_algo()
    print("           mean return of the last 20 episodes    probability of a task's batch")
    print("env_steps" + 2 * f"{'':2}{''.join(f'{task:>9}' for task in TASKS)}")
    for _ in range(10):
        result = algorithm.train()
        steps = result["env_runners"]["num_env_steps_sampled_lifetime"]
        print(f"{steps:9.0f}  {columns(result, 'progress')}  {columns(result, 'probability')}", flush=True)
    print("rows of each task:", {task: len(algorithm.local_replay_buffer.replay.table(task)) for task in TASKS})
    algorithm.stop()
    ray.shutdown()


def columns(result: dict[str, Any], key: str) -> str:
    """A figure of every task; nan before there is one."""
    tasks = result.get("replay_buffer", {}).get("tasks", {})
    return "".join(f"{tasks.get(task, {}).get(key, float('nan')):9.2f}" for task in TASKS)


if __name__ == "__main__":
    main()
