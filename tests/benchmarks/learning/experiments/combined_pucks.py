# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood mixup of rows of a curriculum's tasks, and of rows of an event table: pucks pushed to a goal."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl.data.replay_buffers import Sampler

from lightning_replay import PackedStorage, Replay
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import NeighborhoodMixupSampler, UniformSampler
from lightning_replay.samplers.tables import ScheduledSampler, TableShares
from lightning_replay.schedulers import OneTask, UniformTasks
from lightning_replay.table_replay import CurriculumReplay, TableReplay
from lightning_replay.transforms import MixPairs
from lightning_replay.writers import EventTableWriter, TaskTableWriter
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, combination, last_of, mean_of
from tests.benchmarks.learning.learners.puck import ACTION, OBSERVATION, TASKS, PuckRuns
from tests.benchmarks.learning.learners.stacked_td3 import StackedTD3
from tests.benchmarks.learning.recorder import Recorder


def replay_of(settings: Settings, seed: int) -> Replay:
    """Returns the replay of an arm: a writer, a sampler, and mixup with neighbours or not."""
    capacity, least = settings["capacity"], settings["min_size"]
    rows = settings["batch_size"] * settings["updates_per_draw"]
    options = {"batch_size": rows, "seed": seed}
    first: Sampler
    if settings["scheduler"] is not None:
        scheduler = {"uniform": UniformTasks(), "target": OneTask("target")}[settings["scheduler"]]
        task_writer = TaskTableWriter(TASKS, capacity, shares_one_table=scheduler.shares_one_table)
        first = ScheduledSampler(TASKS, scheduler, min_size=least)
        storage, options = PackedStorage(task_writer.num_slots), options | mixed(settings, first)
        return CurriculumReplay(storage=storage, writer=task_writer, **options)
    if settings["history_length"]:
        goal = EventTable("goal", reward_at_least(1.0), settings["history_length"], capacity=settings["table_capacity"])
        writer, shares = EventTableWriter(capacity, [goal]), {"default": 0.5, "goal": 0.5}
        first = TableShares(shares, {"default": least, "goal": least})
        return TableReplay(storage=PackedStorage(writer.num_slots), writer=writer, **options | mixed(settings, first))
    return Replay(storage=PackedStorage(capacity), **options | mixed(settings, UniformSampler()))


def mixed(settings: Settings, first: Sampler) -> dict[str, Sampler | MixPairs]:
    """Returns the sampler ``first``, or one of pairs that begin with its rows and the transform that mixes them."""
    if not settings["num_neighbors"]:
        return {"sampler": first}
    sampler = NeighborhoodMixupSampler(num_neighbors=settings["num_neighbors"], base_sampler=first)
    return {"sampler": sampler, "transform": MixPairs(mixup_concentration=settings["mixup_concentration"])}


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records the success on every task."""
    names = ("hidden_sizes", "learning_rate", "discount", "exploration_noise")
    agent = StackedTD3(OBSERVATION, ACTION, seeds, **{name: settings[name] for name in names})
    runs = PuckRuns(agent, [replay_of(settings, seed) for seed in seeds], seeds, settings)
    while runs.rounds < settings["rounds"]:
        for _ in range(settings["rounds_per_point"]):
            runs.play_round()
        success = runs.success()
        out.record(runs.rounds * settings["actors"], every=sum(success.values()) / len(TASKS), **success)


MIXING: Settings = {"num_neighbors": 10, "mixup_concentration": 0.75}
EVENTS: Settings = {"history_length": 20, "table_capacity": 1_000}
SETTINGS: Settings = {
    "rounds": 1_000,
    "rounds_per_point": 100,
    "actors": 4,
    "tasks": ["near"] * 4,
    "warmup_rounds": 250,
    "draws_per_round": 4,
    "updates_per_draw": 4,
    "batch_size": 64,
    "min_size": 64,
    "capacity": 10_000,
    "hidden_sizes": [64, 64],
    "learning_rate": 1e-3,
    "discount": 0.97,
    "exploration_noise": 0.3,
    "scheduler": None,
    "history_length": 0,
    "num_neighbors": 0,
}
ENVIRONMENT = (
    "A puck is pushed to the middle of a table by a force in two dimensions, with drag, a reward of 1 at the goal and "
    "40 steps of time; tasks differ in the distance of the starts, 0.9 (the target), 0.6, 0.4 and 0.2, at any angle. "
    "TD3 with 64 and 64 units, four pucks in lock-step, 4 updates per environment step from batches of 64, which are "
    "drawn for 4 updates at once; the first 1,000 steps are random. Success is the share of 16 starts "
    "around the goal from which the policy without exploration reaches it. "
)
OPTIONS = {
    "length": "{rounds:,} rounds of {actors} steps",
    "fast": {"rounds": 30, "rounds_per_point": 10, "warmup_rounds": 25, "min_size": 8},
    "xlabel": "environment steps, the first 1,000 random",
    "seeds_together": 8,
    "run": run,
}
EXPERIMENTS = (
    Experiment(
        name="combined-mixup-curriculum",
        title="Pucks pushed to a goal, TD3: a curriculum of tasks and neighbourhood mixup",
        claim="none of the combination; half field, which needs a curriculum to be learned (Li and Ji 2021, "
        "https://openreview.net/forum?id=EiW3FLYBiP), was not tried with mixup (Sander et al. 2022, "
        "https://proceedings.mlr.press/v168/sander22a.html).",
        task=ENVIRONMENT
        + "Runs of 4,000 steps. Without a curriculum all four pucks play the target; with one each plays a task, and "
        "the rows of a draw are of one task, all with equal probability. With both, neighbours are found among the "
        "rows of all tasks. Pilot seeds, of arms without mixup, chose the length of the run and the goal's radius.",
        arms={
            "no curriculum": {"scheduler": "target"},
            "no curriculum, neighbourhood mixup": {"scheduler": "target"} | MIXING,
            "curriculum": {"scheduler": "uniform"},
            "curriculum, neighbourhood mixup": {"scheduler": "uniform"} | MIXING,
        },
        settings=SETTINGS,
        seeds=range(500, 508),
        pilot_seeds=range(4),
        measure=mean_of("target", "success on the target over the run", skip=0),
        also=(
            last_of("target", 3, "success on the target in the last three tests"),
            mean_of("every", "success on all tasks over the run", skip=0),
        ),
        **combination(
            "curriculum",
            "no curriculum, neighbourhood mixup",
            both="curriculum, neighbourhood mixup",
            neither="no curriculum",
        ),
        panels=(
            Panel("target", "success on the target"),
            Panel("every", "success on all tasks"),
        ),
        **OPTIONS,
    ),
    Experiment(
        name="combined-mixup-goal",
        title="Pucks pushed to a goal, TD3: an event table of the goal and neighbourhood mixup",
        claim="none of the combination, see `combined-mixup-events`; here the event is the only reward.",
        task=ENVIRONMENT
        + "Runs of 3,200 steps. All pucks play the task of distance 0.4. The event is the goal; the 20 steps up to it "
        "enter a table of 1,000, from which half of each batch is drawn. Pilot seeds, of uniform draws, chose the "
        "length of the run.",
        arms={
            "uniform": {},
            "event table": EVENTS,
            "neighbourhood mixup": MIXING,
            "both": EVENTS | MIXING,
        },
        settings=SETTINGS | {"rounds": 800},
        seeds=range(520, 528),
        pilot_seeds=range(4),
        measure=mean_of("every", "success at all distances over the run", skip=0),
        also=(
            last_of("every", 3, "success at all distances in the last three tests"),
            mean_of("near", "success at distance 0.4 over the run", skip=0),
        ),
        **combination("event table", "neighbourhood mixup"),
        panels=(Panel("every", "success at all distances"), Panel("near", "success at distance 0.4")),
        **OPTIONS,
    ),
)
