# SPDX-License-Identifier: Apache-2.0
"""Drawn counts follow the stated probabilities, and the weights undo them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from lightning_replay.samplers.prioritized import PrioritizedSampler
from tests.oracles import probabilities

BACKENDS = ["numba", "torch"]


def _buffer(rows: int, backend: str, **options: float) -> tuple[TensorDictReplayBuffer, torch.Tensor]:
    sampler = PrioritizedSampler(rows + 7, backend=backend, seed=11, **options)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows + 7), sampler=sampler, batch_size=1_000)
    buffer.extend(TensorDict({"observation": torch.arange(rows)}, [rows]))
    priority = torch.rand(rows, generator=torch.Generator().manual_seed(3)) + 0.02
    buffer.update_priority(torch.arange(rows), torch.full((rows,), 50.0))  # must leave no trace
    for part in torch.randperm(rows).split(100):
        buffer.update_priority(part, priority[part])
    return buffer, priority


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [40, 1_000, 5_000])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
def test_drawn_counts_follow_the_probabilities(backend: str, rows: int, exponent: float) -> None:
    buffer, priority = _buffer(rows, backend, priority_exponent=exponent)
    draws = 200_000
    counts = torch.zeros(rows)
    for _ in range(20):
        index, _ = buffer.sampler.sample(buffer.storage, draws // 20)
        counts += torch.bincount(index, minlength=rows)
    expected = probabilities(priority, exponent, 1e-6) * draws
    assert chisquare(counts.double().numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_a_million_rows_draws_are_spread_as_the_cumulative_probability(backend: str) -> None:
    """Blocks of 1000 rows by chi-square, and the place within the row's own share by a KS test."""
    rows, draws = 1_000_000, 200_000
    buffer, priority = _buffer_of_many(rows, backend)
    index, _ = buffer.sampler.sample(buffer.storage, draws)
    probability = probabilities(priority, 0.6, 1e-6)
    expected = probability.reshape(1_000, -1).sum(1) * draws
    counts = torch.bincount(index // 1_000, minlength=1_000)
    assert chisquare(counts.double().numpy(), expected.numpy()).pvalue > 1e-4
    upper = probability.cumsum(0)
    spread = (upper - probability * torch.rand(rows, dtype=torch.float64))[index]
    assert kstest(spread.numpy(), "uniform").pvalue > 1e-4


def _buffer_of_many(rows: int, backend: str) -> tuple[TensorDictReplayBuffer, torch.Tensor]:
    sampler = PrioritizedSampler(rows, backend=backend, seed=12)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=1_000)
    buffer.extend(TensorDict({"observation": torch.zeros(rows, dtype=torch.uint8)}, [rows]))
    priority = torch.rand(rows, generator=torch.Generator().manual_seed(4)) ** 3
    buffer.update_priority(torch.arange(rows), priority)
    return buffer, priority


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("over_batch", [False, True])
def test_with_full_correction_the_weighted_mean_is_the_uniform_mean(backend: str, over_batch: bool) -> None:
    rows = 500
    buffer, priority = _buffer(
        rows, backend, priority_exponent=0.8, importance_exponent=1.0, normalize_over_batch=over_batch
    )
    # A value that rises with the priority: an uncorrected mean is far off.
    value = priority.double() ** 2
    index, info = buffer.sampler.sample(buffer.storage, 200_000)
    weight = info["priority_weight"].double()
    assert weight.max() <= 1 + 1e-6
    mean = (weight * value[index]).sum() / weight.sum()
    deviation = (weight * (value[index] - mean)).square().sum().sqrt() / weight.sum()
    assert abs(mean - value.mean()) < 5 * deviation
    assert abs(value[index].mean() - value.mean()) > 20 * deviation


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_after_many_updates_follow_the_last_priorities(backend: str) -> None:
    rows, rng = 300, np.random.default_rng(5)
    buffer, priority = _buffer(rows, backend, priority_exponent=1.0)
    for _ in range(500):
        index = torch.from_numpy(rng.integers(0, rows, 64))
        fresh = torch.from_numpy(rng.random(64, np.float32)) + 0.01
        buffer.update_priority(index, fresh)
        for slot, entry in zip(index.tolist(), fresh.tolist(), strict=True):
            priority[slot] = entry
    index, _ = buffer.sampler.sample(buffer.storage, 200_000)
    expected = probabilities(priority, 1.0, 1e-6) * 200_000
    assert chisquare(torch.bincount(index, minlength=rows).double().numpy(), expected.numpy()).pvalue > 1e-4
