# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood mixup of rows that are drawn from event tables: HalfCheetah, TD3 at a replay ratio of 20."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import NeighborhoodMixupSampler
from lightning_replay.samplers.tables import TableShares
from lightning_replay.table_replay import TableReplay
from lightning_replay.transforms import MixPairs
from lightning_replay.writers import EventTableWriter
from tests.benchmarks.learning.experiment import Experiment, Panel, Settings, combination, last_of, mean_of
from tests.benchmarks.learning.experiments import nmer
from tests.benchmarks.learning.recorder import Recorder


def tables_of(settings: Settings) -> list[EventTable]:
    """Returns one table, of the steps that led to a fast one."""
    condition, history = reward_at_least(settings["fast_reward"]), settings["history_length"]
    room, share = settings["table_capacity"], settings["table_share"]
    return [EventTable("fast", condition, history, capacity=room, share=share, min_size=settings["table_min_size"])]


def replay_of(settings: Settings, seed: int) -> Replay:
    """Returns the replay of an arm; the rows of all updates of an environment step are drawn at once."""
    if settings["replay"] not in ("event tables", "event tables, mixed"):
        return nmer.replay_of(settings, seed)
    capacity, rows = settings["capacity"], settings["batch_size"] * nmer.updates_per_draw(settings)
    tables, share, least = tables_of(settings), settings["table_share"], settings["table_min_size"]
    if settings["replay"] == "event tables":
        return recipes.event_tables(capacity, rows, tables=tables, default_share=1.0 - share, min_size=least, seed=seed)
    writer = EventTableWriter(capacity, tables)
    shares = TableShares({"default": 1.0 - share, "fast": share}, {"default": least, "fast": least})
    return TableReplay(
        storage=PackedStorage(writer.num_slots),
        writer=writer,
        sampler=NeighborhoodMixupSampler(num_neighbors=settings["num_neighbors"], base_sampler=shares),
        transform=MixPairs(mixup_concentration=settings["mixup_concentration"]),
        batch_size=rows,
        seed=seed,
    )


def run(settings: Settings, seeds: Sequence[int], out: Recorder) -> None:
    """Records mean returns of evaluation episodes: before the first update, then at equal intervals."""
    from tests.benchmarks.learning.learners.stacked_runs import DealtRuns

    nmer.play(settings, seeds, out, DealtRuns, replay_of)


MIXING: Settings = {"num_neighbors": 10, "mixup_concentration": 0.75}
EVENTS: Settings = {
    "fast_reward": 1.3,
    "history_length": 20,
    "table_capacity": 2_000,
    "table_share": 0.5,
    "table_min_size": 200,
}

EXPERIMENTS = (
    Experiment(
        name="combined-mixup-events",
        title="HalfCheetah-v5, TD3 at a replay ratio of 20: neighbourhood mixup of rows from event tables",
        claim="none of the combination; mixup with neighbours alone: HalfCheetah 6467 to 9340 after 200,000 steps "
        f"({nmer.PAPER}).",
        task="Environment, network and length of the experiment `nmer-short`: TD3, 20 updates per environment step, "
        "5,000 random steps, then 3,000 learned from. The event is a step with a reward of at least 1.3, which 1 % of "
        "the random steps have; the 20 steps up to it enter a table of 2,000, from which half of each batch is drawn. "
        "With both, the first row of each pair comes from the tables and the second is one of its 10 nearest "
        "neighbours, wherever that is. Pilot seeds were run with these settings for the event table and for both, and "
        "changed nothing.",
        length="{env_steps:,} steps",
        arms={
            "uniform": {"replay": "uniform"},
            "event table": {"replay": "event tables"} | EVENTS,
            "neighbourhood mixup": {"replay": "nmer"} | MIXING,
            "both": {"replay": "event tables, mixed"} | EVENTS | MIXING,
        },
        settings=nmer.SHORT.settings,
        fast=nmer.SHORT.fast | {"capacity": 2_000, "env_steps": 110, "table_min_size": 20},
        seeds=range(400, 406),
        pilot_seeds=range(86, 90),
        measure=mean_of("return", "mean return over the run", digits=0),
        also=(last_of("return", 3, "mean return of the last three evaluations", digits=0),),
        **combination("event table", "neighbourhood mixup"),
        panels=(Panel("return", "evaluation return"),),
        xlabel="environment steps, the first 5,000 random",
        seeds_together=6,
        run=run,
    ),
)
