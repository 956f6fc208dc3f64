# SPDX-License-Identifier: Apache-2.0
"""Double DQN in three rooms under a Lightning trainer, with tables of the steps that led to the gaps and to the goal.

python examples/lightning_event_tables.py [--fast]

Environment, learner and tables are those of configs/lightning/sset_ddqn_three_rooms.yaml; half a minute on one core.
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

GAPS = [6, 11]  # the columns of the walls between the rooms, entered in their gaps alone


def in_a_gap(steps: TensorDict) -> Tensor:
    return steps["next", "observation"][:, GAPS].any(1)


def make_data(env_steps: int, warmup_steps: int) -> ReplayDataModule:
    options = {"history_length": 200, "capacity": 10_000, "share": 0.25, "min_size": 64}
    tables = [EventTable("gap", in_a_gap, **options), EventTable("goal", reward_at_least(1.0), **options)]
    replay = recipes.event_tables(capacity=30_000, batch_size=8, tables=tables, default_share=0.5, seed=0)
    return ReplayDataModule(
        "ThreeRooms-v0",
        replay,
        env_steps,
        warmup_steps,
        env_kwargs={"one_hot": True, "max_steps": 1_000},
        evaluation_env_kwargs={"max_steps": 100},
        seed=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="two thousand steps only")
    parser.add_argument("--directory", default="runs/lightning_event_tables")
    options = parser.parse_args()
    env_steps, warmup_steps = (2_000, 1_500) if options.fast else (20_000, 5_000)

    L.seed_everything(0)
    agent = DQN(
        hidden_sizes=(64, 64),
        learning_rate=5e-4,
        discount=0.97,
        target_update_rate=0.1,
        exploration_end=0.3,
        exploration_steps=5_000,
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
