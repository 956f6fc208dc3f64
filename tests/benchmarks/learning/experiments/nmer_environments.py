# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood mixup on the paper's environments, beside the replays it was compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.benchmarks.learning.experiment import Experiment, Measure, Panel, Settings, last_of, mean_of
from tests.benchmarks.learning.experiments.nmer import FAST, PAPER, run
from tests.benchmarks.learning.recorder import SeedRun


def return_at(steps: int) -> Measure:
    """The paper's figure: a moving average over the last 11 evaluations, after so many steps."""

    def average(run: SeedRun) -> float:
        return float(np.mean(run.curves["return"][np.array(run.steps) <= steps][-11:]))

    return Measure(f"at {steps:,} steps", average, digits=0)


def arms_of(num_neighbors: int) -> dict[str, Settings]:
    """Arms in the order in which they are run, the most telling first."""
    mixing = {"mixup_concentration": 0.75}
    neighbors = {"replay": "nmer", "num_neighbors": num_neighbors} | mixing
    once = {"updates_per_env_step": 1}
    return {
        "uniform": {"replay": "uniform"},
        "neighbourhood mixup": neighbors,
        "uniform, ratio 1": {"replay": "uniform"} | once,
        "neighbourhood mixup, ratio 1": neighbors | once,
        "CT": {"replay": "ct"} | mixing,
        "naive mixup": {"replay": "mixup"} | mixing,
        "one neighbour": neighbors | {"num_neighbors": 1},
        "PER": {"replay": "prioritized", "updates_per_draw": 1, "priority_exponent": 0.6, "importance_exponent": 0.4},
    }


AT_BOTH_RATIOS = ("uniform", "neighbourhood mixup", "uniform, ratio 1", "neighbourhood mixup, ratio 1")
COMPARISONS = (
    ("neighbourhood mixup", "uniform"),
    ("neighbourhood mixup", "uniform, ratio 1"),
    ("neighbourhood mixup, ratio 1", "uniform, ratio 1"),
    *(("neighbourhood mixup", other) for other in ("CT", "naive mixup", "one neighbour", "PER")),
    *((other, "uniform") for other in ("uniform, ratio 1", "CT", "naive mixup", "one neighbour", "PER")),
)
PANELS = (
    Panel("return", "evaluation return", ("uniform", "neighbourhood mixup", "CT", "naive mixup"), "replay ratio 20"),
    Panel("return", "evaluation return", ("uniform", "neighbourhood mixup", "one neighbour", "PER"), "replay ratio 20"),
    Panel("return", "evaluation return", ("uniform, ratio 1", "neighbourhood mixup, ratio 1"), "replay ratio 1"),
)


def panels_of(arms: Sequence[str]) -> list[Panel]:
    """Panels with those of their arms that are run, each set of arms once."""
    shown = [(tuple(arm for arm in panel.arms if arm in arms), panel) for panel in PANELS]
    return list({own: dataclasses.replace(panel, arms=own) for own, panel in shown if own}.values())


SETTINGS: Settings = {
    "env_kwargs": {},
    "warmup_steps": 10_000,
    "episodes": 2,
    "batch_size": 100,
    "updates_per_env_step": 20,
    "hidden_sizes": [128, 128],
    "learning_rate": 5e-4,
}
PILOT_SEEDS = (90, 91, 92, 93)
PAPER_TABLE = (
    "The paper's TD3 after 200,000 steps, four seeds, best of the replay ratios 1, 5 and 20 for each buffer, networks "
    "of 400 and 300 units, environments of version 2:\n\n"
    "| | HalfCheetah | Walker2d | Ant | mean over six environments, with neighbourhood mixup = 100 |\n"
    "| --- | ---: | ---: | ---: | ---: |\n"
    "| uniform | 6,467 | 2,236 | 2,005 | |\n"
    "| neighbourhood mixup | 9,340 | 4,611 | 4,347 | 100 |\n"
    "| CT | | | | 78 |\n"
    "| one neighbour | | | | 77 |\n"
    "| naive mixup | | | | 64 |\n"
    "| PER | | | | 63 |"
)


def mujoco(
    name: str,
    env: str,
    figures: str,
    env_steps: int,
    seeds: Sequence[int],
    why: str,
    also: Sequence[Measure],
    num_neighbors: int = 10,
    evaluate_every: int = 1_000,
    env_kwargs: dict[str, Any] | None = None,
    seeds_together: int = 1,
    arms: Sequence[str] | None = None,
) -> Experiment:
    """The methods of the paper on one environment.

    Args:
        name: of the experiment.
        env: Gymnasium id.
        figures: of the paper, for this environment.
        env_steps: of each run, the first 10,000 random.
        seeds: those that count.
        why: what is special about this experiment, for the page.
        also: measures besides the primary one.
        num_neighbors: k.
        evaluate_every: steps between evaluations.
        env_kwargs: of the environment.
        seeds_together: in one unit; four take a third less time than one after the other, and a seed of 200,000 steps
            alone takes more than an hour.
        arms: those that are run; all by default.
    """
    every_arm = arms_of(num_neighbors)
    chosen = tuple(every_arm if arms is None else arms)
    own = {"env": env, "env_steps": env_steps, "capacity": env_steps, "evaluate_every": evaluate_every}
    env_kwargs = env_kwargs or {}
    return Experiment(
        name=name,
        title=f"{env}, TD3, {env_steps:,} steps: neighbourhood mixup and other replays",
        claim=f"at a replay ratio of 20 neighbourhood mixup learns more from the same steps than uniform replay at any "
        f"ratio, PER, CT, naive mixup and mixup with one neighbour; {env.partition('-')[0]} {figures} after 200,000 "
        f"steps ({PAPER}).",
        task=f"TD3, 20 updates per environment step, or 1 where an arm's name says so; networks of 128 and 128 units "
        "in place of the paper's 400 and 300, which cost five times as much; batches of 100, learning rate 5e-4, "
        f"10,000 random steps, equal for all arms of a seed. k = {num_neighbors} neighbours as in the paper, mixing "
        "coefficients Beta(0.75, 0.75) as in the authors' command line; PER with α 0.6 and β 0.4, drawn and updated at "
        f"every update. Two evaluation episodes every {evaluate_every:,} steps. {why}",
        length="{env_steps:,} steps",
        arms={arm: every_arm[arm] for arm in chosen},
        settings=SETTINGS | own | {"env_kwargs": env_kwargs},
        fast=FAST | {"capacity": 2_000, "env_kwargs": env_kwargs | FAST["env_kwargs"]},
        seeds=seeds,
        pilot_seeds=PILOT_SEEDS,
        measure=mean_of("return", "mean return over the run", digits=0),
        also=also,
        comparisons=[pair for pair in COMPARISONS if set(pair) <= set(chosen)],
        headline=[
            ("neighbourhood mixup", other) for other in ("uniform", "uniform, ratio 1", "CT", "PER") if other in chosen
        ],
        panels=panels_of(chosen),
        xlabel="environment steps, the first 10,000 random",
        seeds_together=seeds_together,
        run=run,
        notes=PAPER_TABLE,
    )


TARGETS = "Targets follow with a rate of 0.005 at every policy update, as in TD3's paper."
EIGHTH = (
    "An eighth of the paper's steps, for the four arms of the claim: 15,000 steps learned from, 300,000 updates at "
    "ratio 20."
)
WITHOUT_CONTACTS = "Without contact forces, which were always 0 in the paper's version."
ANT: dict[str, Any] = {"num_neighbors": 25, "env_kwargs": {"include_cfrc_ext_in_observation": False}}
LAST_THREE = last_of("return", 3, "mean return of the last three evaluations", digits=0)
EXPERIMENTS = (
    mujoco(
        "nmer-15k",
        "HalfCheetah-v5",
        "6467 to 9340",
        15_000,
        range(300, 308),
        "A first sweep over all arms that takes about an hour of one core, where one arm of 200,000 steps takes three: "
        f"5,000 steps learned from, eight seeds instead of the paper's four, not the headline. {TARGETS}",
        (LAST_THREE,),
        evaluate_every=500,
        seeds_together=4,
    ),
    mujoco(
        "nmer-50k",
        "HalfCheetah-v5",
        "6467 to 9340",
        50_000,
        range(340, 344),
        f"A quarter of the paper's steps, for the four arms of the claim: 40,000 steps learned from, 800,000 updates "
        f"at ratio 20. {TARGETS}",
        [return_at(steps) for steps in (25_000, 50_000)],
        seeds_together=4,
        arms=AT_BOTH_RATIOS,
    ),
    mujoco(
        "nmer-walker2d-25k",
        "Walker2d-v5",
        "2236 to 4611",
        25_000,
        range(350, 354),
        f"{EIGHTH} {TARGETS}",
        (LAST_THREE,),
        seeds_together=4,
        arms=AT_BOTH_RATIOS,
    ),
    mujoco(
        "nmer-ant-25k",
        "Ant-v5",
        "2005 to 4347",
        25_000,
        range(360, 364),
        f"{EIGHTH} {TARGETS} {WITHOUT_CONTACTS}",
        (LAST_THREE,),
        seeds_together=4,
        arms=AT_BOTH_RATIOS,
        **ANT,
    ),
    mujoco(
        "nmer-half-cheetah",
        "HalfCheetah-v5",
        "6467 to 9340",
        200_000,
        range(310, 314),
        TARGETS,
        [return_at(steps) for steps in (25_000, 50_000, 100_000, 200_000)],
    ),
    mujoco(
        "nmer-walker2d",
        "Walker2d-v5",
        "2236 to 4611",
        100_000,
        range(320, 324),
        f"{TARGETS} Half of the paper's steps.",
        [return_at(steps) for steps in (25_000, 50_000, 100_000)],
        seeds_together=4,
    ),
    mujoco(
        "nmer-ant",
        "Ant-v5",
        "2005 to 4347",
        100_000,
        range(330, 334),
        f"{TARGETS} Half of the paper's steps. {WITHOUT_CONTACTS}",
        [return_at(steps) for steps in (25_000, 50_000, 100_000)],
        seeds_together=4,
        **ANT,
    ),
)
