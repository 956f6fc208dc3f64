# SPDX-License-Identifier: Apache-2.0
"""DQN that flips bits until they are those of a goal: nothing is learned without hindsight, nearly all with it.

python examples/lightning_hindsight.py [--fast] [--bits 12]
"""

from __future__ import annotations

import argparse
import functools

import lightning as L

from lightning_replay import recipes
from lightning_replay.agents import DQN
from lightning_replay.envs.bit_flipping import BitFlipping
from lightning_replay.lit import Evaluate, ReplayDataModule


def returns_after(replay, bits: int, env_steps: int) -> float:
    """Mean return of 20 episodes: -1 for each step that does not reach the goal, so -bits where none does."""
    L.seed_everything(0, verbose=False)
    env = functools.partial(BitFlipping, bits)
    agent = DQN.for_env(
        env,
        hidden_sizes=(256,),
        learning_rate=1e-3,
        discount=0.98,
        target_update_rate=0.05,
        exploration_end=0.2,
    )
    data = ReplayDataModule(
        env, replay, num_envs=8, env_steps=env_steps, warmup_steps=400, updates_per_env_step=0.25, seed=0
    )
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Evaluate(every_n_env_steps=env_steps, episodes=20)],
    )
    trainer.fit(agent, datamodule=data)
    return float(trainer.callback_metrics["eval/return"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a few hundred steps only")
    parser.add_argument("--bits", type=int, default=12)
    options = parser.parse_args()
    env_steps = 800 if options.fast else 16_000

    size = {"capacity": 50_000, "batch_size": 128, "seed": 0}
    alone = returns_after(recipes.uniform(**size), options.bits, env_steps)
    replay = recipes.hindsight(**size, env=BitFlipping(options.bits), strategy="future", share=0.8)
    relabelled = returns_after(replay, options.bits, env_steps)
    print(f"return after {env_steps} steps: {alone:.1f} without hindsight, {relabelled:.1f} with it")

    batch, stored = replay.sample(), replay[:]
    reached = float((batch["next", "reward"] == 0).float().mean())
    print(
        f"rows at their goal: {float((stored['next', 'reward'] == 0).float().mean()):.0%} stored, {reached:.0%} drawn"
    )


if __name__ == "__main__":
    main()
