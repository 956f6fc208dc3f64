# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood mixup on MuJoCo at the paper's replay ratio of 20: is more learned from the same steps?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import gymnasium

from lightning_replay import Replay, recipes
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.recorder import Recorder

if TYPE_CHECKING:
    from tests.benchmarks.learning.learners.stacked_runs import StackedRuns

FIRST_EVALUATION_SEED = 10_000
PAPER = "Sander et al. 2022, https://proceedings.mlr.press/v168/sander22a.html"


def updates_per_draw(settings: Settings) -> int:
    """Those of an environment step, except where a setting is given: priorities change with every update."""
    return settings.get("updates_per_draw", settings["updates_per_env_step"])


def replay_of(settings: Settings, seed: int) -> Replay:
    """The replay of an arm; the batches of ``updates_per_draw`` updates are drawn at once."""
    capacity, rows = settings["capacity"], settings["batch_size"] * updates_per_draw(settings)
    if settings["replay"] == "uniform":
        return recipes.uniform(capacity, rows, seed=seed)
    if settings["replay"] == "prioritized":
        exponents = {name: settings[name] for name in ("priority_exponent", "importance_exponent")}
        return recipes.prioritized(capacity, rows, **exponents, seed=seed)
    mixing = {"mixup_concentration": settings["mixup_concentration"], "seed": seed}
    if settings["replay"] == "ct":
        return recipes.continuous_transition(capacity, rows, **mixing)
    if settings["replay"] == "mixup":
        return recipes.mixup(capacity, rows, **mixing)
    assert settings["replay"] == "nmer", settings["replay"]
    return recipes.neighborhood_mixup(capacity, rows, num_neighbors=settings["num_neighbors"], **mixing)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Mean returns of evaluation episodes: before the first update, then at equal intervals."""
    from tests.benchmarks.learning.learners.stacked_runs import StackedRuns

    play(settings, seeds, out, StackedRuns, replay_of)


def play(
    settings: Settings,
    seeds: Sequence[int],
    out: Recorder,
    runs_of: type[StackedRuns],
    replay_of: Callable[[Settings, int], Replay],
) -> None:
    """Plays, learns and evaluates with the runs and the replays of an experiment."""
    from tests.benchmarks.learning.learners.stacked_runs import quiet_mujoco
    from tests.benchmarks.learning.learners.stacked_td3 import StackedTD3

    quiet_mujoco()
    one = gymnasium.make(settings["env"], **settings["env_kwargs"])
    sizes = (one.observation_space.shape[0], one.action_space.shape[0])
    options = {"hidden_sizes": settings["hidden_sizes"], "learning_rate": settings["learning_rate"]}
    agent = StackedTD3(*sizes, seeds, layer_norm=settings.get("layer_norm", False), **options)
    warmup, every = settings["warmup_steps"], settings["evaluate_every"]
    runs = runs_of(
        agent,
        settings["env"],
        [replay_of(settings, seed) for seed in seeds],
        seeds,
        warmup,
        settings["updates_per_env_step"],
        updates_per_draw(settings),
        settings["env_kwargs"],
        settings.get("num_envs", 1),
    )
    if out.resume_from is not None:
        runs.load(out.resume_from)
    for env_steps in range(max(warmup, runs.env_steps + every), settings["env_steps"] + 1, every):
        runs.play(env_steps)
        out.record(env_steps, **{"return": runs.evaluate(settings["episodes"], FIRST_EVALUATION_SEED)})
        out.checkpoint(runs.save)


FAST: Settings = {"env_steps": 120, "warmup_steps": 100, "evaluate_every": 10, "env_kwargs": {"max_episode_steps": 50}}
SHORT = Experiment(
    name="nmer-short",
    title="HalfCheetah-v5, TD3 at a replay ratio of 20: neighbourhood mixup",
    claim="neighbourhood mixup learns more from the same steps than uniform replay at the same replay ratio, "
    f"HalfCheetah 6467 to 9340 after 200,000 steps ({PAPER}). The first 8,000 steps, not the headline.",
    task="TD3, 20 updates per environment step; networks of 64 and 64 units in place of the paper's 400 and 300 "
    "and a learning rate of 1e-3 in place of 5e-4, because the runs are short. 5,000 random steps, equal for both "
    "arms of a seed, then 3,000 learned from, 60,000 updates. Two evaluation episodes every 500 steps.",
    length="{env_steps:,} steps",
    arms={
        "uniform": {"replay": "uniform"},
        "neighbourhood mixup": {"replay": "nmer", "num_neighbors": 10, "mixup_concentration": 0.75},
    },
    settings={
        "env": "HalfCheetah-v5",
        "env_kwargs": {},
        "env_steps": 8_000,
        "capacity": 8_000,
        "warmup_steps": 5_000,
        "evaluate_every": 500,
        "episodes": 2,
        "batch_size": 100,
        "updates_per_env_step": 20,
        "hidden_sizes": [64, 64],
        "learning_rate": 1e-3,
    },
    fast=FAST,
    seeds=range(100, 110),
    pilot_seeds=range(80, 86),
    measure=mean_of("return", "mean return over the run", digits=0),
    also=(last_of("return", 3, "mean return of the last three evaluations", digits=0),),
    panels=(Panel("return", "evaluation return"),),
    xlabel="environment steps, the first 5,000 random",
    seeds_together=10,
    run=run,
    notes="Six seeds, 80 to 85, were run before with the same settings and missed the criterion that was fixed for "
    "them, three standard errors; their results were not kept. Then these ten were fixed.",
)

MIXUP = SHORT.arms["neighbourhood mixup"]
CONTINUOUS: Settings = {"replay": "ct", "mixup_concentration": 0.75}
FOUR_ARMS: dict[str, Settings] = {
    "uniform": {"replay": "uniform"},
    "neighborhood mixup": MIXUP,
    "uniform, layer norm": {"replay": "uniform", "layer_norm": True},
    "neighborhood mixup, layer norm": {**MIXUP, "layer_norm": True},
}
FOUR_COMPARISONS = [
    ("neighborhood mixup, layer norm", "uniform, layer norm"),
    ("neighborhood mixup", "uniform"),
    ("uniform, layer norm", "uniform"),
    ("neighborhood mixup, layer norm", "neighborhood mixup"),
]
NORMALIZED = replace(
    SHORT,
    name="nmer-norm",
    title="HalfCheetah-v5, TD3 at a replay ratio of 20: neighborhood mixup, with and without layer normalization",
    claim="neighborhood mixup learns more from the same steps than uniform replay at the same ratio; critics of its "
    f"paper have no normalization ({PAPER}). Layer normalization in the critics alone carries high replay ratios (Ball "
    "et al. 2023, https://arxiv.org/abs/2302.02948; Nauman et al. 2024, https://arxiv.org/abs/2403.00514).",
    task="As `nmer-short`, with ten other seeds: TD3, 20 updates per environment step, networks of 64 and 64 units, "
    "5,000 random steps, equal for all arms of a seed, then 3,000 learned from. In two arms, layer normalization "
    "precedes each ReLU of the critics.",
    arms={
        **FOUR_ARMS,
        "continuous transitions": CONTINUOUS,
        "continuous transitions, layer norm": {**CONTINUOUS, "layer_norm": True},
    },
    seeds=range(700, 710),
    comparisons=[
        *FOUR_COMPARISONS,
        ("continuous transitions", "uniform"),
        ("continuous transitions, layer norm", "uniform, layer norm"),
        ("neighborhood mixup, layer norm", "continuous transitions, layer norm"),
    ],
    notes="",
)
FULL = replace(
    NORMALIZED,
    name="nmer-full",
    title="HalfCheetah-v5, TD3, 200,000 steps, the paper's length: neighborhood mixup, with and without normalization",
    task="As `nmer-50k`, at the full length of the paper: TD3, 20 updates per environment step, batches of 100, "
    "learning rate 5e-4, 10,000 random steps, equal for all arms of a seed; networks of 64 and 64 units in place of "
    "400 and 300. In two arms, layer normalization precedes each ReLU of the critics. Two evaluation episodes every "
    "5,000 steps.",
    arms=FOUR_ARMS,
    comparisons=FOUR_COMPARISONS,
    headline=FOUR_COMPARISONS[:2],
    settings={
        **SHORT.settings,
        "env_steps": 200_000,
        "capacity": 200_000,
        "warmup_steps": 10_000,
        "evaluate_every": 5_000,
        "learning_rate": 5e-4,
    },
    seeds=range(720, 725),
    pilot_seeds=(),
    xlabel="environment steps, the first 10,000 random",
    seeds_together=5,
)

EXPERIMENTS = (SHORT, NORMALIZED, FULL)
