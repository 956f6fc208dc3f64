# SPDX-License-Identifier: Apache-2.0
"""Draws of a sharded replay are those of one replay of all rows, and full correction removes their bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lightning_replay.parts import GroupTotals
from lightning_replay.sharded import ShardedReplay
from lightning_replay.sharded.actors import ShardActors
from tests.oracles import probabilities
from tests.unit.sharded.local_replay import started_here, steps

pytestmark = pytest.mark.slow
DRAWS, BATCH = 500_000, 50_000
LENGTHS = (3, 40, 9, 4, 5, 6)  # of episodes: shards of 21, 40 and 6 rows
ROWS = sum(LENGTHS)


@pytest.fixture(autouse=True)
def _here(shared_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started_here(monkeypatch)


def filled(recipe: str, **options: Any) -> tuple[ShardedReplay, torch.Tensor]:
    """Rows numbered by their actions, and their priorities."""
    replay = ShardedReplay(recipe, 3, capacity=60_000, batch_size=8, seed=1, **options)
    first = 0
    for length in LENGTHS:
        replay.extend(steps(first, length))
        first += length
    assert sorted(replay.stats()["rows"]) != [ROWS // 3] * 3
    priority = torch.ones(ROWS)
    if replay.is_prioritized:
        priority = torch.rand(ROWS, generator=torch.Generator().manual_seed(3)) ** 2 + 0.02
        priority[:30] *= 5.0
        batch = replay.sample(10_000)  # which has every row
        assert len(set(batch["action"].tolist())) == ROWS
        replay.update_priority(batch, priority[batch["action"]])
        len(replay)
    return replay, priority


def p_value(replay: ShardedReplay, priority: torch.Tensor, exponent: float) -> tuple[float, np.ndarray, np.ndarray]:
    batches = [replay.sample(BATCH) for _ in range(DRAWS // BATCH)]
    action = torch.cat([batch["action"] for batch in batches]).numpy()
    weight = np.ones(DRAWS)
    if replay.is_prioritized:
        weight = torch.cat([batch["priority_weight"] for batch in batches]).double().numpy()
    expected = probabilities(priority, exponent, 1e-6).numpy() * DRAWS
    return chisquare(np.bincount(action, minlength=ROWS), expected).pvalue, action, weight


@pytest.mark.parametrize(("recipe", "exponent"), [("uniform", 0.0), ("prioritized", 0.7)])
def test_rows_are_as_likely_as_in_one_replay_and_weights_undo_the_priorities(recipe: str, exponent: float) -> None:
    options = {} if recipe == "uniform" else {"priority_exponent": exponent, "importance_exponent": 1.0}
    replay, priority = filled(recipe, **options)
    found, action, weight = p_value(replay, priority, exponent)
    assert found > 1e-4
    value = np.arange(ROWS) + 10.0 * (np.arange(ROWS) < 30)
    mean = (weight * value[action]).sum() / weight.sum()
    deviation = np.sqrt(((weight * (value[action] - mean)) ** 2).sum()) / weight.sum()
    assert abs(mean - value.mean()) < 5 * deviation


def test_equal_parts_of_the_shards_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, priority = filled("prioritized", priority_exponent=0.7)
    totals = ShardActors.totals

    def equal(actors: ShardActors, module: str) -> list[GroupTotals | None]:
        given = totals(actors, module)
        return [GroupTotals(one.names, one.mass * 0 + 1, one.rows, one.smallest) for one in given if one is not None]

    monkeypatch.setattr(ShardActors, "totals", equal)
    assert p_value(replay, priority, 0.7)[0] < 1e-100
