# SPDX-License-Identifier: Apache-2.0
"""Noise is normal with the deviation asked for, and no two of its components are related."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from tensordict import TensorDict

from lightning_replay.transforms import GaussianNoise
from lightning_replay.transforms.noise import NOISY_KEYS

ROWS, BATCHES = 1_000, 100
LEAST_P_VALUE = 1e-4


@pytest.mark.parametrize("kind", ["additive", "multiplicative"])
def test_noise_is_normal_and_independent(kind: str) -> None:
    sigma, values = 0.3, torch.linspace(-3.0, 5.0, ROWS, dtype=torch.float64).reshape(-1, 1)
    following = {"observation": values, "reward": values}
    steps = TensorDict({"observation": values, "action": values, "next": following}, [ROWS])
    transform = GaussianNoise(sigma=sigma, kind=kind, seed=0)
    scale = values if kind == "multiplicative" else torch.ones_like(values)
    drawn = []
    for _ in range(BATCHES):
        batch = transform(steps.clone())
        drawn.append(torch.cat([(batch[key] - values) / (sigma * scale) for key in NOISY_KEYS], dim=1))
    noise = torch.cat(drawn).numpy()
    assert stats.kstest(noise.ravel(), "norm").pvalue > LEAST_P_VALUE
    for key in range(noise.shape[1]):
        other = (key + 1) % noise.shape[1]
        assert stats.pearsonr(noise[:, key], noise[:, other]).pvalue > LEAST_P_VALUE
        for lag in (1, ROWS):  # between the rows of a batch, and between batches
            assert stats.pearsonr(noise[:-lag, key], noise[lag:, key]).pvalue > LEAST_P_VALUE
