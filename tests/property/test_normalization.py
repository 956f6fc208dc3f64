# SPDX-License-Identifier: Apache-2.0
"""Running statistics of any batches against NumPy over all rows at once; projections against the paper's sums."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.agents.encoders import RunningNormalization
from lightning_replay.agents.networks import project
from lightning_replay.retention.surprise import categorical_projection


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    frozen=st.sets(st.integers(0, 7)),
    center=st.floats(-1e3, 1e3),
    scale=st.floats(0.1, 1e3),
    seed=st.integers(0, 2**32 - 1),
)
def test_statistics_of_batches_are_those_of_all_rows(sizes, frozen, center, scale, seed) -> None:
    generator = np.random.default_rng(seed)
    batches = [(center + scale * generator.normal(size=(size, 3))).astype(np.float32) for size in sizes]
    normalization = RunningNormalization(3)
    for place, batch in enumerate(batches):
        normalization.is_frozen.fill_(place in frozen)
        before = normalization.count.item()
        normalization.observe(torch.from_numpy(batch))
        assert normalization.count == before + (0 if place in frozen else len(batch))
    counted = [batch for place, batch in enumerate(batches) if place not in frozen]
    rows = np.concatenate(counted).astype(np.float64) if counted else np.array([[1.0] * 3, [-1.0] * 3])
    tolerance = 1e-5 * (abs(center) + scale)
    np.testing.assert_allclose(normalization.mean, rows.mean(0), rtol=0, atol=tolerance)
    np.testing.assert_allclose(normalization.variance, rows.var(0), rtol=1e-4, atol=tolerance**2)
    deviations = rows.std(0) + 0.01
    given_rows = torch.from_numpy(batches[0])
    expected = (batches[0] - rows.mean(0)) / deviations
    bound = 1e-3 * (1 + np.abs(expected)) + 10 * tolerance / deviations
    assert (np.abs(normalization(given_rows).numpy() - expected) <= bound).all()


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-30, 30, width=32), st.floats(0, 1, width=32)), min_size=1, max_size=9),
    atoms=st.integers(2, 12),
    low=st.floats(-20, 5),
    width=st.floats(0.5, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_projections_are_those_by_the_product_and_keep_the_mean(rows, atoms, low, width, seed) -> None:
    torch.manual_seed(seed)
    reward, discount = torch.tensor(rows).unbind(1)
    support = torch.linspace(low, low + width, atoms)
    probabilities = torch.randn(len(rows), atoms).softmax(1)
    projected = project(probabilities, reward, discount, support)
    expected = categorical_projection(probabilities, reward, discount, support)
    torch.testing.assert_close(projected, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(projected.sum(1), torch.ones(len(rows)))
    moved = (reward.unsqueeze(1) + discount.unsqueeze(1) * support).clamp(support[0], support[-1])
    torch.testing.assert_close(projected @ support, (probabilities * moved).sum(1), atol=1e-3, rtol=1e-4)
