# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped, and the run without a break that they are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch

from lightning_replay.lit import ReplayCheckpoint, ReplayDataModule
from tests.unit.lit.toys import Counting, Tiny, make_replay, make_trainer

RUN = {"env_steps": 60, "warmup_steps": 20, "seed": 0, "updates_per_epoch": 10, "num_envs": 2}


def make_data(prioritized: bool = False, env=Counting, **options) -> ReplayDataModule:
    return ReplayDataModule(env, make_replay(prioritized), **(RUN | options))


class Agent(Tiny):
    """Does something before an update, and moves its weight after each training step, as target networks do."""

    def __init__(self, at: int = 0, act: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.at, self.before_update = at, act

    def update(self, batch):
        if self.trainer.datamodule.updates_done == self.at and self.before_update is not None:
            self.before_update()
        return super().update(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        with torch.no_grad():
            self.weight.mul_(0.999)


class CloseAt(L.Callback):
    """Closes the environments between two training steps, so that the next ones begin new episodes."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_start(self, trainer, pl_module) -> None:
        data = trainer.datamodule
        data.pause_hooks.append(lambda between: data.collection.close() if data.updates_done == self.update else None)


def send(number: int, times: int = 1) -> Callable[[], None]:
    def act() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return act


def fail() -> None:
    raise ZeroDivisionError("of the test")


def fit(directory: Path, agent, data, callbacks=(), **options) -> L.Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(directory, [ReplayCheckpoint(directory / "run"), *callbacks])
    trainer.fit(agent, datamodule=data, **options)
    return trainer


def counts_of(trainer: L.Trainer) -> tuple[int, ...]:
    data, batches = trainer.datamodule, trainer.fit_loop.epoch_loop.batch_progress
    steps = trainer.global_step, batches.total.completed, batches.current.completed, trainer.current_epoch
    return (data.env_steps_done, data.updates_done, *steps)
