# SPDX-License-Identifier: Apache-2.0
"""TD3 under Lightning collects Pendulum steps; SAC in RLlib learns from them from its first iteration on.

python examples/lightning_to_rllib.py           # 3,000 steps collected, 2,000 more played by RLlib
python examples/lightning_to_rllib.py --fast    # a few hundred, to see it run
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import lightning as L
import ray
import torch
from ray.rllib.algorithms.sac import SACConfig

import rllib_ext
from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.agents import TD3
from lightning_replay.lit import Evaluate, ReplayDataModule

ENV = "Pendulum-v1"


def collect(env_steps: int, batch_size: int, path: Path) -> None:
    """Saves the replay of a short Lightning run."""
    L.seed_everything(0, verbose=False)
    agent = TD3.for_env(ENV, hidden_sizes=(64, 64), actor_learning_rate=1e-3, critic_learning_rate=1e-3)
    replay = recipes.uniform(capacity=50_000, batch_size=batch_size)
    data = ReplayDataModule(
        ENV, replay, env_steps=env_steps, warmup_steps=env_steps // 5, updates_per_env_step=0.5, seed=0
    )
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        callbacks=[Evaluate(every_n_env_steps=env_steps, episodes=3)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(agent, datamodule=data)
    save_replay(data.replay, path)
    print(f"Lightning: {len(data.replay)} rows, return {trainer.callback_metrics['eval/return']:.0f}", flush=True)


def make_config(iterations: int, env_steps: int, batch_size: int) -> SACConfig:
    config = (
        SACConfig()
        .environment(ENV)
        .training(
            replay_buffer_config=rllib_ext.replay_config("uniform", capacity=50_000),
            train_batch_size_per_learner=batch_size,
            num_steps_sampled_before_learning_starts=0,  # the rows are stored already
            actor_lr=3e-4,
            critic_lr=1e-3,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "head_fcnet_hiddens": []})
        .reporting(min_sample_timesteps_per_iteration=env_steps // iterations, min_time_s_per_iteration=0)
        .debugging(seed=0, log_level="ERROR")
    )
    return rllib_ext.configure(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a short run")
    parser.add_argument("--directory", type=Path, default=Path("runs/lightning_to_rllib"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads slow networks this small down
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    collected, played, batch_size = (600, 210, 32) if options.fast else (3_000, 2_000, 128)

    collect(collected, batch_size, options.directory / "replay")

    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    algorithm = make_config(5, played, batch_size).build_algo()
    # Lightning stored the environment's actions, -2 to 2; RLlib's modules compute -1 to 1, and fill() converts.
    rows = rllib_ext.fill(algorithm, load_replay(options.directory / "replay"))
    print(f"RLlib: {rows} rows filled in\n\nenv_steps  return  stored   drawn")
    for _ in range(5):
        result = algorithm.train()
        runners, replay = result["env_runners"], result["replay_buffer"]
        print(
            f"{runners['num_env_steps_sampled_lifetime']:9.0f}  "
            f"{runners.get('episode_return_mean', float('nan')):6.0f}  {replay['num_env_steps_stored']:6d}  "
            f"{replay['num_env_steps_sampled_lifetime']:6.0f}",
            flush=True,
        )
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
