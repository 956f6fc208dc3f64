# SPDX-License-Identifier: Apache-2.0
"""Mixing coefficients follow the Beta distribution asked for; partners are uniform over their candidates."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from lightning_replay.samplers import NeighborhoodMixupSampler, RandomPairSampler
from lightning_replay.samplers.pairs import PairSampler
from lightning_replay.transforms import MixPairs, MixStates, mixup_coefficients

DRAWS = 200_000
LEAST_P_VALUE = 1e-4


@pytest.mark.parametrize("concentration", [0.4, 0.75, 1.0, 2.0, 10.0])
def test_coefficients_are_beta(concentration: float) -> None:
    drawn = mixup_coefficients(concentration, DRAWS, torch.Generator().manual_seed(0))
    beta = stats.beta(concentration, concentration)
    assert stats.kstest(drawn.double().numpy(), beta.cdf).pvalue > LEAST_P_VALUE


def test_coefficients_of_both_transforms_are_beta_and_independent() -> None:
    rows = 1_000
    zeros = torch.zeros(rows, 2, 1)
    following = {"observation": zeros + 1, "reward": zeros, "terminated": zeros.bool()}
    pairs = TensorDict({"observation": zeros.clone(), "action": zeros, "next": following}, [rows, 2])
    pairs["observation"][:, 0] = 1.0  # so that a mixed observation is the coefficient
    mix_pairs, mix_states = MixPairs(0.75, seed=0), MixStates(0.75, seed=0)
    batches = DRAWS // rows
    from_pairs = torch.cat([mix_pairs(pairs)["observation"].flatten() for _ in range(batches)])
    steps = TensorDict({"observation": zeros[:, 0], "next": {"observation": zeros[:, 0] + 1}}, [rows])
    from_states = torch.cat([1 - mix_states(steps.clone())["observation"].flatten() for _ in range(batches)])
    for drawn in (from_pairs, from_states):
        assert stats.kstest(drawn.double().numpy(), stats.beta(0.75, 0.75).cdf).pvalue > LEAST_P_VALUE
        assert drawn.unique().numel() > 0.95 * DRAWS  # float32 repeats a few by chance; a coefficient used twice, half
        for lag in (1, rows):  # between pairs of a batch, and between batches
            correlation = stats.pearsonr(drawn[:-lag].numpy(), drawn[lag:].numpy())
            assert correlation.pvalue > LEAST_P_VALUE


def make_buffer(sampler: PairSampler, observation: torch.Tensor) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(len(observation)), sampler=sampler, batch_size=1000)
    buffer.extend(
        TensorDict({"observation": observation, "action": torch.zeros(len(observation), 1)}, observation.shape[:1])
    )
    return buffer


@pytest.mark.parametrize("refresh_interval", [1, 64])
def test_partners_are_uniform_over_the_nearest_rows_and_firsts_over_all(refresh_interval: int) -> None:
    num_neighbors, rows = 5, 20
    observation = torch.randn(rows, 2)
    sampler = NeighborhoodMixupSampler(num_neighbors=num_neighbors, refresh_interval=refresh_interval, seed=0)
    buffer = make_buffer(sampler, observation)
    index = torch.cat([sampler.sample(buffer.storage, 1000)[0] for _ in range(DRAWS // 1000)])
    counts = torch.zeros(rows, rows).index_put_((index[:, 0], index[:, 1]), torch.ones(len(index)), accumulate=True)
    scaled = observation / observation.std(0, unbiased=False)
    distance = torch.cdist(scaled, scaled).fill_diagonal_(float("inf"))
    nearest = distance.topk(num_neighbors, largest=False).indices
    inside = counts.gather(1, nearest)
    assert inside.sum() == len(index)
    assert stats.chisquare(counts.sum(1).numpy()).pvalue > LEAST_P_VALUE
    # all rows at once, each with k - 1 degrees of freedom: a row's number of draws is given
    expected = inside.sum(1, keepdim=True) / num_neighbors
    statistic = float(((inside - expected).square() / expected).sum())
    assert stats.chi2(rows * (num_neighbors - 1)).sf(statistic) > LEAST_P_VALUE


def test_random_partners_are_uniform_and_independent_of_the_first() -> None:
    rows = 12
    sampler = RandomPairSampler(seed=0)
    buffer = make_buffer(sampler, torch.randn(rows, 2))
    index = torch.cat([sampler.sample(buffer.storage, 1000)[0] for _ in range(DRAWS // 1000)])
    counts = torch.bincount(index[:, 0] * rows + index[:, 1], minlength=rows * rows)
    assert stats.chisquare(counts.numpy()).pvalue > LEAST_P_VALUE
