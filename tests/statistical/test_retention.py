# SPDX-License-Identifier: Apache-2.0
"""How often each row is the victim of a rule that draws, beside the stated chances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lightning_replay.retention.eviction import Factors, RetainedRows
from lightning_replay.writers import RetentionRule, StochasticExploration, StochasticSurprise

SLOTS = 8
DRAWS = 100_000


def victims(rule: RetentionRule, priority: torch.Tensor) -> np.ndarray:
    """How often each slot is overwritten where every candidate is like the row that left."""
    rows = RetainedRows(SLOTS, rule, torch.Generator().manual_seed(0))
    ones = torch.ones(SLOTS)
    rows.offer(Factors(priority.numpy(), ones.numpy(), priority.numpy()), 0, True)
    uniform = torch.rand(DRAWS, dtype=torch.float64, generator=rows.generator)
    drawn, _ = rows._chances.draw(uniform)
    return np.bincount(drawn.numpy(), minlength=SLOTS)


def test_surprising_rows_stay_and_likely_actions_leave_in_proportion() -> None:
    error = torch.tensor([0.0, 0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0])
    policy = torch.tensor([0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 1.0])
    for counts, chance in (
        (victims(StochasticSurprise(exponent=0.6, offset=1e-3), error**2), 1 / (error.double().numpy() + 1e-3)),
        (victims(StochasticExploration(exponent=0.6), policy), policy.double().numpy()),
    ):
        chance = chance**0.6
        assert chisquare(counts, chance / chance.sum() * DRAWS).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5])
def test_victims_follow_the_chances_as_rows_come(size: int) -> None:
    """Row 0 of chance 1 among rows of chance 3: it outlives a candidate with 1 - 1/22, ten with that to the 10th."""
    survived, trials = 0, 1_500
    generator = torch.Generator().manual_seed(1)
    rule = StochasticExploration(exponent=1.0)
    first = (torch.tensor([1.0] + [3.0] * 7) / 10).numpy()
    one = np.full(size, 0.3, dtype=np.float32)
    for _ in range(trials):
        rows = RetainedRows(SLOTS, rule, generator)
        rows.offer(Factors(first, np.ones(SLOTS), first), 0, True)
        for start in range(0, 10, size):
            rows.offer(Factors(one, np.ones(size), one), SLOTS + start, True)
        survived += int(rows.order.arrival(np.array([0]))[0]) == 0
    chance = (1 - 1 / 22) ** 10
    assert chisquare([survived, trials - survived], [chance * trials, (1 - chance) * trials]).pvalue > 1e-4
