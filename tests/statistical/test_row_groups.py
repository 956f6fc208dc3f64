# SPDX-License-Identifier: Apache-2.0
"""Different groups of a batch are drawn one after the other, in proportion to the weights of those that are left."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tensordict import TensorDict

from lightning_replay import Age, recipes

DRAWS = 10_000
WEIGHTS = {"uniform": [1, 1, 1, 1], "priorities": [1, 2, 3, 6], "ages": [1, 2, 4, 8]}
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "priorities": {"priority_exponent": 1.0, "priority_offset": 0.0},
    "ages": {"age": Age(half_life=1, floor=0.0)},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_draws_without_replacement_follow_the_weights_of_the_groups_that_are_left(kind: str) -> None:
    replay = recipes.groups(8, 4, group_size=2, replace=False, seed=3, **OPTIONS[kind])
    weight = torch.tensor(WEIGHTS[kind], dtype=torch.float64)
    slots = replay.extend(TensorDict({"group": torch.arange(8) // 2}, [8]))
    replay.update_priority(slots, weight.repeat_interleave(2).float())
    drawn = torch.stack([replay.sample()["group"][::2] for _ in range(DRAWS)])
    pairs = [*permutations(range(4), 2)]
    share = (weight / weight.sum()).tolist()
    expected = np.array([share[one] * share[other] / (1 - share[one]) for one, other in pairs])
    counts = np.array([int(((drawn[:, 0] == one) & (drawn[:, 1] == other)).sum()) for one, other in pairs])
    assert counts.sum() == DRAWS
    assert chisquare(counts, expected * DRAWS).pvalue > 1e-4


def test_groups_are_drawn_in_proportion_to_their_priorities() -> None:
    replay = recipes.groups(800, 800, group_size=2, seed=3, **OPTIONS["priorities"])
    slots = replay.extend(TensorDict({"group": torch.arange(8) // 2}, [8]))
    replay.update_priority(slots, torch.tensor([0.0, 2.0, 1.0, 3.0, 6.0, 0.0, 6.0, 6.0]))
    drawn = torch.cat([replay.sample()["group"][::2] for _ in range(100)])
    assert chisquare(torch.bincount(drawn), np.array(WEIGHTS["priorities"]) / 12 * len(drawn)).pvalue > 1e-4
