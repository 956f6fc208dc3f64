# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood mixup on MuJoCo at the paper's replay ratio of 20: is more learned from the first steps?"""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium

from lightning_replay import Replay, recipes
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.recorder import Recorder

FIRST_EVALUATION_SEED = 10_000


def replay_of(settings: Settings, seed: int) -> Replay:
    """The replay of an arm; the batches of one environment step are drawn at once."""
    capacity, rows = settings["capacity"], settings["batch_size"] * settings["updates_per_env_step"]
    if settings["replay"] == "uniform":
        return recipes.uniform(capacity, rows, seed=seed)
    options = {"num_neighbors": settings["num_neighbors"], "mixup_concentration": settings["mixup_concentration"]}
    return recipes.neighborhood_mixup(capacity, rows, **options, seed=seed)


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Mean returns of evaluation episodes: before the first update, then at equal intervals."""
    from tests.benchmarks.learning.learners.stacked_td3 import StackedRuns, StackedTD3, quiet_mujoco

    quiet_mujoco()
    one = gymnasium.make(settings["env"])
    sizes = (one.observation_space.shape[0], one.action_space.shape[0])
    agent = StackedTD3(*sizes, seeds, hidden_sizes=settings["hidden_sizes"], learning_rate=settings["learning_rate"])
    warmup, every = settings["warmup_steps"], settings["evaluate_every"]
    runs = StackedRuns(
        agent,
        settings["env"],
        [replay_of(settings, seed) for seed in seeds],
        seeds,
        warmup,
        settings["updates_per_env_step"],
        settings["env_kwargs"],
    )
    if out.resume_from is not None:
        runs.load(out.resume_from)
    for env_steps in range(max(warmup, runs.env_steps + every), settings["env_steps"] + 1, every):
        runs.play(env_steps)
        out.record(env_steps, **{"return": runs.evaluate(settings["episodes"], FIRST_EVALUATION_SEED)})
        out.checkpoint(runs.save)


EXPERIMENTS = (
    Experiment(
        name="nmer-short",
        title="HalfCheetah-v5, TD3 at a replay ratio of 20: neighbourhood mixup",
        claim="neighbourhood mixup learns more from the same steps than uniform replay at the same replay ratio, "
        "HalfCheetah 6467 to 9340 after 200,000 steps (Sander et al. 2022, "
        "https://proceedings.mlr.press/v168/sander22a.html). The first 8,000 steps, not the headline.",
        task="TD3, 20 updates per environment step; networks of 64 and 64 units in place of the paper's 400 and 300 "
        "and a learning rate of 1e-3 in place of 5e-4, because the runs are short. 5,000 random steps, equal for both "
        "arms of a seed, then 3,000 learned from, 60,000 updates. Two evaluation episodes every 500 steps.",
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
        fast={"env_steps": 120, "warmup_steps": 100, "evaluate_every": 10, "env_kwargs": {"max_episode_steps": 50}},
        seeds=range(100, 110),
        pilot_seeds=range(80, 86),
        measure=mean_of("return", "mean return over the run", digits=0),
        also=(last_of("return", 3, "mean return of the last three evaluations", digits=0),),
        panels=(Panel("return", "evaluation return"),),
        xlabel="environment steps, the first 5,000 random",
        seeds_together=10,
        run=run,
        notes="Six seeds, 80 to 85, were run before with the same settings and missed the criterion that was fixed for "
        "them, three standard errors: uniform replay -272 ± 69, neighbourhood mixup 418 ± 195, seed by seed 690 ± 246, "
        "above 0 for 5 of 6. Then these ten were fixed.",
    ),
)
