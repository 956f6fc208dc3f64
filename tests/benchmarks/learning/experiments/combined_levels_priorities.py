# SPDX-License-Identifier: Apache-2.0
"""Prioritized levels for the episodes and prioritized rows for the updates of an off-policy learner: locks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning_replay import Replay, recipes
from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels, scores
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, mean_of
from tests.benchmarks.learning.experiments.locks import expected_difficulty
from tests.benchmarks.learning.learners.combination_lock import LEVELS, NUM_ACTIONS
from tests.benchmarks.learning.learners.lock_dqn import OBSERVATION, LockRuns
from tests.benchmarks.learning.learners.minatar_dqn import StackedDQN
from tests.benchmarks.learning.recorder import Recorder


def levels_of(settings: Settings, seed: int) -> LevelSelector:
    """Uniform levels without a temperature, otherwise levels by the ranks of their scores."""
    if settings["score_temperature"] is None:
        return UniformLevels(range(LEVELS), seed=seed)
    return LevelBuffer(
        range(LEVELS),
        score=scores.L1ValueLoss(discount=settings["discount"], gae_lambda=settings["gae_lambda"]),
        score_temperature=settings["score_temperature"],
        staleness_weight=settings["staleness_weight"],
        seed=seed,
    )


def replay_of(settings: Settings, seed: int) -> Replay:
    """Uniform or prioritized draws from the newest rows."""
    capacity, rows = settings["capacity"], settings["batch_size"]
    if not settings["priority_exponent"]:
        return recipes.uniform(capacity, rows, seed=seed)
    exponents = {name: settings[name] for name in ("priority_exponent", "importance_exponent")}
    return recipes.prioritized(capacity, rows, **exponents, seed=seed)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Share of locks that the greedy actions open, and the expected difficulty of a replayed level."""
    # That nearly one level is replayed at this temperature is part of what is measured.
    warnings.filterwarnings("ignore", message=".*took the same level as the replay before")
    levels = [levels_of(settings, seed) for seed in seeds]
    sizes = (OBSERVATION, *settings["hidden_sizes"], NUM_ACTIONS)
    names = ("learning_rate", "discount", "updates_per_target")
    agent = StackedDQN(sizes, seeds, **{name: settings[name] for name in names})
    runs = LockRuns(agent, levels, [replay_of(settings, seed) for seed in seeds], seeds, settings)
    for number in range(1, settings["rounds"] + 1):
        runs.play_and_learn()
        if number % settings["rounds_per_point"] == 0:
            difficulty = [expected_difficulty(each, locks) for each, locks in zip(levels, runs.locks, strict=True)]
            out.record(number * settings["episodes_per_round"], success=runs.success(), difficulty=difficulty)
    out.final(success=runs.success())


PRIORITIES: Settings = {"priority_exponent": 0.6, "importance_exponent": 0.4}
LEVEL_REPLAY: Settings = {"score_temperature": 0.1, "staleness_weight": 0.3}

EXPERIMENTS = (
    Experiment(
        name="combined-levels-priorities",
        title="Combination locks, double DQN: level replay with prioritized replay",
        claim="none of a paper.",
        task="",
        arms={
            "uniform": {},
            "prioritized rows": PRIORITIES,
            "level replay": LEVEL_REPLAY,
            "both": LEVEL_REPLAY | PRIORITIES,
        },
        settings={
            "rounds": 400,
            "rounds_per_point": 10,
            "episodes_per_round": 16,
            "updates_per_round": 8,
            "exploration": 0.1,
            "capacity": 10_000,
            "batch_size": 64,
            "hidden_sizes": [64, 64],
            "learning_rate": 1e-3,
            "discount": 0.99,
            "gae_lambda": 0.95,
            "updates_per_target": 50,
            "score_temperature": None,
            "staleness_weight": None,
            "priority_exponent": 0.0,
            "importance_exponent": 0.0,
        },
        fast={"rounds": 20},
        seeds=range(300, 316),
        pilot_seeds=range(120, 128),
        measure=final("success", "success at the end"),
        also=(mean_of("success", "success over the run", skip=0),),
        comparisons=(
            ("prioritized rows", "uniform"),
            ("level replay", "uniform"),
            ("both", "uniform"),
            ("both", "prioritized rows"),
            ("both", "level replay"),
        ),
        panels=(
            Panel("success", "share of locks opened"),
            Panel("difficulty", "expected stages of a replayed lock"),
        ),
        xlabel="episodes",
        run=run,
        seeds_together=16,
    ),
)
