# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood mixup of rows of a curriculum's tasks, and of rows of an event table: pucks pushed to a goal."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl.data.replay_buffers import Sampler

from lightning_replay import PackedStorage, Replay
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import NeighborhoodMixupSampler, UniformSampler
from lightning_replay.samplers.scheduled import ScheduledSampler
from lightning_replay.samplers.table_shares import TableShares
from lightning_replay.schedulers import OneTask, UniformTasks
from lightning_replay.table_replay import CurriculumReplay, TableReplay
from lightning_replay.transforms import MixPairs
from lightning_replay.writers import EventTableWriter, TaskTableWriter
from tests.benchmarks.learning.experiment import Settings
from tests.benchmarks.learning.learners.puck import ACTION, OBSERVATION, TASKS, PuckRuns
from tests.benchmarks.learning.learners.stacked_td3 import StackedTD3
from tests.benchmarks.learning.recorder import Recorder


def replay_of(settings: Settings, seed: int) -> Replay:
    """The replay of an arm: kept by a writer, drawn by a sampler, and mixed with neighbours or not."""
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
    """The sampler ``first``, or that of pairs that begin with its rows, and the transform that mixes them."""
    if not settings["num_neighbors"]:
        return {"sampler": first}
    sampler = NeighborhoodMixupSampler(num_neighbors=settings["num_neighbors"], first=first)
    return {"sampler": sampler, "transform": MixPairs(mixup_concentration=settings["mixup_concentration"])}


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Success on every task along the way."""
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
    "rounds": 1_500,
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
EXPERIMENTS = ()
