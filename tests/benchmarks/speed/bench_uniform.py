# SPDX-License-Identifier: Apache-2.0
"""T1 and the uniform half of T3: drawing 256 and 4096 of a million transitions, against the packed limit and peers."""

from __future__ import annotations

import itertools

import contenders
import torch
from peers import arguments, bursts, start_peers
from timing import Table, burst_of


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Uniform sampling")
    peers = {} if options.no_peers else start_peers(table.missing)
    ours = contenders.uniform(options.rows, 256)
    theirs = contenders.torchrl_uniform(options.rows)
    arena = contenders.packed_limit(options.rows, ours.storage.row_bytes)
    for batch_size in (32, 256, 4096):
        indices = itertools.cycle(torch.randint(options.rows, (1024, batch_size)).unbind())
        work = f"uniform {batch_size}"
        pair = {
            "limit": lambda: arena.index_select(0, next(indices)),  # noqa: B023
            "ours": lambda: ours.sample(batch_size),  # noqa: B023
        }
        contestants = {name: burst_of(call) for name, call in pair.items()}
        contestants["torchrl"] = burst_of(lambda: theirs.sample(batch_size))  # noqa: B023
        contestants |= bursts(peers, table.missing, "uniform", rows=options.rows, batch_size=batch_size)
        table.measure(work, contestants, rounds=options.rounds)
        # A burst of nothing but gathers finds warm caches, which no training loop does: the pair also in turns.
        table.measure_in_turns(f"{work}, in turns", pair, rounds=options.rounds)
        limits = [
            (each, table.times[each]["ours"] / table.times[each]["limit"]) for each in (work, f"{work}, in turns")
        ]
        if batch_size == 256:
            for name, ratio in limits:
                table.at_most(f"T1 {name}: ours over the limit", ratio, 2.5)
            table.faster("T1", work, "ours", "torchrl", 7)
            table.faster("T1", work, "ours", "cpprb", 2)
        if batch_size == 4096:
            for name, ratio in limits:
                table.at_most(f"T3 {name}: ours over the limit", ratio, 1.4)
            table.faster("T3", work, "ours", "torchrl", 9)
    for peer in peers.values():
        peer.close()
    table.finish(save=options.save, name="uniform")


if __name__ == "__main__":
    main()
