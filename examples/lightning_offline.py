# SPDX-License-Identifier: Apache-2.0
"""SAC learns Pendulum from a file in D4RL's layout without stepping the environment, then goes on online.

python examples/lightning_offline.py [--fast]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import h5py
import lightning as L
import numpy as np

from lightning_replay import recipes
from lightning_replay.agents import SAC
from lightning_replay.datasets import fill, from_d4rl
from lightning_replay.lit import Evaluate, ReplayCheckpoint, ReplayDataModule


def write_demonstrations(path: Path, steps: int) -> None:
    """Writes steps of a controller that swings the pendulum up badly, in place of a file that you have."""
    env, generator = gymnasium.make("Pendulum-v1"), np.random.default_rng(0)
    columns: dict[str, list[np.ndarray | float]] = {
        name: [] for name in ("observations", "actions", "rewards", "terminals", "timeouts")
    }
    observation, _ = env.reset(seed=0)
    for _ in range(steps):
        cosine, _, velocity = observation
        push = np.sign(velocity) * (-1 if cosine > 0.9 else 1)  # adds energy, and brakes near the top
        action = np.clip(2 * push + generator.normal(scale=1.0, size=1), -2, 2).astype(np.float32)
        following, reward, terminated, truncated, _ = env.step(action)
        for column, value in zip(columns.values(), (observation, action, reward, terminated, truncated), strict=True):
            column.append(value)
        observation = env.reset()[0] if terminated or truncated else following
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file[name] = np.array(column)


def make_trainer(directory: str, every: int) -> L.Trainer:
    callbacks = [Evaluate(every_n_env_steps=every, episodes=5), ReplayCheckpoint(directory)]
    options = {"logger": False, "enable_progress_bar": False, "default_root_dir": directory}
    return L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=callbacks, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few hundred steps only")
    parser.add_argument("--directory", default="runs/lightning_offline")
    options = parser.parse_args()
    steps = 300 if options.fast else 3_000

    L.seed_everything(0)
    file = Path(options.directory) / "pendulum.hdf5"
    write_demonstrations(file, steps)
    rows = from_d4rl(file)
    replay = fill(recipes.uniform(capacity=50_000, batch_size=64, seed=0), rows)
    print(f"{len(rows)} rows of {steps} steps: the last one of each episode has no next observation")

    # The environment beside updates is for evaluation alone; updates count where there are no environment steps.
    agent = SAC.for_env("Pendulum-v1", hidden_sizes=(64, 64), actor_learning_rate=1e-3, critic_learning_rate=1e-3)
    trainer = make_trainer(options.directory, every=steps)
    trainer.fit(agent, datamodule=ReplayDataModule("Pendulum-v1", replay, updates=steps, seed=0))
    print(f"return {trainer.callback_metrics['eval/return']:.0f} after {steps} updates, no step in the environment")

    # From the checkpoint, with its replay, and without random actions: the first batch is drawn from the rows.
    data = ReplayDataModule("Pendulum-v1", replay, env_steps=steps, warmup_steps=0, seed=0)
    trainer = make_trainer(options.directory, every=steps)
    trainer.fit(agent, datamodule=data, ckpt_path="last")
    print(f"return {trainer.callback_metrics['eval/return']:.0f} after {steps} environment steps, {len(replay)} rows")


if __name__ == "__main__":
    main()
