# SPDX-License-Identifier: Apache-2.0
"""Prioritized levels on combination locks: replay climbs from short locks to long ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_replay.levels import LevelSelector
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, final, mean_of
from tests.benchmarks.learning.learners import level_choice
from tests.benchmarks.learning.learners.combination_lock import (
    DISCOUNT,
    GAE_LAMBDA,
    LEVELS,
    CombinationLocks,
    TabularActorCritic,
)
from tests.benchmarks.learning.recorder import Recorder

EPISODES_PER_UPDATE = 16
UPDATES_PER_POINT = 10


def levels_of(settings: Settings, seed: int) -> LevelSelector:
    """Returns uniform levels without a temperature, otherwise levels by the ranks of their scores."""
    return level_choice.levels_of(settings, range(LEVELS), seed, discount=DISCOUNT, gae_lambda=GAE_LAMBDA)


def update(
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


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the success over all levels and the expected difficulty, means over blocks of updates."""
    (seed,) = seeds
    level_choice.ignore_repeat_warning()
    locks, player, levels = CombinationLocks(seed), TabularActorCritic(), levels_of(settings, seed)
    generator = np.random.default_rng(seed + 1_000_000)
    block = []
    for number in range(1, settings["updates"] + 1):
        chosen = [levels.next_level(actor) for actor in range(EPISODES_PER_UPDATE)]
        update(chosen, locks, player, levels, generator)
        block.append((locks.success(player).mean(), level_choice.expected_difficulty(levels, locks.difficulty)))
        if number % UPDATES_PER_POINT == 0:
            success, difficulty = np.mean(block, axis=0)
            out.record(number * EPISODES_PER_UPDATE, success=[success], difficulty=[difficulty])
            out.final(success=[block[-1][0]])
            block.clear()


EXPERIMENTS = (
    Experiment(
        name="locks",
        title="Combination locks, tabular actor-critic: level replay",
        claim="replay of levels by score and staleness climbs from easy to hard levels and is better than uniform "
        "levels; scores alone (staleness weight 0) and staleness alone (1) are not (Jiang et al. 2021, "
        "https://arxiv.org/abs/2010.03934). A mechanism experiment, not the paper's headline.",
        task="400 locks of 1 to 8 stages that share their stages, 400 updates of 16 episodes each; ranks of the L1 "
        "value loss, temperature 0.1. Success is the chance to open a lock, mean over all; the expected difficulty is "
        "the number of stages of a level drawn from the replay distribution, 4.5 for all levels alike. On the pilot "
        "seeds an actor step size of 2 left uniform levels the most room on both sides, of 1.5, 2 and 3.",
        length=f"{{updates}} updates of {EPISODES_PER_UPDATE} episodes",
        arms={
            "uniform": {"score_temperature": None, "staleness_weight": None},
            **{
                f"level replay, staleness weight {weight:g}": {"score_temperature": 0.1, "staleness_weight": weight}
                for weight in (0.0, 0.1, 0.3, 1.0)
            },
        },
        settings={"updates": 400},
        fast={"updates": 20},
        seeds=range(200, 208),
        pilot_seeds=(100, 101),
        measure=final("success", "success at the end"),
        also=(mean_of("success", "success over the run", skip=0),),
        run=run,
        panels=(
            Panel("success", "chance to open a lock, mean over all"),
            Panel("difficulty", "expected stages of a replayed lock"),
        ),
        xlabel="episodes",
    ),
)
