# SPDX-License-Identifier: Apache-2.0
"""Sequences as the loops of world models draw them, from few and many rows, beside TorchRL's SliceSampler."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from timing import Table
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SliceSampler

from lightning_replay import recipes

LOOPS = {"DreamerV3, 16 of 64": (16, 64), "TD-MPC2, 256 of 4": (256, 4), "R2D2, 64 of 80": (64, 80)}
ROWS = (40_000, 4_000_000)


def steps(first: int, count: int, episode_length: int = 500) -> TensorDict:
    """Small rows of one environment."""
    number = torch.arange(first, first + count).unsqueeze(1)
    ended = (number + 1) % episode_length == 0
    following = {"observation": (number + 1).float().expand(-1, 4), "reward": torch.zeros(count, 1)}
    following |= {"terminated": ended, "truncated": torch.zeros_like(ended), "done": ended.clone()}
    columns = {"observation": number.float().expand(-1, 4), "action": torch.zeros(count, 1), "next": following}
    return TensorDict(columns | {"trajectory": number.flatten() // episode_length}, [count])


def filled(replay: Any, rows: int) -> Any:
    """The same with as many rows, given in batches."""
    for first in range(0, rows, 100_000):
        replay.extend(steps(first, min(100_000, rows - first)))
    return replay


def contenders(rows: int, count: int, length: int) -> dict[str, Callable[[], Any]]:
    """Draws of ours, uniform and with the update of priorities, and of TorchRL's, whose slices it may keep."""
    options = {"length": length, "overlap": length - 1, "min_steps": length, "seed": 0}
    uniform = filled(recipes.sequences(rows, count, **options), rows)
    prioritized = filled(recipes.sequences(rows, count, priority_exponent=0.9, **options), rows)
    td_error = torch.rand(count, length)

    def drawn_and_updated() -> None:
        prioritized.update_priority(prioritized.sample(), td_error)

    found = {"ours": uniform.sample, "ours, prioritized and updated": drawn_and_updated}
    for name, keeps in (("torchrl", False), ("torchrl, kept until the next write", True)):
        sampler = SliceSampler(slice_len=length, traj_key="trajectory", cache_values=keeps)
        storage = LazyTensorStorage(rows)
        found[name] = filled(
            TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=count * length), rows
        ).sample
    return found


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    table = Table("Sequences")
    for name, (count, length) in LOOPS.items():
        for rows in options.rows:
            table.measure_in_turns(f"{name}, {rows} rows", contenders(rows, count, length), rounds=options.rounds)
        few, *_, many = (table.times[f"{name}, {rows} rows"] for rows in options.rows)
        table.at_most(f"{name}: {options.rows[-1]} rows over {options.rows[0]}", many["ours"] / few["ours"], 2.0)
        table.at_least(f"{name}: faster than TorchRL's slices", many["torchrl"] / many["ours"], 10.0)
    table.finish(save=options.save, name="sequences")


if __name__ == "__main__":
    main()
