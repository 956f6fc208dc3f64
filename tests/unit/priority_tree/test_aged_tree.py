# SPDX-License-Identifier: Apache-2.0
"""The tree of rows that age has the values of the formula at every size, whatever level a search begins at."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_replay import Age
from lightning_replay.ages import RowAges
from lightning_replay.priority_tree import PriorityTree

CLOCKS = {"draws": 0, "updates": 0, "env_steps": 0}


def insert(tree: PriorityTree, ages: RowAges, slots: np.ndarray, values: np.ndarray) -> None:
    """Stores rows as a sampler does."""
    ages.insert(slots, ages.register(slots, CLOCKS, None))
    tree.set(torch.from_numpy(slots), torch.from_numpy(values))


# A node has 16 children, and each half has at most 256 nodes at the level that ends the tree.
@pytest.mark.parametrize("capacity", [1, 16, 17, 4_096, 4_097, 5_000, 70_000])
@pytest.mark.parametrize(
    "age", [Age(half_life=400, floor=0.1), Age(half_life=900, floor=0.2, max_age=3_500), Age(half_life=300, floor=0.0)]
)
def test_points_fall_on_slots_in_proportion_to_their_values(capacity: int, age: Age) -> None:
    random = np.random.default_rng(capacity)
    ages = RowAges(age, capacity)
    tree = PriorityTree(capacity, ages=ages)
    for slots in np.array_split(np.arange(capacity + capacity // 3) % capacity, 7):
        if len(slots):
            values = random.random(len(slots)).astype(np.float32) * (random.random(len(slots)) < 0.9)
            insert(tree, ages, slots, values)
            tree.replace_rows(ages.follow(CLOCKS))
    insert(tree, ages, np.array([capacity // 2]), np.array([0.5], np.float32))
    tree.replace_rows(ages.follow(CLOCKS))

    row_ages = ages.now - ages.births
    weight = tree.leaves().double().numpy() * age.weight(row_ages)
    # The decaying rows come first, then the rows at the floor, each in the order of slots.
    is_old = ages.births < ages.old_before
    order = np.argsort(is_old, kind="stable")
    ends = np.zeros(capacity)
    ends[order] = np.cumsum(weight[order]) / weight.sum()
    begins = ends - weight / weight.sum()
    assert tree.bounds()[0] == pytest.approx(weight.sum(), rel=1e-6)
    for count in (1, 40, 600, 9_000):
        points = random.random(count)
        slots, probability = tree.draw_at(points)
        found = slots.numpy()
        np.testing.assert_allclose(probability, weight[found] / weight.sum(), rtol=1e-6)
        assert (weight[found] > 0).all()
        assert (begins[found] - 1e-6 <= points).all()
        assert (points <= ends[found] + 1e-6).all()


def test_importance_weights_stay_above_zero_next_to_rows_that_are_nearly_never_drawn() -> None:
    ages = RowAges(Age(half_life=1, floor=0.0), 200)
    tree = PriorityTree(200, ages=ages)
    insert(tree, ages, np.arange(200), np.ones(200, np.float32))
    insert(tree, ages, np.arange(40), np.ones(40, np.float32))
    _, least = tree.bounds()
    assert 0 < least < 2.0**-140  # The quotient of the newest row and this one does not fit float32.
    _, weight = tree.draw(torch.rand(64, dtype=torch.float64), exponent=-0.1)
    assert weight.isfinite().all()
    assert (weight > 0).all()
