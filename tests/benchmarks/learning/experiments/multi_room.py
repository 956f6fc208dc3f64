# SPDX-License-Identifier: Apache-2.0
"""Prioritized levels in MultiRoom: does PPO reach a return on held-out levels sooner than with levels drawn alike?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch

from lightning_replay.levels import LevelBuffer, LevelSelector, UniformLevels, scores, tscl
from tests.benchmarks.learning.experiment import Experiment, Measure, Panel, Settings, final, mean_of
from tests.benchmarks.learning.recorder import Recorder, SeedRun

RETURN_TO_REACH = 0.6


def levels_of(settings: Settings, seed: int) -> LevelSelector:
    """The source of levels of an arm."""
    if settings["levels"] == "uniform":
        return UniformLevels(settings["num_levels"], seed=seed)
    if settings["levels"] == "tscl":
        return tscl(range(settings["num_levels"]), seed=seed)
    return LevelBuffer(
        settings["num_levels"],
        score=scores.L1ValueLoss(discount=0.999, gae_lambda=0.95),
        score_temperature=settings["score_temperature"],
        staleness_weight=settings["staleness_weight"],
        seed=seed,
    )


def expected_rooms(levels: LevelSelector, rooms: np.ndarray) -> float:
    """Of a level drawn from the replay distribution; of any level, where no level has a score."""
    distribution = levels.probabilities()
    if not len(distribution):
        return float(rooms.mean())
    return float(distribution["probability"].double().numpy() @ rooms[distribution["level_id"].numpy()])


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Return on held-out levels at equal intervals, and more at the end."""
    from tests.benchmarks.learning.learners import multi_room_ppo as ppo
    from tests.benchmarks.learning.learners.vector_multi_room import Grids, VectorMultiRoom

    (seed,) = seeds
    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore", message=".*took the same level as the replay before")
    count, device = settings["num_levels"], torch.device("cpu")
    grids, held_out = Grids.generate(range(count)), Grids.generate(range(count, count + settings["held_out"]))
    sizes = ppo.Settings(envs=settings["envs"], rollout_steps=settings["rollout_steps"])
    learner, levels = ppo.PPO(sizes, seed, device), levels_of(settings, seed)
    collector = ppo.Collector(VectorMultiRoom(grids, sizes.envs), sizes.envs, levels, seed, device)
    taken, recorded = 0, 0
    while taken < settings["env_steps"]:
        rollout = collector.rollout(learner.network, sizes.rollout_steps)
        ppo.score(levels, rollout)
        learner.learn(rollout)
        taken += sizes.steps
        if taken * settings["checks"] >= settings["env_steps"] * (recorded + 1):
            recorded += 1
            test_return = ppo.test_returns(learner.network, held_out, seed).mean()
            out.record(taken, test_return=[test_return], rooms=[expected_rooms(levels, grids.rooms.numpy())])
    last = ppo.test_returns(learner.network, held_out, seed + 1)
    out.final(test_return=[last.mean()], **{f"{n}_rooms": [last[held_out.rooms == n].mean()] for n in range(1, 5)})
    out.final(training_return=[ppo.test_returns(learner.network, grids, seed + 2).mean()])


def steps_to_reach(run: SeedRun) -> float:
    """Environment steps at the first check of a sufficient return, or of the whole run."""
    reached = np.flatnonzero(run.curves["test_return"] >= RETURN_TO_REACH)
    return run.steps[reached[0] if len(reached) else -1]


EXPERIMENTS = (
    Experiment(
        name="multi-room-4",
        title="MultiRoom with 1 to 4 rooms, PPO: level replay",
        claim="prioritized levels learn faster; the final values tie, 0.80 and 0.81 (Jiang et al. 2021, "
        "https://arxiv.org/abs/2010.03934, MultiRoom-N4-Random).",
        task="4,000 levels and 500 held out, four actions for MiniGrid's seven, a network that sees the grid from "
        "where the agent stands. Other than in the paper a far smaller budget, and a critic that does not see the"
        " time. Chosen on seed 100: with uniform levels the network and that a time limit is an end, as in the "
        "paper's code (0.65 and 0.50 after 700,000 steps); with prioritized levels the temperature (0.1: 0.56, "
        "0.5: 0.52, 1: 0.62, which after two million steps had passed uniform, 0.84 and 0.79). Rooms are those of"
        " a level drawn from the replay distribution. A run that does not reach a return of 0.6 counts with all "
        "its steps.",
        arms={
            "uniform": {"levels": "uniform"},
            "level replay, temperature 1": {"levels": "plr", "score_temperature": 1.0, "staleness_weight": 0.3},
            "level replay, temperature 0.1": {"levels": "plr", "score_temperature": 0.1, "staleness_weight": 0.3},
            "TSCL": {"levels": "tscl"},
        },
        settings={
            "num_levels": 4_000,
            "held_out": 500,
            "envs": 64,
            "rollout_steps": 128,
            "env_steps": 2_000_000,
            "checks": 20,
        },
        fast={"num_levels": 20, "held_out": 10, "env_steps": 2 * 64 * 128, "checks": 2},
        seeds=range(200, 203),
        pilot_seeds=(100,),
        measure=Measure("steps to a test return of 0.6", steps_to_reach, higher_is_better=False, digits=0),
        also=(
            final("test_return", "final test return"),
            mean_of("test_return", "test return over the run", skip=0),
            final("training_return", "return on training levels"),
        ),
        panels=(
            Panel("test_return", "return on 500 held-out levels"),
            Panel("rooms", "expected rooms of a replayed level"),
        ),
        run=run,
        notes="With a critic that sees the time, 1 to 6 rooms and a smoother ladder of difficulty, see the other "
        "experiments on levels: here the score measures errors that no learning removes.",
    ),
)
