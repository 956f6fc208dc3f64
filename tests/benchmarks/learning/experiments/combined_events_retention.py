# SPDX-License-Identifier: Apache-2.0
"""Event tables with a retention buffer: three rooms with capacity for a small part of the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_replay import Replay, recipes
from lightning_replay.envs.grids import ThreeRooms
from lightning_replay.events import EventTable
from tests.benchmarks.learning.experiment import Experiment, Settings, combination
from tests.benchmarks.learning.experiments.event_tables import ALSO, LENGTH, MEASURE, SETTINGS, greedy_panel, learn
from tests.benchmarks.learning.learners.retained_walks import RetainedWalks, SideBySide, measure_surprise
from tests.benchmarks.learning.learners.room_walks import agent_of
from tests.benchmarks.learning.learners.three_rooms import CONDITIONS, Table
from tests.benchmarks.learning.recorder import Recorder


def tables_of(settings: Settings, rows: int, default_share: float, default_capacity: int, seed: int) -> Replay:
    """Returns a buffer with a table of the steps that led to the goal."""
    least = settings["table_min_size"]
    goal = EventTable(
        "goal",
        CONDITIONS["goal"],
        settings["history_length"],
        capacity=settings["table_capacity"],
        min_size=least,
    )
    return recipes.event_tables(
        default_capacity,
        rows,
        tables=[goal],
        default_share=default_share,
        min_size=min(least, default_capacity),
        max_trajectories=1,
        seed=seed,
    )


def replay_of(settings: Settings, seed: int) -> SideBySide:
    """Returns the buffers of an arm, which together hold ``capacity`` rows and draw ``batch_size`` rows."""
    capacity, rows = settings["capacity"], settings["batch_size"]
    room = capacity - settings["table_capacity"]
    if settings["replay"] == "uniform":
        return SideBySide(recipes.uniform(capacity, rows, seed=seed))
    if settings["replay"] == "event table":
        return SideBySide(tables_of(settings, rows, 0.5, room, seed))
    if settings["replay"] == "retention":
        return SideBySide(recipes.surprise_retention(capacity, rows, priority_exponent=0.0, seed=seed))
    retained = recipes.surprise_retention(room, rows // 2, priority_exponent=0.0, seed=seed)
    return SideBySide(retained, tables_of(settings, rows // 2, 0.0, 1, seed + 1_000_000))


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the greedy episode at every check, and the steps from the first goal to the first near-optimal one."""
    table, agent = Table.of(ThreeRooms()), agent_of(settings, seeds)
    replays, walked = [], []
    for run, seed in enumerate(seeds):
        pair, walk = replay_of(settings, seed), table.walk_to_goal(seed, settings["episode_steps"])
        for replay in pair.replays:
            measure_surprise(agent, run, replay)
        for steps in walk.split(200):
            pair.extend(steps)
        replays.append(pair)
        walked.append(len(walk))
    learn(RetainedWalks(agent, table, replays, seeds, settings), agent, table, settings, out)
    out.final(walked=np.array(walked))


TASK = (
    "Environment, network and measure of the experiment `event-tables`, with room for 500 rows. Uniform draws from a "
    "ring of 500; from a ring of 250 and a table of 250 steps that led to the goal, half of a batch from each; from "
    "500 rows kept by surprise and on-policyness; from 250 such rows and the table, half of a batch from each. A "
    "buffer has one writer, so that the last are two buffers side by side, which keep a row of both twice. Draws are "
    "uniform within each, the surprise of new rows is their squared TD error, and each of the 8 updates of a draw has "
    "its share of every table (in `event-tables`, half of the updates have the rows of one table). 500 was the first "
    "of the capacities that were tried on pilot seeds, which chose nothing else."
)

EXPERIMENTS = (
    Experiment(
        name="combined-events-retention",
        title="Three rooms, double DQN, room for 500 rows: event tables and retention",
        claim="none. The paper on retention warns of sparse rewards, as the first rows are never evicted while all "
        "surprise is 0 (https://openreview.net/forum?id=SPRHpBKzJE); event tables keep the steps to the goal "
        "(Kompella et al. 2022, https://arxiv.org/abs/2211.00576).",
        task=TASK,
        length=LENGTH,
        arms={
            "uniform": {"replay": "uniform"},
            "event table": {"replay": "event table"},
            "retention": {"replay": "retention"},
            "both": {"replay": "both"},
        },
        settings=SETTINGS | {"capacity": 500, "table_capacity": 250, "history_length": 200},
        fast={"env_steps": 360},
        seeds=range(500, 516),
        pilot_seeds=range(4, 12),
        measure=MEASURE,
        also=ALSO,
        **combination("event table", "retention"),
        panels=(greedy_panel(()),),
        xlabel="environment steps from the first goal",
        run=run,
        seeds_together=8,
    ),
)
