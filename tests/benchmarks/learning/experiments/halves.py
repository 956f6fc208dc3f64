# SPDX-License-Identifier: Apache-2.0
"""Demonstrations in half of each batch (RLPD): SAC on a sparse task, beside SAC without and with one buffer of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import lightning as L
import numpy as np

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.recorder import Recorder

FIRST_EVALUATION_SEED = 10_000


def car() -> gymnasium.Env[Any, Any]:
    """MountainCarContinuous whose observations are between -1 and 1."""
    return gymnasium.wrappers.RescaleObservation(gymnasium.make("MountainCarContinuous-v0"), -1.0, 1.0)


def demonstrate(replay: Any, episodes: int, noise: float, seed: int) -> None:
    """Stores episodes that push in the direction of motion, with noise on the actions."""
    from lightning_replay.collecting import VectorSteps

    environments = gymnasium.vector.SyncVectorEnv([car])
    steps, rng = VectorSteps(environments), np.random.default_rng(seed)
    observation, _ = steps.reset(seed=seed)
    while episodes:
        action = np.where(observation[:, 1:] >= 0, 1.0, -1.0) + noise * rng.standard_normal((1, 1))
        observation, _, terminated, truncated, _ = steps.step(np.clip(action, -1.0, 1.0).astype(np.float32))
        steps.store(replay)
        episodes -= int(terminated[0] or truncated[0])


class RecordReturns(L.Callback):
    def __init__(self, settings: Settings, out: Recorder) -> None:
        self.settings, self.out, self.next = settings, out, settings["evaluate_every"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *ignored: Any) -> None:
        from lightning_replay.lit.rollouts import episode_returns

        data = trainer.datamodule  # type: ignore[attr-defined]
        while data.env_steps_done >= self.next:
            returns = list(episode_returns(pl_module, car(), self.settings["episodes"], FIRST_EVALUATION_SEED))
            self.out.record(self.next, **{"return": [float(np.mean(returns))]})
            self.next += self.settings["evaluate_every"]


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records mean returns of greedy evaluation episodes."""
    from lightning_replay import recipes
    from lightning_replay.agents import SAC
    from lightning_replay.lit import ReplayDataModule
    from tests.benchmarks.learning.learners.trainers import quiet_trainer

    (seed,) = seeds
    L.seed_everything(seed, verbose=False)
    buffer = partial(recipes.uniform, batch_size=settings["batch_size"])
    replay: Any = buffer(capacity=settings["capacity"])
    demonstrations = buffer(capacity=settings["capacity"]) if settings["share"] is not None else replay
    if settings["demonstrations"]:
        demonstrate(demonstrations, settings["demonstrations"], settings["noise"], seed)
    if settings["share"] is not None:
        replay = recipes.mixed(
            online=replay, offline=demonstrations, share=settings["share"], batch_size=settings["batch_size"]
        )
    data = ReplayDataModule(
        car, replay, env_steps=settings["env_steps"], warmup_steps=settings["warmup_steps"], seed=seed
    )
    rates = {f"{name}_learning_rate": settings["learning_rate"] for name in ("actor", "critic", "entropy")}
    sizes = tuple(settings["hidden_sizes"])
    agent = SAC.for_env(car, hidden_sizes=sizes, layer_norm=settings.get("layer_norm", False), **rates)
    quiet_trainer(RecordReturns(settings, out)).fit(agent, datamodule=data)


TASK = (
    "SAC with 64 and 64 units, learning rate 1e-3, batches of 64, an update for each step after the first "
    "1,000, which are random; observations scaled to [-1, 1]. The reward is 100 at the goal less a tenth of the "
    "squared action in each step: an agent that has never seen the goal learns to stand still, return 0. The 100 "
    "demonstrations are episodes of a script that pushes in the direction of motion, with normal noise of 0.3 on "
    "the actions, about 11,000 rows and a return of about 90. In the arm of one buffer they lie in the uniform "
    "buffer before the first step, and online rows are added. Five greedy episodes every 1,000 steps from the "
    "same first states."
)
HALVES = Experiment(
    name="halves",
    title="MountainCarContinuous-v0, SAC: half of each batch from 100 demonstrations",
    claim="with offline rows in half of each batch an off-policy agent learns sparse tasks that it does not learn "
    "from online rows alone (RLPD, Ball et al. 2023, https://arxiv.org/abs/2302.02948, figure 1: Adroit and "
    "AntMaze). Their agent has ten critics, layer normalisation and 20 updates per step; here the draws alone "
    "differ.",
    task=TASK,
    length="{env_steps:,} steps",
    arms={
        "online alone": {"demonstrations": 0, "share": None},
        "halves": {"share": 0.5},
        "one buffer": {"share": None},
    },
    settings={
        "env_steps": 8_000,
        "warmup_steps": 1_000,
        "evaluate_every": 1_000,
        "episodes": 5,
        "demonstrations": 100,
        "noise": 0.3,
        "batch_size": 64,
        "capacity": 50_000,
        "hidden_sizes": [64, 64],
        "learning_rate": 1e-3,
    },
    fast={"env_steps": 260, "warmup_steps": 200, "evaluate_every": 130, "episodes": 1, "demonstrations": 2},
    seeds=range(900, 905),
    pilot_seeds=(80, 81),
    measure=mean_of("return", "mean return over the run", digits=1),
    also=(last_of("return", 2, "mean return of the last two evaluations", digits=1),),
    comparisons=[("halves", "online alone"), ("halves", "one buffer"), ("one buffer", "online alone")],
    panels=(Panel("return", "evaluation return"),),
    run=run,
)
NORMALIZED = replace(
    HALVES,
    name="halves-norm",
    title="MountainCarContinuous-v0, SAC with layer normalization: half of each batch from 100 demonstrations",
    claim="with offline rows in half of each batch an off-policy agent learns sparse tasks that it does not learn from "
    "online rows (RLPD, Ball et al. 2023, https://arxiv.org/abs/2302.02948). Layer normalization in the critics is "
    "part of their agent; here the comparison is repeated with it.",
    task=f"{TASK} Layer normalization precedes each ReLU of the critics; all else is as in `halves`.",
    settings={**HALVES.settings, "layer_norm": True},
    seeds=range(910, 920),
)
EXPERIMENTS = (HALVES, NORMALIZED)
