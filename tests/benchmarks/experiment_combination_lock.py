# SPDX-License-Identifier: Apache-2.0
"""Prioritized levels on combination locks: does replay climb from short locks to long ones, and open more of them?

    python tests/benchmarks/experiment_combination_lock.py --save     # eight seeds, about two minutes on one core
    python tests/benchmarks/experiment_combination_lock.py --fast     # two seeds, few updates: does it run?

The mechanism of Prioritized Level Replay (Jiang et al. 2021, https://arxiv.org/abs/2010.03934), not its headline. 400
levels of 8 difficulties, 16 episodes per update, 400 updates; the level buffer's defaults (ranks of the L1 value loss,
temperature 0.1, replay as likely as the share of levels visited) but for the staleness weight. Fixed before these seeds
were run: a method is clearly above uniform where the mean of its paired differences in success, at the end and over
the run, is more than three standard errors above 0. On pilot seeds (100 and 101) a step size of 2 left uniform the most
room on both sides, of 1.5, 2 and 3; and with a critic that is not told how many stages remain, prioritized levels ended
no better than uniform ones (measured with a stand-in for the level buffer): its errors then are those of its
blindness, which no replay mends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from combination_lock import DISCOUNT, GAE_LAMBDA, LEVELS, CombinationLocks, TabularActorCritic
from experiment_pictures import block_means, draw_panels
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

FIRST_SEED = 200  # pilots used seeds 100 and 101
UPDATES, EPISODES_PER_UPDATE = 400, 16
UPDATES_PER_POINT = 10  # of the picture
SCORE_TEMPERATURE = 0.1
CLEARLY = 3.0  # standard errors
EXPECTED = {0.0: False, 0.1: True, 0.3: True, 1.0: False}  # staleness weight: clearly above uniform?
UNIFORM = "uniform"


def name_of(staleness_weight: float) -> str:
    """How the table calls prioritized levels with this weight."""
    return f"PLR, staleness weight {staleness_weight:g}"


def prioritized(staleness_weight: float) -> Callable[[int], LevelSelector]:
    """Levels by the ranks of their scores."""
    return lambda seed: LevelBuffer(
        range(LEVELS),
        score=scores.L1ValueLoss(discount=DISCOUNT, gae_lambda=GAE_LAMBDA),
        score_temperature=SCORE_TEMPERATURE,
        staleness_weight=staleness_weight,
        seed=seed,
    )


METHODS: dict[str, Callable[[int], LevelSelector]] = {
    UNIFORM: lambda seed: UniformLevels(range(LEVELS), seed=seed),
    **{name_of(weight): prioritized(weight) for weight in EXPECTED},
}


def expected_difficulty(levels: LevelSelector, locks: CombinationLocks) -> float:
    """Of a level drawn from the replay distribution; of any level, where no level has a score."""
    distribution = levels.probabilities()
    if not len(distribution):
        return float(locks.difficulty.mean())
    return float(distribution["probability"].double().numpy() @ locks.difficulty[distribution["level_id"].numpy()])


def update(
    locks: CombinationLocks, player: TabularActorCritic, levels: LevelSelector, generator: np.random.Generator
) -> int:
    """Plays the levels chosen, scores them and learns from them; returns the environment steps played."""
    chosen = [levels.next_level(actor) for actor in range(EPISODES_PER_UPDATE)]
    return learn_from(chosen, locks, player, levels, generator)


def learn_from(
    chosen: Sequence[int],
    locks: CombinationLocks,
    player: TabularActorCritic,
    levels: LevelSelector,
    generator: np.random.Generator,
) -> int:
    """Plays the level chosen for each actor, scores all and learns; returns the environment steps played."""
    episodes = locks.play(np.array(chosen), player, generator)
    for actor, (level_id, segment) in enumerate(zip(chosen, episodes.segments(), strict=True)):
        levels.update(actor, level_id, segment, True)
    player.learn(episodes)
    return int(episodes.length.sum())


def train(method: str, seed: int, updates: int) -> dict[str, Any]:
    """One run: mean success over all levels and expected difficulty after every update, and the seconds it took."""
    torch.set_num_threads(1)
    expect_narrow_replay()
    started = time.perf_counter()
    locks, player, levels = CombinationLocks(seed), TabularActorCritic(), METHODS[method](seed)
    generator = np.random.default_rng(seed + 1_000_000)
    success, difficulty = [], []
    for _ in range(updates):
        update(locks, player, levels, generator)
        success.append(float(locks.success(player).mean()))
        difficulty.append(expected_difficulty(levels, locks))
    digits = 5  # enough, and half the file
    return {
        "success": [round(value, digits) for value in success],
        "difficulty": [round(value, digits) for value in difficulty],
        "seconds": time.perf_counter() - started,
    }


def columns_of(runs: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """By seed: success at the end and over the run, and expected difficulty over the first and the last tenth."""
    success = np.array([run["success"] for run in runs])
    difficulty = np.array([run["difficulty"] for run in runs])
    tenth = max(1, success.shape[1] // 10)
    return {
        "final": success[:, -1],
        "area": success.mean(1),
        "difficulty_first": difficulty[:, :tenth].mean(1),
        "difficulty_last": difficulty[:, -tenth:].mean(1),
    }


def is_clearly_above(gains: np.ndarray) -> bool:
    """Whether paired differences are above 0 by more than chance explains."""
    return bool(gains.mean() > CLEARLY * standard_error(gains))


def verdict(columns: dict[str, dict[str, np.ndarray]]) -> str:
    """Paired differences to uniform, with what was expected of each method."""
    lines = []
    for weight, is_expected in EXPECTED.items():
        gains = [columns[name_of(weight)][measure] - columns[UNIFORM][measure] for measure in ("final", "area")]
        is_above = all(is_clearly_above(gain) for gain in gains)
        final, area = (with_error(float(gain.mean()), standard_error(gain)) for gain in gains)
        lines.append(
            f"- staleness weight {weight:g}: {final} at the end, {area} over the run: "
            f"{'clearly above' if is_above else 'not clearly above'}, "
            f"{'as' if is_above == is_expected else 'NOT as'} expected."
        )
    return "Success less that of uniform, seed by seed:\n\n" + "\n".join(lines)


def page_of(runs: Runs, seeds: range, updates: int, minutes: float) -> str:
    """What was seen, as Markdown."""
    columns = {method: columns_of(of_method) for method, of_method in runs.items()}
    header = [
        "method",
        "success at the end",
        "success over the run",
        "expected difficulty, first tenth",
        "last tenth",
        "s per run",
    ]
    rows = [
        [
            method,
            *(with_error(float(seen.mean()), standard_error(seen)) for seen in (column["final"], column["area"])),
            *(
                with_error(float(seen.mean()), standard_error(seen), 2)
                for seen in (column["difficulty_first"], column["difficulty_last"])
            ),
            f"{np.mean([run['seconds'] for run in runs[method]]):.1f}",
        ]
        for method, column in columns.items()
    ]
    return "\n\n".join(
        [
            "# Combination locks, tabular actor-critic",
            f"Seeds {seeds[0]} to {seeds[-1]}, {updates} updates of {EPISODES_PER_UPDATE} episodes each, "
            f"{minutes:.1f} minutes in two processes. ± is one standard error over seeds. Success is the chance to "
            "open a lock, averaged over all 400; over the run it is averaged over all updates too. The expected "
            "difficulty is the number of stages of a level drawn from the replay distribution; 4.5 is that of all "
            "levels alike.",
            markdown_table(header, rows),
            verdict(columns),
        ]
    )


def draw_runs(content: dict[str, Any], path: Path) -> None:
    """Success and expected difficulty over the episodes, means of ten updates."""
    updates, size = content["updates"], min(UPDATES_PER_POINT, content["updates"])
    episodes = range(EPISODES_PER_UPDATE, EPISODES_PER_UPDATE * updates + 1, EPISODES_PER_UPDATE)
    panels: dict[str, dict[str, np.ndarray]] = {}
    for measure, key in (
        ("chance to open a lock, mean over all", "success"),
        ("expected stages of a replayed lock", "difficulty"),
    ):
        of_methods = {}
        for method, runs in content["runs"].items():
            of_methods[method], at = block_means(np.array([run[key] for run in runs]), episodes, size)
        panels[measure] = of_methods
    draw_panels(panels, at, path, "Combination locks, tabular actor-critic", "episodes")


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
    run_experiment("combination_lock", __doc__, plan, draw_runs, seeds=8, first_seed=FIRST_SEED, fast=fast)
