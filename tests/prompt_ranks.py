# SPDX-License-Identifier: Apache-2.0
"""Processes that choose prompts from one set of levels, connected by gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing

from lightning_replay.levels import LevelBatchSampler, LevelBuffer, LevelSet, scores

PROMPTS = LevelSet([{"question": f"{number} + 1 ="} for number in range(200)])
BATCH, BATCHES = 24, 10  # of all processes together


def levels_of(seed: int) -> LevelBuffer:
    """A buffer whose draws follow from what was recorded."""
    return LevelBuffer(PROMPTS, score=scores.Learnability(window=8), replay_probability=0.8, seed=seed)


def outcomes_of(level_ids: list[int]) -> torch.Tensor:
    """Two outcomes of each level, which follow from its number."""
    return torch.tensor([[one % 2, one % 3 > 0] for one in level_ids], dtype=torch.float32).reshape(-1, 2)


def one_process(batches: int = BATCHES, seed: int = 0) -> list[list[int]]:
    """Returns the batches of a single process."""
    levels, seen = levels_of(seed), []
    for level_ids in LevelBatchSampler(levels, BATCH, batches):
        levels.record(level_ids, outcomes=outcomes_of(level_ids))
        seen.append(level_ids)
    return seen


def run(folder: Path, world_size: int, work: Any, *arguments: Any) -> list[Any]:
    """Returns what ``work(rank, world_size, folder, *arguments)`` returns in each process; ``None`` of a lost one."""
    given = (world_size, folder, work, arguments)
    torch.multiprocessing.spawn(_connected, given, nprocs=world_size)
    found = [folder / f"{rank}.pt" for rank in range(world_size)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def _connected(rank: int, world_size: int, folder: Path, work: Any, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    torch.save(work(rank, world_size, folder, *arguments), folder / f"{rank}.pt")
    # All results are written before a process ends, whose end the others may notice.
    distributed.barrier()
    distributed.destroy_process_group()
