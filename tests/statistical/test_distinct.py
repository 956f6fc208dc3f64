# SPDX-License-Identifier: Apache-2.0
"""Different rows of a batch are drawn one after the other, in proportion to the weights of the rows that are left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tensordict import TensorDict

from lightning_replay import Age, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import distinct

DRAWS = 4_000
ROWS = 5
WEIGHTS = [1.0, 2.0, 3.0, 5.0, 20.0]
BY_PRIORITY = {"priority_exponent": 1.0, "priority_offset": 0.0, "replace": False, "seed": 3}


def oracle(weights: list[float], count: int) -> dict[tuple[int, ...], float]:
    """Probability of each set of ``count`` rows, the sum over all orders in which the rows can be drawn."""
    expected = dict.fromkeys(combinations(range(len(weights)), count), 0.0)
    for order in permutations(range(len(weights)), count):
        left, probability = sum(weights), 1.0
        for row in order:
            probability *= weights[row] / left
            left -= weights[row]
        expected[tuple(sorted(order))] += probability
    return expected


def with_table(**options: Any) -> Replay:
    never = EventTable("never", condition=reward_at_least(99.0), history_length=1, capacity=ROWS, share=0.0)
    return recipes.event_tables(ROWS, tables=[never], default_share=1.0, min_size=1, **options)


BUILT: dict[str, Callable[[int], Replay]] = {
    "priorities": lambda size: recipes.prioritized(ROWS, size, **BY_PRIORITY),
    "priorities in a table": lambda size: with_table(batch_size=size, **BY_PRIORITY),
    "priorities of sequences": lambda size: recipes.sequences(ROWS, size, length=1, **BY_PRIORITY),
    "priorities of pairs": lambda size: recipes.neighborhood_mixup(
        ROWS, size, num_neighbors=1, priority_exponent=1.0, replace=False, seed=3
    ),
    "retained": lambda size: recipes.surprise_retention(ROWS, size, **BY_PRIORITY),
    "ages in a ring": lambda size: recipes.uniform(ROWS, size, age=Age(half_life=1, floor=0.0), replace=False, seed=3),
    "ages in a tree": lambda size: recipes.uniform(
        ROWS, size, age=Age(half_life=1, floor=0.0, version_key="version"), replace=False, seed=3
    ),
    "uniform": lambda size: recipes.uniform(ROWS, size, replace=False, seed=3),
}


@pytest.mark.parametrize("rounds", ["none", "all"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", BUILT)
def test_sets_are_as_likely_as_one_row_after_the_other_makes_them(
    kind: str, size: int, rounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``rounds`` of "none", rows come from the masses of all rows as soon as one is drawn twice."""
    if rounds == "none":
        monkeypatch.setattr(distinct, "FEWEST_ROUNDS", 0)
    replay = BUILT[kind](size)
    weights = {"ages": [2.0**number for number in range(ROWS)], "unif": [1.0] * ROWS}.get(kind[:4], WEIGHTS)
    rows = {"observation": torch.arange(5.0).view(5, 1), "action": torch.zeros(5, 1), "version": torch.arange(5)}
    after = {"observation": torch.arange(1.0, 6.0).view(5, 1), "reward": torch.zeros(5, 1)}
    after |= {name: torch.zeros(5, 1, dtype=torch.bool) for name in ("done", "terminated")}
    slots = replay.extend(TensorDict(rows | {"next": after}, [ROWS]))
    if replay.takes_feedback:
        shape = (ROWS, 1) if replay.sequence_length else (ROWS,)
        replay.update_priority(slots.view(shape), torch.tensor(WEIGHTS).view(shape))
    expected = oracle(weights, size)
    counts = dict.fromkeys(expected, 0)
    for _ in range(DRAWS):
        index = replay.sample()["index"]
        counts[tuple(sorted((index[:, 0] if index.ndim == 2 else index).tolist()))] += 1
    assert chisquare([*counts.values()], np.array([*expected.values()]) * DRAWS).pvalue > 1e-4
