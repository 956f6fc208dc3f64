# SPDX-License-Identifier: Apache-2.0
"""Event tables in three rooms through the library's double DQN, its data module and a trainer, as users run them."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import lightning as L
import numpy as np
import torch

from lightning_replay.agents import DQN
from lightning_replay.envs.grids import ThreeRooms
from lightning_replay.lit import ReplayDataModule
from tests.benchmarks.learning.experiment import Experiment, Settings
from tests.benchmarks.learning.experiments import event_tables
from tests.benchmarks.learning.learners.three_rooms import ONE_HOT, Checks, Table, filled_replay
from tests.benchmarks.learning.learners.trainers import quiet_trainer
from tests.benchmarks.learning.recorder import Recorder


class CheckGreedy(L.Callback):
    """Plays the greedy policy at equal intervals of environment steps."""

    def __init__(self, checks: Checks, every: int) -> None:
        self._checks, self._every = checks, every

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: object) -> None:
        """Plays it where the number of steps is a multiple of the interval."""
        steps = trainer.datamodule.env_steps_done
        if steps % self._every == 0:
            with torch.no_grad():
                self._checks.add(steps, pl_module.act(ONE_HOT, explore=False).numpy()[None])


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records what ``event-tables`` records."""
    (seed,) = seeds
    table = Table.of(ThreeRooms())
    replay, walked = filled_replay(table, settings, seed)

    def three_rooms() -> gymnasium.Env:
        return ThreeRooms(max_steps=settings["episode_steps"], one_hot=True)

    L.seed_everything(seed, verbose=False)
    agent = DQN.for_env(
        three_rooms,
        **{name: settings[name] for name in ("hidden_sizes", "learning_rate", "discount", "target_update_rate")},
        exploration_start=settings["exploration"],
        exploration_end=settings["exploration"],
    )
    data = ReplayDataModule(
        three_rooms,
        replay,
        env_steps=settings["env_steps"],
        warmup_steps=settings["warmup_steps"],
        updates_per_training_step=settings["warmup_steps"],
        seed=seed,
    )
    checks = Checks(table, out)
    quiet_trainer(CheckGreedy(checks, settings["check_every"])).fit(agent, datamodule=data)
    out.final(**checks.final(settings["env_steps"]), walked=np.array([walked]))


OF_STACKED_SEEDS = ("inputs", "steps_per_draw", "updates_per_draw")
ARMS = ("uniform", "event table: goal", event_tables.GAP_AND_GOAL, "history 1", "correction: mixture")

EXPERIMENTS = (
    Experiment(
        name="event-tables-agent",
        title="Three rooms, the library's double DQN and data module: event tables",
        claim=event_tables.CLAIM,
        task="As event-tables, each seed by itself in lightning_replay.agents.DQN with ReplayDataModule and a trainer: "
        "the replay is filled by the walk to the first goal, and one batch of 8 rows is drawn for each step. The first "
        "8 of the 12,000 steps are random.",
        length=event_tables.LENGTH,
        arms={arm: event_tables.ARMS[arm] for arm in ARMS},
        settings={name: value for name, value in event_tables.SETTINGS.items() if name not in OF_STACKED_SEEDS}
        | {"batch_size": 8, "warmup_steps": 8},
        fast=event_tables.FAST,
        seeds=range(340, 350),
        pilot_seeds=range(4),
        measure=event_tables.MEASURE,
        also=event_tables.ALSO,
        panels=(event_tables.greedy_panel(()),),
        xlabel="environment steps from the first goal",
        run=run,
    ),
)
