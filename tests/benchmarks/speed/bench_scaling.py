# SPDX-License-Identifier: Apache-2.0
"""T4: how the cost grows from 100,000 over 1,000,000 to 10,000,000 rows, and exactness of the sums at ten million."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import contenders
import torch
from peers import arguments
from timing import Table, burst_of

from lightning_replay.priority_tree import PriorityTree

BATCH = 256


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Growth with the number of rows")
    sizes = [options.rows // 10, options.rows, options.rows * 10]
    backends = ["torch", "numba"]
    try:
        PriorityTree(4, backend="numba")
    except ImportError as error:
        table.missing["numba"] = str(error)
        backends.remove("numba")
    for backend in backends:
        trees = {f"{size:,}": _filled(PriorityTree(size, backend=backend), size) for size in sizes}
        work = f"priority index alone, {backend}"
        table.measure(
            work, {name: burst_of(_draw_and_set(tree)) for name, tree in trees.items()}, rounds=options.rounds
        )
        _ratios(table, work, sizes)
        _exactness(table, trees[f"{sizes[-1]:,}"], backend)
        del trees
        replays = {f"{size:,}": contenders.prioritized(size, BATCH, backend) for size in sizes}
        work = f"whole prioritized batch, {backend}"
        bursts = {name: burst_of(lambda r=replay: contenders.feedback(r, BATCH)) for name, replay in replays.items()}
        table.measure(work, bursts, rounds=options.rounds)
        _ratios(table, work, sizes)
        del replays, bursts
    table.finish(save=options.save, name="scaling")


def _ratios(table: Table, work: str, sizes: list[int]) -> None:
    times = table.times[work]
    for small, large in itertools.pairwise(sizes):
        ratio = times[f"{large:,}"] / times[f"{small:,}"]
        table.at_most(f"T4 {work}: {large:,} over {small:,} rows", ratio, 1.5)


def _filled(tree: PriorityTree, size: int) -> PriorityTree:
    for index in torch.arange(size).split(1_000_000):
        tree.set(index, torch.rand(len(index)) + 0.01)
    return tree


def _draw_and_set(tree: PriorityTree) -> Callable[[], None]:
    def work() -> None:
        index = tree.find(torch.rand(BATCH, dtype=torch.float64) * tree.total())
        tree.get(index)
        tree.min()
        tree.set(index, torch.rand(BATCH) + 0.01)

    return work


def _exactness(table: Table, tree: PriorityTree, backend: str) -> None:
    """Ten million updates later: the sum, and every positive item against exact integer arithmetic."""
    size = tree.capacity
    for _ in range(size // 100_000):
        tree.set(torch.randint(size, (100_000,)), torch.rand(100_000))
    leaves = torch.cat([tree.get(index) for index in torch.arange(size).split(1_000_000)]).double()
    drift = abs(float(tree.total()) - float(leaves.sum())) / float(leaves.sum())
    table.at_most(f"T4 {backend}: relative drift after {size:,} updates", drift, 1e-12)

    # Multiples of 2**-20, nine tenths of them tiny, one in sixteen zero: float64 sums of them are exact in any order.
    value = torch.where(torch.rand(size) < 0.1, torch.randint(1, 2**20, (size,)), torch.randint(1, 16, (size,)))
    value = (value * (torch.arange(size) % 16 != 0)).double() / 2**20
    for index in torch.arange(size).split(1_000_000):
        tree.set(index, value[index].float())
    ends = value.cumsum(0)
    found = torch.cat([tree.find(middle) for middle in (ends - value / 2).split(1_000_000)])
    positive = value > 0
    reached = float((found == torch.arange(size))[positive].double().mean())
    table.at_least(f"T4 {backend}: share of positive items reachable at {size:,}", reached, 1.0)
    uniform = torch.rand(1_000_000, dtype=torch.float64) * tree.total()
    edges = torch.cat([uniform, ends[:: size // 100_000], tree.total().reshape(1)])
    zeros = int((value[tree.find(edges)] == 0).sum())
    table.at_most(f"T4 {backend}: zeros drawn in {len(edges):,} draws", zeros, 0)


if __name__ == "__main__":
    main()
