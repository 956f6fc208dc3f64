# SPDX-License-Identifier: Apache-2.0
"""Prioritized levels for the episodes and prioritized rows for the updates of an off-policy learner: locks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_replay import Replay, recipes
from lightning_replay.levels import LevelSelector
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, combination, final, mean_of
from tests.benchmarks.learning.learners import level_choice
from tests.benchmarks.learning.learners.combination_lock import LEVELS, NUM_ACTIONS
from tests.benchmarks.learning.learners.lock_dqn import OBSERVATION, LockRuns
from tests.benchmarks.learning.learners.stacked_dqn import StackedDQN
from tests.benchmarks.learning.recorder import Recorder


def levels_of(settings: Settings, seed: int) -> LevelSelector:
    """Returns uniform levels without a temperature, otherwise levels by the ranks of their scores."""
    of_score = {name: settings[name] for name in ("discount", "gae_lambda")}
    return level_choice.levels_of(settings, range(LEVELS), seed, **of_score)


def replay_of(settings: Settings, seed: int) -> Replay:
    """Returns a replay with uniform or prioritized draws from the newest rows."""
    capacity, rows = settings["capacity"], settings["batch_size"]
    if not settings["priority_exponent"]:
        return recipes.uniform(capacity, rows, seed=seed)
    exponents = {name: settings[name] for name in ("priority_exponent", "importance_exponent")}
    return recipes.prioritized(capacity, rows, **exponents, seed=seed)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the share of locks that the greedy actions open, and the expected difficulty of a replayed level."""
    level_choice.ignore_repeat_warning()
    levels = [levels_of(settings, seed) for seed in seeds]
    sizes = (OBSERVATION, *settings["hidden_sizes"], NUM_ACTIONS)
    names = ("learning_rate", "discount", "updates_per_target")
    agent = StackedDQN(sizes, seeds, **{name: settings[name] for name in names})
    runs = LockRuns(agent, levels, [replay_of(settings, seed) for seed in seeds], seeds, settings)
    for number in range(1, settings["rounds"] + 1):
        runs.play_and_learn()
        if number % settings["rounds_per_point"] == 0:
            pairs = zip(levels, runs.locks, strict=True)
            difficulty = [level_choice.expected_difficulty(each, locks.difficulty) for each, locks in pairs]
            out.record(number * settings["episodes_per_round"], success=runs.success(), difficulty=difficulty)
    out.final(success=runs.success())


PRIORITIES: Settings = {"priority_exponent": 0.6, "importance_exponent": 0.4}
LEVEL_REPLAY: Settings = {"score_temperature": 1.0, "staleness_weight": 0.3}
NARROW: Settings = LEVEL_REPLAY | {"score_temperature": 0.1}

EXPERIMENTS = (
    Experiment(
        name="combined-levels-priorities",
        title="Combination locks, double DQN: prioritized levels with prioritized rows",
        claim="none for an off-policy learner. Of on-policy learners, replay of levels by score and staleness is "
        "better than uniform levels (Jiang et al. 2021, https://arxiv.org/abs/2010.03934).",
        task="The locks of the experiment `locks`, played by a double DQN with 64 and 64 units that sees the stage and "
        "how many are to go, as one-hot vectors: 150 rounds of 16 episodes with 10 % random actions, after each of "
        "which 4 batches of 32 are drawn from the last 10,000 steps. Levels are scored by the L1 loss of the network's "
        "largest action value, at temperature 1 and staleness weight 0.3; rows by TD errors, α 0.6 and β 0.4. Success "
        "is the share of the locks that the greedy actions open. Pilot seeds chose the number of rounds and updates, "
        "of which more solve every lock with uniform levels, and the temperature, out of 0.1, 0.3 and 1; the paper's "
        "0.1, which was worse than uniform levels there, is a further arm.",
        length="{rounds} rounds of {episodes_per_round} episodes",
        arms={
            "uniform": {},
            "prioritized rows": PRIORITIES,
            "level replay": LEVEL_REPLAY,
            "both": LEVEL_REPLAY | PRIORITIES,
            "level replay, temperature 0.1": NARROW,
            "both, temperature 0.1": NARROW | PRIORITIES,
        },
        settings={
            "rounds": 150,
            "rounds_per_point": 10,
            "episodes_per_round": 16,
            "updates_per_round": 4,
            "exploration": 0.1,
            "capacity": 10_000,
            "batch_size": 32,
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
        seeds=range(300, 332),
        pilot_seeds=range(120, 124),
        measure=mean_of("success", "success over the run", skip=0),
        also=(final("success", "success at the end"),),
        comparisons=(
            ("prioritized rows", "uniform"),
            ("level replay", "uniform"),
            ("both", "uniform"),
            ("both", "prioritized rows"),
            ("both", "level replay"),
            ("level replay, temperature 0.1", "uniform"),
            ("both, temperature 0.1", "level replay, temperature 0.1"),
        ),
        headline=combination("prioritized rows", "level replay")["headline"],
        panels=(
            Panel("success", "share of locks opened"),
            Panel("difficulty", "expected stages of a replayed lock"),
        ),
        xlabel="episodes",
        run=run,
        seeds_together=16,
        notes="Pilots with temperature 1 also had staleness weight 0.1. Why level replay is not better is open.",
    ),
)
