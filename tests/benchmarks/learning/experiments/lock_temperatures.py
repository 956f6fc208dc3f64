# SPDX-License-Identifier: Apache-2.0
"""Temperatures of level replay on combination locks, with a critic that observes the end and with one that does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_replay.levels import LevelSelector
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final
from tests.benchmarks.learning.experiments.locks import EPISODES_PER_UPDATE, levels_of, update
from tests.benchmarks.learning.learners.combination_lock import LEVELS, CombinationLocks, TabularActorCritic
from tests.benchmarks.learning.learners.level_choice import ignore_repeat_warning
from tests.benchmarks.learning.recorder import Recorder

UPDATES_PER_POINT = 8


def start_idle_level(levels: LevelSelector, actor: int, playing: list[int], generator: np.random.Generator) -> int:
    """Starts a level that no actor plays: a new one, or one by its replay probability among those left."""
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


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the success over all levels, and the concentration of replays in the middle third of the run."""
    (seed,) = seeds
    ignore_repeat_warning()
    locks, player = CombinationLocks(seed), TabularActorCritic(sees_end=settings["sees_end"])
    levels, generator = levels_of(settings, seed), np.random.default_rng(seed + 1_000_000)
    updates = settings["updates"]
    success, effective, share = [], [], []
    for number in range(1, updates + 1):
        chosen: list[int] = []
        for actor in range(EPISODES_PER_UPDATE):
            is_free = settings["repeats"]
            chosen.append(levels.next_level(actor) if is_free else start_idle_level(levels, actor, chosen, generator))
        effective.append(levels.stats().get("effective_levels", float(LEVELS)))
        share.append(np.bincount(chosen).max() / len(chosen))
        update(chosen, locks, player, levels, generator)
        success.append(float(locks.success(player).mean()))
        if number % UPDATES_PER_POINT == 0:
            out.record(number * EPISODES_PER_UPDATE, success=[success[-1]])
    middle = slice(updates // 3, 2 * updates // 3)
    out.final(success=[success[-1]], area=[np.mean(success)])
    out.final(effective_levels=[np.mean(effective[middle])], largest_share=[np.mean(share[middle])])


CRITICS = {"end observed": True, "end hidden": False}
CHOICES: dict[str, Settings] = {
    "uniform": {"score_temperature": None, "staleness_weight": None},
    **{
        f"temperature {temperature:g}, staleness weight {weight:g}": {
            "score_temperature": temperature,
            "staleness_weight": weight,
        }
        for weight in (0.1, 0.3)
        for temperature in (0.1, 0.3, 1.0, 3.0)
    },
    "temperature 0.1, none in flight": {"score_temperature": 0.1, "staleness_weight": 0.1, "repeats": False},
}
ARMS = {
    f"{choice}; {critic}": {"repeats": True, **settings, "sees_end": sees}
    for critic, sees in CRITICS.items()
    for choice, settings in CHOICES.items()
}

EXPERIMENTS = (
    Experiment(
        name="lock-temperatures",
        title="Combination locks: temperatures of level replay",
        claim="none of the paper's (Jiang et al. 2021, https://arxiv.org/abs/2010.03934), which has a temperature of "
        "0.1; the question is when it is too low.",
        task="The locks of `locks`, 400 updates of 16 episodes each, with a critic that observes the number of stages "
        "left (end observed) and with one that does not (end hidden). With 'none in flight' no level is chosen twice "
        "for one update. Effective levels (one over the sum of squared replay probabilities) and the largest share of "
        "the episodes of an update that one level has are means over the middle third of the run.",
        length=f"{{updates}} updates of {EPISODES_PER_UPDATE} episodes",
        arms=ARMS,
        settings={"updates": 400},
        fast={"updates": 20},
        seeds=range(400, 412),
        pilot_seeds=range(300, 304),
        measure=final("area", "success over the run"),
        also=(
            final("success", "success at the end"),
            final("effective_levels", "effective levels", digits=1),
            final("largest_share", "largest share of an update", higher_is_better=False, digits=2),
        ),
        comparisons=[(arm, f"uniform; {arm.split('; ')[1]}") for arm in ARMS if not arm.startswith("uniform")],
        headline=[
            (f"temperature {choice}; {critic}", f"uniform; {critic}")
            for critic in CRITICS
            for choice in ("0.1, staleness weight 0.1", "0.3, staleness weight 0.3")
        ],
        panels=[
            Panel(
                "success",
                "chance to open a lock, mean over all",
                [arm for arm in ARMS if arm.endswith(critic) and "weight 0.3" not in arm and "flight" not in arm],
                f"critic: {critic}",
            )
            for critic in CRITICS
        ],
        xlabel="episodes",
        run=run,
    ),
)
