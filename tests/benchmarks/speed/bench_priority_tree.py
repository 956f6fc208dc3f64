# SPDX-License-Identifier: Apache-2.0
"""T4, the priority index alone: draw 256 with weights and update the same 256, microseconds, by capacity."""

from __future__ import annotations

import statistics
import time

import torch

from lightning_replay.priority_tree import PriorityTree

CAPACITIES = (100_000, 1_000_000, 10_000_000)
BACKENDS = ("numba", "torch")
BATCH = 256
WORK = ("draw", "update", "both", "new 1", "new 1000")


def _filled(capacity: int, backend: str) -> PriorityTree:
    tree = PriorityTree(capacity, backend=backend)
    tree.load_state_dict({"leaves": torch.rand(capacity) ** 0.6})
    return tree


def _draw_and_update(tree: PriorityTree, generator: torch.Generator) -> tuple[float, float]:
    priority = torch.rand(BATCH, generator=generator)
    started = time.perf_counter()
    index, _ = tree.draw(torch.rand(BATCH, dtype=torch.float64, generator=generator), exponent=-0.4)
    drawn = time.perf_counter()
    tree.set_checked(index, priority, tree.capacity, offset=1e-6, exponent=0.6)
    return drawn - started, time.perf_counter() - drawn


def _insert(tree: PriorityTree, rows: torch.Tensor, first: int) -> float:
    index = rows + first
    started = time.perf_counter()
    tree.fill_checked(index, 1.0, tree.capacity)
    return time.perf_counter() - started


def _microseconds(seconds: list[float]) -> float:
    """Lower decile: what a quiet machine would show, on a machine that is not."""
    return statistics.quantiles(seconds, n=10)[0] * 1e6


def _take_turns(trees: dict[int, PriorityTree], rounds: int, repeats: int) -> dict[int, dict[str, list[float]]]:
    """Seconds per piece of work; the capacities take turns, so that a busy spell falls on all of them alike."""
    generator = torch.Generator().manual_seed(0)
    seconds: dict[int, dict[str, list[float]]] = {capacity: {work: [] for work in WORK} for capacity in trees}
    for spell in range(rounds):
        for capacity, tree in trees.items():
            times = seconds[capacity]
            for _ in range(repeats):
                draw, update = _draw_and_update(tree, generator)
                times["draw"].append(draw)
                times["update"].append(update)
                times["both"].append(draw + update)
            first = spell * 2_000 % (capacity - 2_000)
            times["new 1"].append(_insert(tree, torch.zeros(1, dtype=torch.int64), first))
            times["new 1000"].append(_insert(tree, torch.arange(1_000), first + 1))
    return seconds


def measure(rounds: int = 40, repeats: int = 50) -> dict[str, dict[int, float]]:
    """Prints a table and returns the microseconds of draw and update together, by back end and capacity."""
    torch.set_num_threads(1)
    totals: dict[str, dict[int, float]] = {}
    print(f"{'back end':8} {'capacity':>11} " + " ".join(f"{work:>9}" for work in WORK) + "   us")
    for backend in BACKENDS:
        seconds = _take_turns({capacity: _filled(capacity, backend) for capacity in CAPACITIES}, rounds, repeats)
        for capacity, times in seconds.items():
            print(f"{backend:8} {capacity:11,} " + " ".join(f"{_microseconds(times[work]):9.1f}" for work in WORK))
        totals[backend] = {capacity: _microseconds(times["both"]) for capacity, times in seconds.items()}
        small, middle, large = totals[backend].values()
        print(f"{backend:8} 1M over 100k {middle / small:.2f}, 10M over 1M {large / middle:.2f} (T4: at most 1.5 each)")
    return totals


if __name__ == "__main__":
    measure()
