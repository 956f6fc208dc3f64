# SPDX-License-Identifier: Apache-2.0
"""Event tables on LunarLanderContinuous-v3 with SAC: steps to a mean return of 200."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, last_of, mean_of, steps_to
from tests.benchmarks.learning.recorder import Recorder

SOLVED = 200.0
FIRST_EVALUATION_SEED = 10_000


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records mean returns of evaluation episodes, and the steps to the first mean return of at least 200."""
    from tests.benchmarks.learning.learners.lander import ACTION_SIZE, OBSERVATION_SIZE, LanderRuns, replay_of
    from tests.benchmarks.learning.learners.stacked_sac import StackedSAC

    names = ("hidden_sizes", "learning_rate", "discount", "target_update_rate")
    agent = StackedSAC(OBSERVATION_SIZE, ACTION_SIZE, seeds, **{name: settings[name] for name in names})
    replays = [replay_of(settings, seed) for seed in seeds]
    runs = LanderRuns(agent, replays, seeds, settings["warmup_steps"], settings["steps_per_draw"])
    if out.resume_from is not None:
        runs.load(out.resume_from)
    every = settings["evaluate_every"]
    for env_steps in range(runs.env_steps + every, settings["env_steps"] + 1, every):
        runs.play(env_steps)
        out.record(env_steps, **{"return": runs.evaluate(settings["episodes"], FIRST_EVALUATION_SEED)})
        out.checkpoint(runs.save)
    returns = np.array(out.content["curves"]["return"])  # [points, seeds]
    is_solved = returns >= SOLVED
    first = np.where(is_solved.any(0), every * (1 + is_solved.argmax(0)), settings["env_steps"])
    out.final(steps_to_200=first, reached_200=is_solved.any(0))


EVENTS: Settings = {
    "replay": "event tables",
    "events": ["both legs down", "near the centre"],
    "history_length": 200,
}
BOTH = "event tables: both legs down, near the centre"
ARMS: dict[str, Settings] = {
    "uniform": {"replay": "uniform"},
    BOTH: EVENTS,
    "history 1": EVENTS | {"history_length": 1},
    "prioritized": {"replay": "prioritized", "priority_exponent": 0.6, "importance_exponent": 0.4},
}

EXPERIMENTS = (
    Experiment(
        name="lunar-lander",
        title="LunarLanderContinuous-v3, SAC: event tables",
        claim="with tables of the steps that led to two events, both legs on the ground between the flags and a place "
        "near the centre of the pad, histories of 200 steps, SAC needs about half of the epochs of uniform draws "
        "(Kompella et al. 2022, https://arxiv.org/abs/2211.00576).",
        task="Stacked SAC that equals the library's, 64 and 64 units, batches of 64 rows, learning rate 1e-3, target "
        "rate 0.01; 2,000 random steps, then an update for each step, whose rows are drawn for eight updates at once. "
        "Half of the rows come from the two event tables of 10,000 rows each. Regions: both legs down and x between "
        "the flags at ±0.2; x and y within ±0.1. Every 2,000 steps ten greedy episodes are played from the same ten "
        "first states; a run whose mean return never reached 200 counts with 120,000 steps, a lower bound. Pilot "
        "seeds with uniform draws chose the number of steps alone: at 58,000, two of four landed and two hovered "
        "until time ran out.",
        length="{env_steps:,} steps",
        arms=ARMS,
        settings={
            "env_steps": 120_000,
            "warmup_steps": 2_000,
            "evaluate_every": 2_000,
            "episodes": 10,
            "hidden_sizes": [64, 64],
            "learning_rate": 1e-3,
            "discount": 0.99,
            "target_update_rate": 0.01,
            "steps_per_draw": 8,
            "batch_size": 64,
            "capacity": 120_000,
            "table_capacity": 10_000,
            "default_share": 0.5,
        },
        fast={"env_steps": 640, "warmup_steps": 520, "evaluate_every": 80, "episodes": 1},
        seeds=range(600, 608),
        pilot_seeds=range(4),
        measure=steps_to("steps_to_200", "steps to a mean return of 200"),
        also=(
            final("reached_200", "share that reached it", digits=2),
            mean_of("return", "mean return over the run", digits=0),
            last_of("return", 5, "mean return of the last five evaluations", digits=0),
        ),
        panels=(Panel("return", "evaluation return", ("uniform", BOTH)), Panel("return", "evaluation return")),
        run=run,
        seeds_together=8,
    ),
)
