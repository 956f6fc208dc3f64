# SPDX-License-Identifier: Apache-2.0
"""SAC drives a car up a hill under Lightning: half of each batch are demonstrations of a script.

python examples/lightning_halves.py [--fast]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import lightning as L
import numpy as np

from lightning_replay import Replay, recipes
from lightning_replay.agents import SAC
from lightning_replay.collecting import VectorSteps
from lightning_replay.lit import Evaluate, ReplayCheckpoint, ReplayDataModule, ReplayProgressBar

# The reward is 100 at the top less the fuel: an agent that has never been there learns to stand still.
CAR = "MountainCarContinuous-v0"


def demonstrate(episodes: int) -> Replay:
    """Pushes in the direction of motion, with noise; any recipe takes the rows."""
    replay = recipes.uniform(capacity=200 * episodes, batch_size=32)
    steps, rng = VectorSteps(gymnasium.make_vec(CAR)), np.random.default_rng(0)
    observation, _ = steps.reset(seed=0)
    ended = 0
    while ended < episodes:
        action = np.where(observation[:, 1:] >= 0, 1.0, -1.0) + 0.3 * rng.standard_normal((1, 1))
        observation, _, terminated, truncated, _ = steps.step(np.clip(action, -1.0, 1.0).astype(np.float32))
        steps.store(replay)
        ended += int(terminated[0] or truncated[0])
    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few hundred steps only")
    parser.add_argument("--directory", default="runs/lightning_halves")
    options = parser.parse_args()

    demonstrations = demonstrate(episodes=2 if options.fast else 100)
    demonstrations.save(Path(options.directory) / "demonstrations")  # the configuration of the same name reads it
    print(f"{len(demonstrations)} demonstrated steps")

    L.seed_everything(0)
    replay = recipes.mixed(
        online=recipes.prioritized(capacity=50_000, batch_size=32), offline=demonstrations, share=0.5, batch_size=64
    )
    env_steps = 330 if options.fast else 5_000
    data = ReplayDataModule(CAR, replay, env_steps=env_steps, warmup_steps=300, seed=0)
    rates = {f"{name}_learning_rate": 1e-3 for name in ("actor", "critic", "entropy")}
    callbacks = [ReplayProgressBar(), Evaluate(1_000, episodes=2), ReplayCheckpoint(options.directory)]
    trainer = L.Trainer(max_epochs=-1, accelerator="cpu", callbacks=callbacks, default_root_dir=options.directory)
    trainer.fit(SAC.for_env(CAR, hidden_sizes=(64, 64), **rates), datamodule=data)

    drawn = replay.sample()
    print(f"return {trainer.callback_metrics['eval/return']:.0f} after {env_steps} steps")
    print(f"{int(drawn['is_offline'].sum())} of {len(drawn)} rows of a batch are demonstrations")


if __name__ == "__main__":
    main()
