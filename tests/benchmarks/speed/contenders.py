# SPDX-License-Identifier: Apache-2.0
"""Our buffers, TorchRL's and the packed limit, filled and ready to be timed in this process."""

from __future__ import annotations

import torch
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from transitions import in_chunks

from lightning_replay import Replay, recipes
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.storage.packed import PackedStorage
from lightning_replay.writers import SurpriseOnly

EXPONENTS = {"priority_exponent": 0.6, "importance_exponent": 0.4}


def uniform(rows: int, batch_size: int, *, check_finite: bool = True) -> Replay:
    """Our uniform replay, full."""
    replay = Replay(storage=PackedStorage(rows), batch_size=batch_size, check_finite=check_finite, seed=0)
    fill(replay, rows)
    return replay


def prioritized(rows: int, batch_size: int, backend: str = "auto") -> Replay:
    """Our prioritized replay, full, with random TD errors."""
    sampler = PrioritizedSampler(capacity=rows, **EXPONENTS, backend=backend, seed=0)
    replay = Replay(storage=PackedStorage(rows), sampler=sampler, batch_size=batch_size)
    fill(replay, rows)
    for start in range(0, rows, 100_000):
        index = torch.arange(start, min(rows, start + 100_000))
        replay.update_priority(index, torch.randn(len(index)))
    return replay


def retention(rows: int, batch_size: int) -> Replay:
    """Our buffer that keeps the most surprising rows, full, with random TD errors."""
    replay = recipes.surprise_retention(capacity=rows, batch_size=batch_size, rule=SurpriseOnly(), seed=0)
    fill(replay, rows)
    for start in range(0, rows, 100_000):
        index = torch.arange(start, min(rows, start + 100_000))
        replay.update_priority(index, torch.randn(len(index)))
    return replay


def torchrl_uniform(rows: int, batch_size: int | None = None) -> TensorDictReplayBuffer:
    """TorchRL's uniform buffer, full."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=batch_size)
    fill(buffer, rows)
    return buffer


def torchrl_prioritized(rows: int) -> TensorDictPrioritizedReplayBuffer:
    """TorchRL's prioritized buffer, full.

    Raises:
        Exception: its C++ extension does not load beside this torch.
    """
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(rows))
    fill(buffer, rows)
    buffer.update_priority(torch.arange(rows), torch.rand(rows) + 0.01)
    return buffer


def fill(buffer: TensorDictReplayBuffer, rows: int) -> None:
    """Extends an empty buffer by ``rows`` transitions."""
    for chunk in in_chunks(rows):
        buffer.extend(chunk)


def packed_limit(rows: int, row_bytes: int) -> torch.Tensor:
    """An arena of the same bytes as ours, seen as int64."""
    arena = torch.empty(rows, row_bytes // 8, dtype=torch.int64)
    return arena.random_()


def feedback(replay: Replay, batch_size: int) -> object:
    """One prioritized update: draw, then the TD errors of that draw go back."""
    batch = replay.sample(batch_size)
    return replay.update_priority(batch["index"], torch.randn(batch_size), generation=batch["generation"])


def torchrl_feedback(buffer: TensorDictReplayBuffer, batch_size: int) -> object:
    """The same with TorchRL's calls."""
    batch = buffer.sample(batch_size)
    batch.set("td_error", torch.randn(batch_size).abs_())
    return buffer.update_tensordict_priority(batch)
