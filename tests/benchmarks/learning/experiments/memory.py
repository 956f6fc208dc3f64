# SPDX-License-Identifier: Apache-2.0
"""A cue that is asked for twenty steps after it was seen: a recurrent agent on sequences beside one without memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import lightning as L

from lightning_replay import recipes
from lightning_replay.agents import DQN, RecurrentDQN
from lightning_replay.envs.recall import RecallCue
from lightning_replay.lit import Evaluate, ReplayDataModule
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.learners.trainers import quiet_trainer
from tests.benchmarks.learning.recorder import Recorder


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the greedy return of 100 episodes at equal intervals of environment steps."""
    (seed,) = seeds
    make, length = partial(RecallCue, settings["num_cues"], settings["delay"]), settings["length"]
    L.seed_everything(seed, verbose=False)
    given = {name: settings[name] for name in ("learning_rate", "exploration_steps", "target_update_rate")}
    agent = (RecurrentDQN if settings["recurrent"] else DQN).for_env(make, **given)
    if settings["recurrent"]:
        replay = recipes.sequences(
            settings["capacity"],
            settings["batch_size"],
            length=length,
            overlap=settings["overlap"],
            priority_exponent=settings["priority_exponent"],
        )
    else:
        replay = recipes.uniform(settings["capacity"], settings["batch_size"] * length)
    data = ReplayDataModule(
        make,
        replay,
        env_steps=settings["env_steps"],
        warmup_steps=settings["warmup_steps"],
        updates_per_env_step=settings["updates_per_env_step"],
        seed=seed,
    )
    evaluation = Evaluate(settings["evaluate_every"], episodes=100)
    quiet_trainer(evaluation).fit(agent, datamodule=data)
    for steps, value in evaluation.history:
        out.record(steps, **{"return": [value]})


EXPERIMENTS = (
    Experiment(
        name="memory",
        title="RecallCue-v0, one of four cues is asked for twenty steps later",
        claim="R2D2 (Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX) learns tasks from sequences "
        "with stored recurrent states that an agent without memory cannot solve, and prioritizes the sequences.",
        task="RecallCue-v0 with four cues and a delay of 20: the return is 1 where the cue is named, 0.25 by guessing. "
        "RecurrentDQN (LSTM of 64 units, stored states) learns from 32 sequences of 21 steps, a whole episode, and DQN "
        "from as many single steps, once for every four steps. The first 500 steps are random. Pilot seeds chose "
        "number of cues, delay and length of the run; the options of the agents are their defaults.",
        length="{env_steps:,} steps",
        arms={
            "DQN, single rows": {"recurrent": False},
            "RecurrentDQN, sequences": {"recurrent": True},
            "RecurrentDQN, prioritized sequences": {"recurrent": True, "priority_exponent": 0.9},
        },
        settings={
            "env_steps": 12_000,
            "warmup_steps": 500,
            "updates_per_env_step": 0.25,
            "num_cues": 4,
            "delay": 20,
            "length": 21,
            "overlap": 0,
            "batch_size": 32,
            "capacity": 12_000,
            "priority_exponent": 0.0,
            "learning_rate": 1e-3,
            "target_update_rate": 0.005,
            "exploration_steps": 5_000,
            "evaluate_every": 500,
        },
        fast={"env_steps": 600, "evaluate_every": 300, "num_cues": 2, "delay": 10, "length": 11},
        seeds=range(400, 405),
        pilot_seeds=(0, 1),
        measure=mean_of("return", "mean return over the run"),
        also=(last_of("return", 3, "mean return of the last three evaluations"),),
        comparisons=(
            ("RecurrentDQN, sequences", "DQN, single rows"),
            ("RecurrentDQN, prioritized sequences", "DQN, single rows"),
            ("RecurrentDQN, prioritized sequences", "RecurrentDQN, sequences"),
        ),
        panels=(Panel("return", "greedy return"),),
        run=run,
    ),
)
