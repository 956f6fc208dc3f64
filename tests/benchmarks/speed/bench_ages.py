# SPDX-License-Identifier: Apache-2.0
"""Draws by age beside draws without: 256 of a million rows and of ten times as many, feedback, and one new row."""

from __future__ import annotations

from typing import Any

import torch
from peers import arguments
from timing import Table, burst_of
from transitions import in_chunks

from lightning_replay import Age, Replay, recipes

AGES: dict[str, Age | None] = {
    "no age": None,
    "half-life and floor": Age(half_life=50_000),
    "window": Age(max_age=200_000),
    "half-life in steps": Age(half_life=50_000, clock="env_steps"),
}


def built(recipe: str, age: Age | None, rows: int) -> Replay:
    """A full replay whose clock of environment steps counts rows."""
    replay: Any = getattr(recipes, recipe)(rows, 256, age=age, seed=0)
    stored = 0
    for chunk in in_chunks(rows):
        replay.advance(env_steps=stored)
        replay.extend(chunk)
        stored += len(chunk)
    return replay


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Draws by age")
    one = next(iter(in_chunks(1)))
    errors = torch.rand(256)
    for recipe in ("uniform", "prioritized"):
        replays = {name: built(recipe, age, options.rows) for name, age in AGES.items()}
        draws = {name: burst_of(replay.sample) for name, replay in replays.items()}
        table.measure(f"{recipe} 256", draws, rounds=options.rounds)
        batches = {name: replay.sample() for name, replay in replays.items()}
        if recipe == "prioritized":
            updates = {
                name: burst_of(lambda replay=replay, batch=batches[name]: replay.update_priority(batch, errors))
                for name, replay in replays.items()
            }
            table.measure("prioritized update 256", updates, rounds=options.rounds)
            del updates  # Its functions keep the replays.
        inserts = {name: burst_of(lambda replay=replay: replay.extend(one)) for name, replay in replays.items()}
        table.measure(f"{recipe} insert 1", inserts, rounds=options.rounds)
        for name in list(AGES)[1:]:
            times = table.times[f"{recipe} 256"]
            table.at_most(f"{recipe}, {name}: a draw over one without age", times[name] / times["no age"], 1.3)
        del replays, draws, inserts
        small = built(recipe, AGES["half-life and floor"], options.rows // 10)
        large = built(recipe, AGES["half-life and floor"], options.rows)
        sizes = {"a tenth of the rows": burst_of(small.sample), "all rows": burst_of(large.sample)}
        table.measure(f"{recipe} 256, sizes", sizes, rounds=options.rounds)
        times = table.times[f"{recipe} 256, sizes"]
        table.at_most(f"{recipe}: ten times the capacity", times["all rows"] / times["a tenth of the rows"], 1.5)
    table.finish(save=options.save, name="ages")


if __name__ == "__main__":
    main()
