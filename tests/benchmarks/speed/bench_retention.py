# SPDX-License-Identifier: Apache-2.0
"""T9: inserting one row into a full buffer of a million rows that keeps the least expendable ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import contenders
import torch
from timing import Table, burst_of
from transitions import half_cheetah

from lightning_replay import Replay, recipes
from lightning_replay.writers import StochasticSurprise


def full(rows: int, **options: object) -> Replay:
    """A buffer full of rows of random priorities, some of which feedback has set."""
    replay = recipes.surprise_retention(rows, 256, seed=0, **options)
    contenders.fill(replay, rows)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, rows, 100_000):
        index = torch.arange(start, min(rows, start + 100_000))
        values, action = torch.randn(len(index), 6, generator=generator), index % 6
        td_error = torch.randn(len(index), generator=generator)
        replay.update_priority(index, td_error, action_values=values, action=action)
    return replay


def feedback(replay: Replay, batch_size: int, signals: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Draw a batch and give its TD errors back."""

    def draw_and_update() -> None:
        batch = replay.sample(batch_size)
        replay.update_priority(batch["index"], torch.randn(batch_size), generation=batch["generation"], **signals)

    return draw_and_update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = options.rows
    table = Table(f"insert when full, {rows:,} rows like HalfCheetah's, microseconds")
    buffers = {
        "retention": full(rows),  # every candidate enters, and one row leaves for it
        "refusing": full(rows, initial_surprise=lambda formed: torch.zeros(formed.shape[0])),
        "mixed": full(rows, initial_surprise=lambda formed: formed["next", "reward"].flatten().abs()),
        "stochastic": full(rows, rule=StochasticSurprise()),
        "prioritized": contenders.prioritized(rows, 256, "auto"),
        "uniform": contenders.uniform(rows, 256),
    }
    for count in (1, 64, 1000):
        data = half_cheetah(count)
        works = {
            name: burst_of(lambda replay=replay, data=data: replay.extend(data)) for name, replay in buffers.items()
        }
        if count > 1:
            del works["stochastic"]  # one decision after the other, each with a draw
        table.measure(f"insert {count}", works, rounds=options.rounds)
    times = table.times["insert 1"]
    table.at_most("T9: microseconds on this machine, now", times["retention"], 60)
    for name in ("retention", "refusing", "mixed"):
        time = table.times["insert 1000"][name]
        table.at_most(f"microseconds of 1,000 rows on this machine, now, {name}", time, 500)
    print(f"        over the plain insert of the same run: {times['retention'] / times['uniform']:.2f}")
    print(f"        over the prioritized insert, which it includes: {times['retention'] / times['prioritized']:.2f}")
    for batch_size in (32, 256):
        signals = {"action_values": torch.randn(batch_size, 6), "action": torch.arange(batch_size) % 6}
        works = {
            name: burst_of(feedback(buffers[name], batch_size, signals if name == "retention" else {}))
            for name in ("retention", "prioritized")
        }
        table.measure(f"draw {batch_size} and update", works, rounds=options.rounds)
    stored = buffers["retention"]
    print(f"bytes of retention priorities per row: {stored.writer.nbytes / rows:.1f}")
    table.finish(save=options.save, name="retention")


if __name__ == "__main__":
    main()
