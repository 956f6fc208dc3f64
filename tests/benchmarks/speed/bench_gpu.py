# SPDX-License-Identifier: Apache-2.0
"""T12 and whole batches on a CUDA device: rows kept there, rows kept on the CPU and moved, and TorchRL's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_sequences import steps
from tensordict import TensorDict
from timing import Table
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SliceSampler
from transitions import in_chunks

from lightning_replay import recipes
from lightning_replay.neighbors.search import PointTable, exact_search, faiss_search
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.static_draws import StaticDraws

Work = Callable[[], object]
EXPONENTS = {"priority_exponent": 0.6, "importance_exponent": 0.4}


#: A step of a simulator: environments, numbers of an observation, numbers of an action.
ENVS, OBSERVED, ACTED = 4_096, 98, 29


def waited(work: Work) -> Work:
    """The same call with the work that it leaves on the device."""

    def both() -> None:
        work()
        torch.cuda.synchronize()

    return both


def filled(replay: Any, rows: int, made: Callable[[int], Any] = in_chunks) -> Any:
    """The same with rows, given in batches."""
    for chunk in made(rows):
        replay.extend(chunk)
    return replay


def drawn_and_updated(replay: Any, count: int) -> Work:
    """One prioritized update with TD errors that a network on the device would give."""
    td_error = torch.rand(count, device="cuda") + 0.01

    def work() -> None:
        batch = replay.sample(count).to("cuda")
        replay.update_priority(batch, td_error)

    return work


def batches(table: Table, rows: int, rounds: int) -> None:
    """Draws of 256 and of 4,096 rows, uniform and prioritized with the update."""
    held = {device: filled(recipes.uniform(rows, 256, device=device, seed=0), rows) for device in ("cuda", "cpu")}
    theirs = filled(TensorDictReplayBuffer(storage=LazyTensorStorage(rows, device="cuda"), batch_size=256), rows)
    for count in (256, 4096):
        work = {
            "ours": waited(lambda: held["cuda"].sample(count)),  # noqa: B023
            "ours, moved": waited(lambda: held["cpu"].sample(count).to("cuda")),  # noqa: B023
            "torchrl": waited(lambda: theirs.sample(count)),  # noqa: B023
        }
        table.measure_in_turns(f"uniform {count}", work, rounds=rounds)
    held = {
        device: filled(recipes.prioritized(rows, 256, device=device, seed=0, **EXPONENTS), rows)
        for device in ("cuda", "cpu")
    }
    there = recipes.prioritized(rows, 256, device="cuda", draws_on="device", seed=0, **EXPONENTS)
    contenders = {"ours": held["cuda"], "ours, moved": held["cpu"], "ours, drawn there": filled(there, rows)}
    try:
        storage = LazyTensorStorage(rows, device="cuda")
        contenders["torchrl"] = filled(
            TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=256), rows
        )
    except Exception as error:  # whatever its missing extension raises
        table.missing["torchrl prioritized"] = str(error)[:200]
    for count in (256, 4096):
        work = {name: waited(drawn_and_updated(replay, count)) for name, replay in contenders.items()}
        draws = there.static_draws(count)
        work["ours, in one graph"] = prepared(draws, in_graph(static_step(draws, count)))
        table.measure_in_turns(f"prioritized {count} and update", work, rounds=rounds)
    times = table.times["prioritized 4096 and update"]
    table.at_most("microseconds of 4,096 by priority with the update", times["ours, drawn there"], 400.0)


def static_step(draws: StaticDraws, count: int) -> Work:
    """A draw and an update of priorities as tensor code alone."""
    td_error = torch.rand(count, device="cuda") + 0.01
    return lambda: draws.update_priority(draws.draw(), td_error)


def prepared(draws: StaticDraws, work: Work) -> Work:
    """The same call after the random numbers of its step."""

    def both() -> None:
        draws.prepare()
        work()

    return both


def step_of_simulator(device: str) -> dict[Any, torch.Tensor]:
    """Columns of one step of all environments, of which one in a hundred ends."""
    ended = torch.rand(ENVS, 1, device=device) < 0.01
    return {
        "observation": torch.randn(ENVS, OBSERVED, device=device),
        "action": torch.randn(ENVS, ACTED, device=device),
        "trajectory": torch.arange(ENVS, device=device),
        ("next", "observation"): torch.randn(ENVS, OBSERVED, device=device),
        ("next", "reward"): torch.randn(ENVS, 1, device=device),
        ("next", "terminated"): torch.zeros_like(ended),
        ("next", "truncated"): ended,
        ("next", "done"): ended,
    }


def simulators(table: Table, steps_kept: int, rounds: int, device: str = "cuda") -> None:
    """Rows of a simulator on the device: 32,768 drawn uniformly, and a step inserted with returns over 3 steps."""
    rows = ENVS * steps_kept
    options = {"device": device, "draws_on": "device", "seed": 0, "check_continuity": False}
    uniform = recipes.uniform(rows, 32_768, **options)
    returns = recipes.uniform(rows, 32_768, n_steps=3, discount=0.97, **options)
    step = step_of_simulator(device)
    ring = {key: torch.zeros(rows, *value.shape[1:], dtype=value.dtype, device=device) for key, value in step.items()}
    place = 0

    def into_ring() -> None:
        nonlocal place
        for key, column in ring.items():
            column[place : place + ENVS] = step[key]
        place = (place + ENVS) % rows

    for _ in range(steps_kept):
        uniform.extend_columns(step)
        returns.extend_columns(step)
    packed = uniform.storage.all_packed

    def gathered() -> torch.Tensor:
        return packed.index_select(0, torch.randint(rows, (32_768,), device=device))

    found = {"bare gather": waited(gathered), "ours, drawn there": waited(uniform.sample)}
    table.measure_in_turns("uniform 32768", found, rounds=rounds)
    times = table.times["uniform 32768"]
    table.at_most("32,768 uniform rows over the bare gather", times["ours, drawn there"] / times["bare gather"], 1.5)
    found = {"a ring by hand": waited(into_ring), "ours, returns over 3": waited(lambda: returns.extend_columns(step))}
    table.measure_in_turns(f"{ENVS} rows inserted", found, rounds=rounds)
    times = table.times[f"{ENVS} rows inserted"]
    ratio = times["ours, returns over 3"] / times["a ring by hand"]
    table.at_most("4,096 rows with returns over 3 steps over a ring", ratio, 1.5)


def sequences(table: Table, rows: int, rounds: int) -> None:
    """16 sequences of 64 steps, as DreamerV3 draws them."""

    def chunks(count: int) -> Any:
        return (steps(first, min(100_000, count - first)) for first in range(0, count, 100_000))

    options = {"length": 64, "overlap": 63, "min_steps": 64, "seed": 0}
    held = {
        device: filled(recipes.sequences(rows, 16, device=device, **options), rows, chunks)
        for device in ("cuda", "cpu")
    }
    sampler = SliceSampler(slice_len=64, traj_key="trajectory", cache_values=True)
    storage = LazyTensorStorage(rows, device="cuda")
    theirs = filled(TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16 * 64), rows, chunks)
    work = {
        "ours": waited(held["cuda"].sample),
        "ours, moved": waited(lambda: held["cpu"].sample().to("cuda")),
        "torchrl, kept until the next write": waited(theirs.sample),
    }
    table.measure_in_turns("16 sequences of 64", work, rounds=rounds)


def goals(table: Table, rows: int, rounds: int) -> None:
    """256 rows of a goal environment, four of five with the goal of a later step."""

    def reward(achieved: np.ndarray, desired: np.ndarray, _info: object) -> np.ndarray:
        return (np.linalg.norm(achieved - desired, axis=-1) < 0.5).astype(np.float32)

    def chunks(count: int) -> Any:
        for first in range(0, count, 50_000):
            part = steps(first, min(50_000, count - first), episode_length=50)
            for row in (part, part["next"]):
                place = row.pop("observation")
                row["observation"] = TensorDict(
                    {"observation": place, "achieved_goal": place[:, :2], "desired_goal": place[:, 2:]}, part.batch_size
                )
            yield part

    options = {"strategy": "future", "share": 0.8, "reward": reward, "seed": 0}
    held = {
        device: filled(recipes.hindsight(rows, 256, device=device, **options), rows, chunks)
        for device in ("cuda", "cpu")
    }
    work = {"ours": waited(held["cuda"].sample), "ours, moved": waited(lambda: held["cpu"].sample().to("cuda"))}
    table.measure_in_turns("256 rows with relabelled goals", work, rounds=rounds)


def drawn_alone(tree: PriorityTree, td_error: torch.Tensor) -> Work:
    """Slots and weights for a batch on the device, and an update by TD errors there, without the rows."""

    def work() -> None:
        uniform = torch.rand(len(td_error), dtype=torch.float64, device=tree.device)
        index, weight = tree.draw(uniform, exponent=-0.4)
        index.to("cuda"), weight.to("cuda")
        tree.set(index, td_error.to(tree.device))

    return work


def priorities(table: Table, rows: int, rounds: int) -> None:
    """The index alone, by where the priorities are."""
    trees = {device: PriorityTree(rows, device=device) for device in ("cpu", "cuda")}
    for device, tree in trees.items():
        tree.set(torch.arange(rows, device=device), torch.rand(rows, device=device) + 0.01)
    for count in (256, 4096):
        td_error = torch.rand(count, device="cuda") + 0.01
        work = {
            "on the CPU": waited(drawn_alone(trees["cpu"], td_error)),
            "on the GPU": waited(drawn_alone(trees["cuda"], td_error)),
            "on the GPU, in one graph": in_graph(drawn_alone(trees["cuda"], td_error)),
        }
        table.measure_in_turns(f"priorities alone, {count}", work, rounds=rounds)


def in_graph(work: Work) -> Work:
    """The same call as the replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return waited(graph.replay)


def graphs(table: Table, rows: int, rounds: int) -> None:
    """T12: sums, gather and update of 4,096 of 10 million rows in one CUDA graph, beside the gather alone."""
    arena = torch.randn(rows, 44, device="cuda")
    tree = PriorityTree(rows, device="cuda")
    tree.set(torch.arange(rows, device="cuda"), torch.rand(rows, device="cuda") + 0.01)
    uniform = torch.rand(4096, dtype=torch.float64, device="cuda")

    def gathered() -> torch.Tensor:
        return arena.index_select(0, (uniform.uniform_() * rows).long())

    def prioritized() -> torch.Tensor:
        index, weight = tree.draw(uniform.uniform_(), exponent=-0.4)
        found = arena.index_select(0, index)
        tree.set(index, (found[:, 0] * weight).abs_() + 0.01)
        return found

    found = {"gather": in_graph(gathered), "draw, gather and update": in_graph(prioritized)}
    table.measure_in_turns(f"one graph, 4096 of {rows} rows", found, rounds=rounds)
    times = table.times[f"one graph, 4096 of {rows} rows"]
    table.at_most("T12: the whole over the gather", times["draw, gather and update"] / times["gather"], 2.5)


def neighbors(table: Table, rounds: int) -> None:
    """The 10 nearest of all rows to each row: exact in torch, and by Faiss on the CPU and on the GPU, where it is."""
    for rows in (10_000, 50_000):
        points, work = torch.randn(rows, 23), {}
        for device in ("cpu", "cuda"):
            held, slots = PointTable(rows, 23, device), torch.arange(rows, device=device)
            held.place(slots, points.to(device))
            given = held, slots, 10, rows
            if device == "cuda":
                work["exact in torch, on the GPU"] = waited(lambda given=given: exact_search(*given))
            for name, is_file in (("faiss flat", False), ("faiss inverted file", True)):
                search = waited(lambda given=given, is_file=is_file: faiss_search(*given, inverted_file=is_file))
                try:
                    search()
                except ImportError as error:
                    table.missing[f"{name}, {device}"] = str(error)[:200]
                else:
                    work[f"{name}, {device}"] = search
        table.measure_in_turns(f"neighbours of {rows:,} rows", work, rounds=rounds)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    table = Table(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    graphs(table, 10 * options.rows, options.rounds)
    priorities(table, options.rows, options.rounds)
    batches(table, options.rows, options.rounds)
    simulators(table, max(options.rows // ENVS, 2), options.rounds)
    sequences(table, options.rows, options.rounds)
    goals(table, options.rows // 5, options.rounds)
    neighbors(table, options.rounds)
    table.finish(save=options.save, name="gpu")


if __name__ == "__main__":
    main()
