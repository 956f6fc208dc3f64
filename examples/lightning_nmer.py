# SPDX-License-Identifier: Apache-2.0
"""TD3 with neighborhood mixup and 20 updates per step under a Lightning trainer: fit, keep the best, resume.

python examples/lightning_nmer.py           # 8,000 steps of HalfCheetah, 5,000 of them random: 60,000 updates
python examples/lightning_nmer.py --fast    # a few hundred updates, to see it run
python examples/lightning_nmer.py --recipe uniform

With one update per step, no difference between mixup and uniform replay was found. The agent normalizes the layers of
its critics, which also helps uniform replay at this ratio. Needs the extra ``mujoco``.
"""

from __future__ import annotations

import argparse

import lightning as L

from lightning_replay import recipes
from lightning_replay.agents import TD3
from lightning_replay.lit import Evaluate, LogReplayStats, ReplayCheckpoint, ReplayDataModule, ReplayProgressBar

ENV = "HalfCheetah-v5"


def make_data(recipe: str, env_steps: int, warmup_steps: int) -> ReplayDataModule:
    replay = getattr(recipes, recipe)(capacity=50_000, batch_size=100)
    ratio = {"updates_per_env_step": 20, "updates_per_training_step": 20}
    return ReplayDataModule(ENV, replay, env_steps=env_steps, warmup_steps=warmup_steps, **ratio, seed=0)


def make_trainer(directory: str) -> L.Trainer:
    callbacks = [
        ReplayProgressBar(),
        Evaluate(every_n_env_steps=500, episodes=2),
        LogReplayStats(every_n_updates=500),
        ReplayCheckpoint(directory),
    ]
    return L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=callbacks, default_root_dir=directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="neighborhood_mixup", choices=["neighborhood_mixup", "uniform"])
    parser.add_argument("--fast", action="store_true", help="a short run")
    parser.add_argument("--directory", default="runs/lightning_nmer")
    options = parser.parse_args()
    env_steps, warmup_steps, more_steps = (620, 600, 10) if options.fast else (8_000, 5_000, 200)

    L.seed_everything(0)
    rates = {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    agent = TD3.for_env(ENV, hidden_sizes=(64, 64), layer_norm=True, **rates)
    trainer = make_trainer(options.directory)
    trainer.fit(agent, datamodule=make_data(options.recipe, env_steps, warmup_steps))
    print(f"return {trainer.callback_metrics['eval/return']:.0f} after {env_steps} steps")

    # A longer run resumes from the last checkpoint, as after Ctrl-C; the replay beside it is loaded.
    trainer = make_trainer(options.directory)
    data = make_data(options.recipe, env_steps + more_steps, warmup_steps)
    trainer.fit(agent, datamodule=data, ckpt_path="last")
    print(f"return {trainer.callback_metrics['eval/return']:.0f}, {len(data.replay)} transitions in the replay")

    best = TD3.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    print(f"the best policy is {type(best).__name__} in {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()
