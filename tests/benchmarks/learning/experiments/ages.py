# SPDX-License-Identifier: Apache-2.0
"""Draws by age, alone and times a priority, at few and at many updates per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_replay import Age, Replay, recipes
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.experiments.nmer import play, updates_per_draw
from tests.benchmarks.learning.recorder import Recorder


def replay_of(settings: Settings, seed: int) -> Replay:
    """The replay of an arm: uniform or by loss-adjusted priorities, with or without an age."""
    capacity = settings["capacity"]
    rows = settings["batch_size"] * updates_per_draw(settings)
    age = None if settings["half_life"] is None else Age(settings["half_life"], settings["floor"])
    if settings["replay"] == "uniform":
        return recipes.uniform(capacity, rows, age=age, seed=seed)
    assert settings["replay"] == "prioritized", settings["replay"]
    adjusted = {"priority_exponent": 0.4, "min_priority": 1.0, "importance_exponent": 0.0}
    return recipes.prioritized(capacity, rows, **adjusted, age=age, seed=seed)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Mean returns of evaluation episodes: before the first update, then at equal intervals."""
    from tests.benchmarks.learning.learners.stacked_runs import StackedRuns

    play(settings, seeds, out, StackedRuns, replay_of)


CLAIM = (
    "draws that prefer recent rows learn more than uniform ones if the replay volume, the rows drawn per step, is low, "
    "and not less if it is high (truncated geometric replay, Korniak et al. 2026, https://arxiv.org/abs/2605.10236); "
    "priorities that fade with age are better than priorities (DR.Q, Lyu et al. 2026, "
    "https://arxiv.org/abs/2605.11711; decay of FoG, Kang et al. 2025, https://arxiv.org/abs/2507.02712)."
)
ARMS = "Weights of ages fall by half in {half_life} rows to a floor of 0.1; priorities are loss-adjusted, α 0.4."
PLAIN: Settings = {"half_life": None}
PRIORITIZED: Settings = {"replay": "prioritized", "updates_per_draw": 1}
COMPARISONS = [
    ("truncated geometric", "uniform"),
    ("faded prioritized", "prioritized"),
    ("prioritized", "uniform"),
    ("faded prioritized", "uniform"),
]
FAST: Settings = {"env_kwargs": {"max_episode_steps": 50}}
FEW = Experiment(
    name="age-few-half-cheetah",
    title="HalfCheetah-v5, TD3, 16 environments, one update for 16 steps: draws by age",
    claim=CLAIM,
    task="TD3 with 64 and 64 units, learning rate 1e-3; 16 environments, and one update of 256 rows for each step of "
    "all; 16,000 random steps, equal for all arms of a seed. Two evaluation episodes every 16,000 steps. The "
    f"length was chosen on pilot seeds, so that the uniform arm learns. {ARMS.format(half_life='6,931')}",
    length="{env_steps:,} steps",
    arms={
        "uniform": {"replay": "uniform", **PLAIN},
        "truncated geometric": {"replay": "uniform"},
        "prioritized": {**PRIORITIZED, **PLAIN},
        "faded prioritized": PRIORITIZED,
    },
    settings={
        "env": "HalfCheetah-v5",
        "env_kwargs": {},
        "env_steps": 200_000,
        "capacity": 200_000,
        "warmup_steps": 16_000,
        "evaluate_every": 16_000,
        "episodes": 2,
        "batch_size": 256,
        "num_envs": 16,
        "updates_per_env_step": 0.0625,
        "updates_per_draw": 1,
        "hidden_sizes": [64, 64],
        "learning_rate": 1e-3,
        "half_life": 6_931,
        "floor": 0.1,
    },
    fast={**FAST, "env_steps": 1_280, "warmup_steps": 320, "evaluate_every": 480},
    seeds=range(740, 748),
    pilot_seeds=(90, 91),
    measure=mean_of("return", "mean return over the run", digits=0),
    also=(last_of("return", 3, "mean return of the last three evaluations", digits=0),),
    comparisons=COMPARISONS,
    panels=(Panel("return", "evaluation return"),),
    run=run,
    seeds_together=8,
)
MANY = replace(
    FEW,
    name="age-many-half-cheetah",
    title="HalfCheetah-v5, TD3 at a replay ratio of 20: draws by age",
    task="TD3, 20 updates of 100 rows per environment step; 64 and 64 units, learning rate 1e-3; 5,000 random steps, "
    "equal for all arms of a seed, then 3,000 learned from, as in `nmer-short`. Two evaluation episodes every 500 "
    f"steps. {ARMS.format(half_life='1,000')}",
    settings={
        **FEW.settings,
        "env_steps": 8_000,
        "capacity": 8_000,
        "warmup_steps": 5_000,
        "evaluate_every": 500,
        "batch_size": 100,
        "num_envs": 1,
        "updates_per_env_step": 20,
        "updates_per_draw": 20,
        "half_life": 1_000,
    },
    fast={**FAST, "env_steps": 120, "warmup_steps": 100, "evaluate_every": 10},
)
PENDULUM: Settings = {"env": "InvertedDoublePendulum-v5"}
FEW_PENDULUM = replace(
    FEW,
    name="age-few-double-pendulum",
    title="InvertedDoublePendulum-v5, TD3, 16 environments, one update for 16 steps: draws by age",
    settings={**FEW.settings, **PENDULUM, "env_steps": 160_000, "capacity": 160_000},
    seeds=range(750, 758),
)
MANY_PENDULUM = replace(
    MANY,
    name="age-many-double-pendulum",
    title="InvertedDoublePendulum-v5, TD3 at a replay ratio of 20: draws by age",
    task=MANY.task.replace("5,000 random", "1,000 random").replace(", as in `nmer-short`", ""),
    settings={**MANY.settings, **PENDULUM, "env_steps": 4_000, "capacity": 4_000, "warmup_steps": 1_000},
    seeds=range(750, 758),
)
EXPERIMENTS = (FEW, MANY, FEW_PENDULUM, MANY_PENDULUM)
