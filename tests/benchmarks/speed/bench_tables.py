# SPDX-License-Identifier: Apache-2.0
"""T8: inserting into and drawing from 8 tables, and from one, over a plain first-in-first-out buffer."""

from __future__ import annotations

import contenders
import torch
from peers import arguments
from tensordict import TensorDict
from timing import Table, burst_of
from transitions import half_cheetah

from lightning_replay import recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.replay import Replay

TABLES = 8
LIMIT = 1.5


def event_tables(rows: int, thresholds: list[float], **options) -> Replay:
    """A default table and 7 event tables of a tenth of its size, whose events are a step in a thousand, history 20."""
    tables = [
        EventTable(f"at least {threshold:.3f}", reward_at_least(threshold), 20, capacity=rows // 10)
        for threshold in thresholds
    ]
    return recipes.event_tables(rows, 256, tables=tables, seed=0, **options)


def with_tasks(rows: TensorDict, tasks: int) -> TensorDict:
    """The rows, dealt out to tasks in turn."""
    return rows.clone(False).set("task", torch.arange(len(rows)) % tasks)


def filled(replay: Replay, rows: int, tasks: int) -> Replay:
    """Full, from batches as a collector sends them."""
    batch = with_tasks(half_cheetah(10_000), tasks) if tasks else half_cheetah(10_000)
    for _ in range(rows // 10_000 + 1):
        replay.extend(batch)
    return replay


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Tables")
    rows = options.rows
    thresholds = (
        half_cheetah(10_000)["next", "reward"].flatten().quantile(torch.linspace(0.999, 0.9995, TABLES - 1)).tolist()
    )
    names = [f"task {number}" for number in range(TABLES)]
    replays = {
        "plain": (contenders.uniform(rows, 256), 0),
        "8 event tables": (filled(event_tables(rows, thresholds), rows, 0), 0),
        "8 task tables": (
            filled(recipes.parallel_curriculum(names, rows // TABLES, 256, seed=0), rows, TABLES),
            TABLES,
        ),
        "one table": (filled(recipes.parallel_curriculum(["only"], rows, 256, seed=0), rows, 1), 1),
        "torchrl": (contenders.torchrl_uniform(rows, 256), 0),
    }
    for count in (1, 64, 1000):
        new = {
            name: with_tasks(half_cheetah(count), tasks) if tasks else half_cheetah(count)
            for name, (_, tasks) in replays.items()
        }
        work = f"insert {count}"
        table.measure(
            work,
            {name: burst_of(lambda b=buffer, n=new[name]: b.extend(n)) for name, (buffer, _) in replays.items()},
            rounds=options.rounds,
        )
    table.measure_in_turns(
        "sample 256", {name: buffer.sample for name, (buffer, _) in replays.items()}, rounds=options.rounds
    )
    cycles = {}
    for name, (buffer, tasks) in replays.items():
        new = with_tasks(half_cheetah(64), tasks) if tasks else half_cheetah(64)
        cycles[name] = lambda b=buffer, n=new: (b.extend(n), b.sample())
    table.measure_in_turns("insert 64, sample 256", cycles, rounds=options.rounds)
    for work, times in table.times.items():
        for name in ("8 event tables", "8 task tables"):
            table.at_most(f"T8 {work}: {name} over plain", times[name] / times["plain"], LIMIT)
        table.at_most(f"T8 {work}: one table over TorchRL's ring", times["one table"] / times["torchrl"], 1.0)
    table.finish(save=options.save, name="tables")


if __name__ == "__main__":
    main()
