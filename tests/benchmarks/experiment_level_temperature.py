# SPDX-License-Identifier: Apache-2.0
"""Temperatures of level replay on combination locks, with a critic that sees the end and with one that does not.

    python tests/benchmarks/experiment_level_temperature.py --save     # twelve seeds: 240 runs of a CPU second or three
    python tests/benchmarks/experiment_level_temperature.py --fast     # two seeds, few updates: does it run?

Ranks of the L1 value loss (Jiang et al. 2021, https://arxiv.org/abs/2010.03934) on the locks of
``experiment_combination_lock.py``, with four temperatures and two staleness weights. Also temperature 0.1 without
levels in flight: no level is chosen twice for one update. Fixed before these seeds were run: a difference to uniform
levels, seed by seed, is clear where its mean is more than three standard errors from 0. Pilots used seeds 300 to 303.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from combination_lock import DISCOUNT, GAE_LAMBDA, LEVELS, CombinationLocks, TabularActorCritic
from experiment_combination_lock import CLEARLY, EPISODES_PER_UPDATE, UNIFORM, UPDATES, learn_from
from experiment_pictures import draw_panels
from experiment_runs import Plan, run_experiment
from experiment_tables import (
    Runs,
    expect_narrow_replay,
    markdown_table,
    run_all,
    standard_error,
    with_error,
)

from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels, scores

FIRST_SEED = 400
NAME = "level_temperature"
TEMPERATURES, STALENESS_WEIGHTS = (0.1, 0.3, 1.0, 3.0), (0.1, 0.3)
CRITICS = {"the critic sees the end": True, "the critic does not see the end": False}
POINTS = 50  # of a curve


@dataclass(frozen=True)
class Choice:
    """How levels are chosen; without a temperature uniformly."""

    score_temperature: float | None = None
    staleness_weight: float = 0.1
    repeats: bool = True

    @property
    def name(self) -> str:
        """How the table calls it."""
        if self.score_temperature is None:
            return UNIFORM
        name = f"temperature {self.score_temperature:g}, staleness weight {self.staleness_weight:g}"
        return name if self.repeats else f"{name}, none in flight"

    def build(self, seed: int) -> LevelSelector:
        """Of all locks."""
        if self.score_temperature is None:
            return UniformLevels(range(LEVELS), seed=seed)
        return LevelBuffer(
            range(LEVELS),
            score=scores.L1ValueLoss(discount=DISCOUNT, gae_lambda=GAE_LAMBDA),
            score_temperature=self.score_temperature,
            staleness_weight=self.staleness_weight,
            seed=seed,
        )


CHOICES = [
    Choice(),
    *(Choice(temperature, weight) for weight in STALENESS_WEIGHTS for temperature in TEMPERATURES),
    Choice(0.1, repeats=False),
]
METHODS = {f"{choice.name}; {critic}": (choice, sees) for critic, sees in CRITICS.items() for choice in CHOICES}


def start_idle_level(levels: LevelSelector, actor: int, playing: list[int], generator: np.random.Generator) -> int:
    """Starts a level that nobody plays: a new one, or one by its replay probability among those left."""
    rows = levels.probabilities()
    ids = rows["level_id"].numpy()
    probability = np.where(np.isin(ids, playing), 0.0, rows["probability"].numpy())
    new = np.setdiff1d(np.arange(LEVELS), [*ids, *playing])
    if probability.sum() == 0.0 or generator.random() * LEVELS < len(new):
        level_id = int(generator.choice(new))
    else:
        level_id = int(generator.choice(ids, p=probability / probability.sum()))
    levels.start(actor, level_id)
    return level_id


def train(method: str, seed: int, updates: int) -> dict[str, Any]:
    """One run: success over all levels, and over its middle third how few levels are replayed."""
    torch.set_num_threads(1)
    expect_narrow_replay()
    started = time.perf_counter()
    choice, sees_end = METHODS[method]
    locks, player, levels = CombinationLocks(seed), TabularActorCritic(sees_end=sees_end), choice.build(seed)
    generator = np.random.default_rng(seed + 1_000_000)
    success, effective, share = [], [], []
    for _ in range(updates):
        chosen: list[int] = []
        for actor in range(EPISODES_PER_UPDATE):
            repeats = choice.repeats
            chosen.append(levels.next_level(actor) if repeats else start_idle_level(levels, actor, chosen, generator))
        effective.append(levels.stats().get("effective_levels", float(LEVELS)))
        share.append(np.bincount(chosen).max() / len(chosen))
        learn_from(chosen, locks, player, levels, generator)
        success.append(float(locks.success(player).mean()))
    middle = slice(updates // 3, 2 * updates // 3)
    return {
        "final": success[-1],
        "area": float(np.mean(success)),
        "effective_levels": float(np.mean(effective[middle])),
        "largest_share": float(np.mean(share[middle])),
        "curve": [round(value, 5) for value in success[max(1, updates // POINTS) - 1 :: max(1, updates // POINTS)]],
        "seconds": time.perf_counter() - started,
    }


def column(runs: list[dict[str, Any]], measure: str) -> np.ndarray:
    """A measure of each seed, ``[seeds]``."""
    return np.array([run[measure] for run in runs])


def compared(runs: Runs, method: str, baseline: str, measure: str) -> str:
    """The paired difference to uniform levels, in bold where it is clear."""
    difference = column(runs[method], measure) - column(runs[baseline], measure)
    mean, error = float(difference.mean()), standard_error(difference)
    text = f"{mean:+.3f} ± {error:.3f}"
    return f"**{text}**" if abs(mean) > CLEARLY * error else text


def table_of(runs: Runs, critic: str) -> str:
    """One row for each way to choose levels."""
    header = [
        critic,
        "success over the run",
        "less uniform's",
        "success at the end",
        "less uniform's",
        "effective levels",
        "largest share of an update",
    ]
    rows = []
    for choice in CHOICES:
        method, baseline = f"{choice.name}; {critic}", f"{UNIFORM}; {critic}"
        cells = [choice.name]
        for measure in ("area", "final"):
            values = column(runs[method], measure)
            cells.append(with_error(float(values.mean()), standard_error(values)))
            cells.append("" if method == baseline else compared(runs, method, baseline, measure))
        cells.append(f"{column(runs[method], 'effective_levels').mean():.1f}")
        cells.append(f"{column(runs[method], 'largest_share').mean():.0%}")
        rows.append(cells)
    return markdown_table(header, rows)


def page_of(runs: Runs, seeds: range, updates: int, minutes: float) -> str:
    """What was measured, as Markdown."""
    return "\n\n".join(
        [
            "# Temperatures of level replay on combination locks",
            f"Seeds {seeds[0]} to {seeds[-1]}, {updates} updates of {EPISODES_PER_UPDATE} episodes each, "
            f"{minutes:.1f} minutes in two processes. ± is one standard error over seeds. Success is the chance to "
            "open a lock, averaged over all 400, at the end or over all updates. Differences are seed by seed, in bold "
            f"where they are more than {CLEARLY:g} standard errors. Effective levels (one over the sum of squared "
            "replay probabilities) and the largest share that one level has of the episodes of an update are means "
            "over the middle third of the run. With 'none in flight' no level is chosen twice for one update; its "
            "effective levels are those before any is left out.",
            *(table_of(runs, critic) for critic in CRITICS),
        ]
    )


def draw_runs(content: dict[str, Any], path: Path) -> None:
    """Success over the episodes at the smaller staleness weight, for each critic."""
    shown = [choice for choice in CHOICES if choice.staleness_weight == STALENESS_WEIGHTS[0] and choice.repeats]
    panels = {
        critic: {
            choice.name: np.array([run["curve"] for run in content["runs"][f"{choice.name}; {critic}"]])
            for choice in shown
        }
        for critic in CRITICS
    }
    interval = EPISODES_PER_UPDATE * max(1, content["updates"] // POINTS)
    episodes = range(interval, EPISODES_PER_UPDATE * content["updates"] + 1, interval)
    title = "Combination locks: temperatures of level replay"
    draw_panels(panels, episodes, path, title, "episodes", "chance to open a lock, mean over all")


def plan(options: argparse.Namespace) -> Plan:
    """Returns what is run, with ``--fast`` for a short time."""
    updates = 20 if options.fast else UPDATES
    return Plan(
        {"updates": updates},
        lambda seeds, kept: run_all(train, METHODS, seeds, updates, kept=kept),
        lambda runs, seeds, minutes: page_of(runs, seeds, updates, minutes),
    )


if __name__ == "__main__":
    fast = "two seeds and 20 updates"
    run_experiment(NAME, __doc__, plan, draw_runs, seeds=12, first_seed=FIRST_SEED, fast=fast)
