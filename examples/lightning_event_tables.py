# SPDX-License-Identifier: Apache-2.0
"""Double DQN in two rooms under a Lightning trainer, with tables of the steps that led to the gap and to the goal.

python examples/lightning_event_tables.py [--fast]
"""

from __future__ import annotations

import argparse

import lightning as L
from tensordict import TensorDict
from torch import Tensor

from lightning_replay import recipes
from lightning_replay.agents import DQN
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.lit import Evaluate, ReplayCheckpoint, ReplayDataModule, ReplayProgressBar

GAP = 6  # the column of the wall between the rooms


def in_the_gap(steps: TensorDict) -> Tensor:
    return steps["next", "observation"][:, 0] == GAP


def make_data(env_steps: int, warmup_steps: int) -> ReplayDataModule:
    tables = [
        EventTable("gap", in_the_gap, history_length=30, capacity=5_000, share=0.25, min_size=1),
        EventTable("goal", reward_at_least(1.0), history_length=30, capacity=5_000, share=0.25, min_size=1),
    ]
    replay = recipes.event_tables(capacity=20_000, batch_size=64, tables=tables, default_share=0.5, seed=0)
    return ReplayDataModule("TwoRooms-v0", replay, env_steps, warmup_steps, updates_per_env_step=0.25, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="two thousand steps only")
    parser.add_argument("--directory", default="runs/lightning_event_tables")
    options = parser.parse_args()
    env_steps, warmup_steps = (2_000, 1_500) if options.fast else (20_000, 2_000)

    L.seed_everything(0)
    agent = DQN.for_env(
        "TwoRooms-v0", hidden_sizes=(64, 64), learning_rate=1e-3, exploration_end=0.3, exploration_steps=1_000
    )
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[
            ReplayProgressBar(),
            Evaluate(every_n_env_steps=1_000, episodes=1),
            ReplayCheckpoint(options.directory),
        ],
        default_root_dir=options.directory,
    )
    data = make_data(env_steps, warmup_steps)
    trainer.fit(agent, datamodule=data)

    print(f"return {trainer.callback_metrics['eval/return']:.0f} after {env_steps} steps")
    for name, seen in data.replay.stats()["tables"].items():
        print(f"table {name}: {seen['size']} steps, {seen['share_drawn']:.0%} of the rows drawn")


if __name__ == "__main__":
    main()
