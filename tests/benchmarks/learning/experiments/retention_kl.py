# SPDX-License-Identifier: Apache-2.0
"""Retention with the surprise of the paper's agent: Rainbow with noisy layers, KL divergence, on MinAtar's Breakout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import lightning as L
import numpy as np

from lightning_replay import Replay
from lightning_replay.agents import Rainbow
from lightning_replay.envs.atari import MinAtarGame
from lightning_replay.lit import ReplayDataModule
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of
from tests.benchmarks.learning.experiments.retention import PAPER, RETURN, replay_of
from tests.benchmarks.learning.learners.trainers import quiet_trainer
from tests.benchmarks.learning.recorder import Recorder

EPISODES = 50  # over which a return is averaged
OF_FIFO = {"refused": 0, "age_over_capacity": 0.5, "terminal_over_newest": 1.0, "td_error_over_newest": 1.0}
NETWORK = ("hidden_size", "learning_rate", "discount", "target_update_every", "value_low", "value_high")


class Returns(gymnasium.Wrapper):
    """Adds the return of each finished episode to a list."""

    def __init__(self, env: gymnasium.Env, returns: list[float]) -> None:
        super().__init__(env)
        self._returns, self._total = returns, 0.0

    def reset(self, **options: Any) -> Any:
        """Begins an episode."""
        self._total = 0.0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        """Takes a step of the game."""
        step = super().step(action)
        self._total += float(step[1])
        if step[2] or step[3]:
            self._returns.append(self._total)
        return step


class Record(L.Callback):
    """Records returns and the figures of the replay at equal intervals of environment steps."""

    def __init__(self, out: Recorder, every: int, replay: Replay, returns: list[float]) -> None:
        self._out, self._every, self._replay, self._returns = out, every, replay, returns

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: object) -> None:
        """Records where the number of steps is a multiple of the interval."""
        steps = trainer.datamodule.env_steps_done
        if steps % self._every == 0:
            stats = OF_FIFO | self._replay.stats()
            figures = {name: [float(stats[name])] for name in OF_FIFO} | {"refused": [stats["refused"] / steps]}
            recent = self._returns[-EPISODES:]
            self._out.record(steps, episode_return=[float(np.mean(recent)) if recent else 0.0], **figures)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records returns during the run and figures of the kept rows; an interrupted run starts over."""
    (seed,) = seeds
    returns: list[float] = []

    def game() -> gymnasium.Env:
        options = {name: settings[name] for name in ("sticky_action_probability", "max_steps")}
        return Returns(MinAtarGame("breakout", **options), returns)

    L.seed_everything(seed, verbose=False)
    replay = replay_of(settings, seed, storage={})
    agent = Rainbow.for_env(
        game,
        channels=(16,),
        kernel_sizes=(3,),
        strides=(1,),
        samples_by_surprise=True,
        **{name: settings[name] for name in NETWORK},
    )
    data = ReplayDataModule(
        game,
        replay,
        env_steps=settings["env_steps"],
        warmup_steps=settings["warmup_steps"],
        updates_per_env_step=1 / settings["steps_per_update"],
        updates_per_training_step=settings["updates_per_training_step"],
        seed=seed,
    )
    quiet_trainer(Record(out, settings["check_every"], replay, returns)).fit(agent, datamodule=data)


EXPERIMENTS = (
    Experiment(
        name="kl-retention",
        title="MinAtar's Breakout without sticky actions, Rainbow: retention by KL surprise, room for 500 of 32,000",
        claim=PAPER,
        task="The library's Rainbow with double and dueling networks, distributions of 51 atoms and noisy layers, "
        "through its data module and a trainer; otherwise as `retention-breakout`. The surprise of retention, and the "
        "priority of draws in all arms, is the KL divergence of the target from the prediction.",
        length="{env_steps:,} steps",
        arms={"FIFO": {}, "retention": {"rule": "SurpriseOnPolicyness"}, "FIFO, 1,250": {"capacity": 1_250}},
        settings={
            "env_steps": 32_000,
            "sticky_action_probability": 0.0,
            "max_steps": 1_000,
            "hidden_size": 64,
            "value_low": -10.0,
            "value_high": 10.0,
            "capacity": 500,
            "rule": None,
            "n_steps": 1,
            "discount": 0.99,
            "batch_size": 32,
            "warmup_steps": 1_000,
            "steps_per_update": 2,
            "updates_per_training_step": 50,
            "target_update_every": 500,
            "learning_rate": 1e-3,
            "priority_exponent": 0.5,
            "importance_exponent": 0.4,
            "check_every": 1_000,
        },
        fast={"env_steps": 2_000, "warmup_steps": 1_000},
        seeds=range(2_700, 2_706),
        pilot_seeds=(0, 1),
        measure=RETURN,
        also=(
            last_of("episode_return", 8, "return in the last quarter", digits=2),
            last_of("age_over_capacity", 8, "mean age of kept rows over the capacity", digits=2),
            last_of("terminal_over_newest", 8, "share of episode ends over the newest rows'", digits=2),
            last_of("td_error_over_newest", 8, "root of the surprise over the newest rows'", digits=2),
            last_of("refused", 1, "share of rows refused", digits=3),
        ),
        comparisons=(("retention", "FIFO"), ("FIFO, 1,250", "FIFO"), ("retention", "FIFO, 1,250")),
        panels=(
            Panel("episode_return", "mean return of the last 50 episodes"),
            Panel("age_over_capacity", "mean age of kept rows over the capacity"),
        ),
        run=run,
    ),
)
