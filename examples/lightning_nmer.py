# SPDX-License-Identifier: Apache-2.0
"""TD3 with neighbourhood mixup under a Lightning trainer: fit, keep the best, resume with the replay.

python examples/lightning_nmer.py [--fast]
"""

from __future__ import annotations

import argparse

import lightning as L

from lightning_replay import recipes
from lightning_replay.agents import TD3
from lightning_replay.lit import Evaluate, LogReplayStats, ReplayCheckpoint, ReplayDataModule, ReplayProgressBar


def make_data(env_steps: int) -> ReplayDataModule:
    replay = recipes.neighborhood_mixup(capacity=50_000, batch_size=128, num_neighbors=10)
    return ReplayDataModule("Pendulum-v1", replay, env_steps=env_steps, warmup_steps=500, seed=0)


def make_trainer(directory: str) -> L.Trainer:
    callbacks = [
        ReplayProgressBar(),
        Evaluate(every_n_env_steps=1_000, episodes=5),
        LogReplayStats(every_n_updates=500),
        ReplayCheckpoint(directory),
    ]
    return L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=callbacks, default_root_dir=directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few hundred steps only")
    parser.add_argument("--directory", default="runs/lightning_nmer")
    options = parser.parse_args()
    env_steps = 700 if options.fast else 5_000

    L.seed_everything(0)
    agent = TD3.for_env("Pendulum-v1", hidden_sizes=(64, 64), actor_learning_rate=1e-3, critic_learning_rate=1e-3)
    trainer = make_trainer(options.directory)
    trainer.fit(agent, datamodule=make_data(env_steps))
    print(f"return {trainer.callback_metrics['eval/return']:.0f} after {env_steps} steps")

    # A longer run resumes from the last checkpoint, as after Ctrl-C; the replay beside it is loaded.
    trainer = make_trainer(options.directory)
    data = make_data(env_steps + 200)
    trainer.fit(agent, datamodule=data, ckpt_path="last")
    print(f"return {trainer.callback_metrics['eval/return']:.0f}, {len(data.replay)} transitions in the replay")

    best = TD3.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    print(f"the best policy is {type(best).__name__} in {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()
