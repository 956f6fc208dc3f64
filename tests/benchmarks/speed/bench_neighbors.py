# SPDX-License-Identifier: Apache-2.0
"""T7: what neighbour lists cost per insertion and per draw, and their recall; a search per batch beside them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import contenders
import torch
from peers import arguments
from tensordict import TensorDict
from timing import Burst, Table, burst_of
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from transitions import in_chunks

from lightning_replay import recipes
from lightning_replay.neighbors import NeighborLists
from lightning_replay.neighbors.search import PointTable

WIDTH, NEIGHBORS, BATCH, BLOCK = 23, 10, 256, 64


def walk(steps: int) -> Tensor:
    """HalfCheetah's random policy where MuJoCo is installed, otherwise a bent random walk of the same width."""
    try:
        import gymnasium

        environment = gymnasium.make("HalfCheetah-v5")
    except ImportError:
        print("MuJoCo is not installed: random walk data")
        return random_walk(steps)
    environment.action_space.seed(0)
    observation, _ = environment.reset(seed=0)
    rows = []
    for _ in range(steps):
        action = environment.action_space.sample()
        rows.append(torch.cat([torch.from_numpy(observation), torch.from_numpy(action)]).float())
        observation, _, terminated, truncated, _ = environment.step(action)
        if terminated or truncated:
            observation, _ = environment.reset()
    return torch.stack(rows)


def random_walk(steps: int) -> Tensor:
    """An autoregressive walk in 8 dimensions, seen in 17 with noise, and 6 random actions."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.25 * torch.randn(steps, 8, generator=generator)
    states = [noise[0]]
    for row in noise[1:]:
        states.append(0.97 * states[-1] + row)
    seen = torch.tanh(torch.stack(states) @ torch.randn(8, 17, generator=generator) * 0.7)
    seen += 0.1 * torch.randn(steps, 17, generator=generator)
    return torch.cat([seen, torch.rand(steps, 6, generator=generator) * 2 - 1], 1)


def filled(data: Tensor, capacity: int, backend: str = "exact") -> NeighborLists:
    """Lists of all rows of ``data``, up to date."""
    lists = NeighborLists(capacity, NEIGHBORS, backend=backend)
    lists.write(torch.arange(len(data)), data)
    lists.neighbors(torch.arange(1))
    return lists


def insertions(lists: NeighborLists, data: Tensor, draws: int) -> Burst:
    """Writes rows one by one, each followed by ``draws`` draws; without draws a pass runs per 64 rows.

    Returns the mean microseconds of an insertion with all work it causes, its draws left out.
    """
    generator = torch.Generator().manual_seed(0)
    slots: Iterator[int] = itertools.count(len(lists))
    rows = itertools.cycle(data.split(1))
    oldest = torch.zeros(1, dtype=torch.int64)

    def insert() -> None:
        slot = next(slots) % lists.capacity
        lists.write(torch.tensor([slot]), next(rows))
        for _ in range(draws):
            lists.draw(torch.randint(len(lists), (BATCH,), generator=generator), generator)
        if not draws and slot % BLOCK == BLOCK - 1:
            lists.draw((oldest + slot + 1 + BLOCK) % len(lists), generator)

    def burst(calls: int) -> float:
        number = calls * BLOCK
        start = time.perf_counter()
        for _ in range(number):
            insert()
        return (time.perf_counter() - start) / number * 1e6

    return burst


def product(rows: int) -> Burst:
    """What the machine takes per row for the distances alone: 64 rows against all, in one product."""
    points, queries = torch.randn(rows, WIDTH + 2), torch.randn(BLOCK, WIDTH + 2)
    distance = torch.empty(BLOCK, rows)
    timed = burst_of(lambda: torch.mm(queries, points.T, out=distance))
    return lambda calls: timed(calls) / BLOCK


def searches(data: Tensor) -> dict[str, Callable[[Tensor], object]]:
    """What a batch costs without lists: the neighbours of its rows by a search; the Faiss indices are built already."""
    table = PointTable(len(data), WIDTH)
    points = (data - data.mean(0)) / data.std(0, correction=0)
    table.place(torch.arange(len(data)), points)
    found: dict[str, Callable[[Tensor], object]] = {
        "exact search": lambda index: table.nearest(index, NEIGHBORS, len(data))
    }
    try:
        import faiss
    except ImportError:
        return found
    faiss.omp_set_num_threads(1)
    rows = points.numpy()
    flat = faiss.IndexFlatL2(WIDTH)
    flat.add(rows)
    cells = round(4 * len(data) ** 0.5)
    inverted = faiss.IndexIVFFlat(faiss.IndexFlatL2(WIDTH), WIDTH, cells)
    inverted.train(rows)
    inverted.add(rows)
    inverted.nprobe = max(1, cells // 10)
    found["faiss flat"] = lambda index: flat.search(rows[index.numpy()], NEIGHBORS + 1)
    found["faiss inverted file"] = lambda index: inverted.search(rows[index.numpy()], NEIGHBORS + 1)
    return found


def upkeep(table: Table, data: Tensor, rows: int, rounds: int) -> None:
    """Microseconds per insertion, growing and with a full ring, and per draw of 256, beside a search per batch."""
    growing, ring = filled(data[:rows], rows + 400 * BLOCK), filled(data[:rows], rows)
    new = data[rows:]
    work = f"insert at {rows:,}"
    contestants = {"growing": insertions(growing, new, 0), "full ring": insertions(ring, new, 0)}
    contestants["matrix product alone"] = product(rows)
    table.measure(work, contestants, rounds=rounds, seconds=0.05)
    if rows == 100_000:
        for name in ("growing", "full ring"):
            table.at_most(f"T7 {work}, {name}: ms", table.times[work][name] / 1e3, 0.25)
    table.measure(f"insert and 1 draw at {rows:,}", {"full ring": insertions(ring, new, 1)}, rounds=1)
    table.measure(f"insert and 20 draws at {rows:,}", {"full ring": insertions(ring, new, 20)}, rounds=1)
    ring.neighbors(torch.arange(rows))
    index, generator = torch.randint(rows, (BATCH,)), torch.Generator().manual_seed(0)
    contestants = {"lists": burst_of(lambda: ring.draw(index, generator))}
    for name, search in searches(data[:rows]).items():
        contestants[name] = burst_of(lambda search=search: search(index))
    table.measure(f"partners of {BATCH} at {rows:,}", contestants, rounds=3)


def recall(table: Table, data: Tensor) -> None:
    """Recall while 20,000 rows grow to 60,000, and through a turn and a half of a full ring of 30,000."""
    for title, start, capacity, stop in (("growth", 20_000, 60_000, 60_000), ("full ring", 30_000, 30_000, 75_000)):
        lists, generator = filled(data[:start], capacity), torch.Generator().manual_seed(0)
        found = []
        begin = time.perf_counter()
        for first in range(start, stop, BLOCK):
            new = torch.arange(first, min(first + BLOCK, stop))
            lists.write(new % capacity, data[new])
            lists.draw(torch.randint(len(lists), (BATCH,), generator=generator), generator)
            if first // 5_000 < (first + BLOCK) // 5_000:
                found.append(lists.recall_at(NEIGHBORS, 500, generator))
        milliseconds = (time.perf_counter() - begin) / (stop - start) * 1e3
        print(f"recall, {title}: {[round(value, 4) for value in found]}; {milliseconds:.3f} ms per row with measuring")
        table.at_least(f"T7 least recall, {title}", min(found), 0.96)


def rebuilds(data: Tensor) -> None:
    """Seconds until 50,000 rows written at once have lists, by back end, and the recall of these."""
    for backend in ("exact", "faiss_flat", "faiss_ivf"):
        try:
            begin = time.perf_counter()
            lists = filled(data[:50_000], 50_000, backend)
            seconds = time.perf_counter() - begin
        except ImportError as error:
            print(f"   --   rebuild by {backend}: {error}")
            continue
        print(f"rebuild of 50,000 by {backend}: {seconds:.1f} s, recall {lists.recall_at(NEIGHBORS, 500):.3f}")


def mixed_batches(table: Table, rows: int, rounds: int) -> None:
    """A mixed batch beside our uniform batch and TorchRL's: from a buffer at rest, and while rows arrive."""
    mixed = recipes.neighborhood_mixup(rows, BATCH, num_neighbors=NEIGHBORS, seed=0)
    contenders.fill(mixed, rows)
    buffers = {"mixed": mixed, "uniform": contenders.uniform(rows, BATCH), "torchrl": contenders.torchrl_uniform(rows)}
    new = itertools.cycle(next(in_chunks(10_000, chunk=10_000)).split(1))
    for title, draws in (("at rest", 0), ("20 draws per insertion", 20), ("1 draw per insertion", 1)):
        work = f"batch of {BATCH} at {rows:,}, {title}"
        if not draws:  # in turns, so that no contender finds all of its rows in the caches
            table.measure_in_turns(
                work, {name: lambda b=buffer: b.sample(BATCH) for name, buffer in buffers.items()}, rounds=rounds
            )
            judge(table, work)
            continue
        contestants = {name: draw_burst(buffer, new, draws, statistics.median) for name, buffer in buffers.items()}
        contestants["mixed, mean with upkeep"] = draw_burst(mixed, new, draws, statistics.mean)
        table.measure(work, contestants, rounds=rounds, seconds=0.3)
        judge(table, work)


def judge(table: Table, work: str) -> None:
    """Records a mixed batch over our uniform one, and beside TorchRL's."""
    table.at_most(f"T7 {work}: mixed over uniform", table.times[work]["mixed"] / table.times[work]["uniform"], 3)
    table.faster("T7", work, "mixed", "torchrl", 1)


def draw_burst(
    buffer: TensorDictReplayBuffer, new: Iterator[TensorDict], draws: int, summary: Callable[[list[float]], float]
) -> Burst:
    """Microseconds of a draw, where a row arrives before every ``draws`` of them; the median leaves the passes out."""

    def burst(calls: int) -> float:
        durations = []
        for call in range(calls):
            if draws and call % draws == 0:
                buffer.extend(next(new))
            start = time.perf_counter()
            buffer.sample(BATCH)
            durations.append(time.perf_counter() - start)
        return summary(durations) * 1e6

    return burst


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    options = arguments(__doc__)
    table = Table("Neighbour lists")
    data = walk(125_000)
    upkeep(table, data, 10_000, options.rounds)
    upkeep(table, data, 100_000, options.rounds)
    recall(table, data)
    rebuilds(data)
    mixed_batches(table, 100_000, options.rounds)
    table.finish(save=options.save, name="neighbors")


if __name__ == "__main__":
    main()
