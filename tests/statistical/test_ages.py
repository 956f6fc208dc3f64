# SPDX-License-Identifier: Apache-2.0
"""A million draws by age follow the formula: in a ring that wraps, after retention, in tables, over shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tensordict import TensorDict

from lightning_replay import Age, Replay, recipes
from lightning_replay.divided_draws import Divider
from lightning_replay.events import EventTable, reward_at_least
from tests.transitions import numbered_steps

DRAWS = 1_000_000
BATCH = 2_000


def counts_of(replay: Replay, key: Any = ("next", "reward")) -> np.ndarray:
    """How often each row was drawn, by its number."""
    numbers = [replay.sample(BATCH)[key].flatten() for _ in range(DRAWS // BATCH)]
    return np.bincount(torch.cat(numbers).int().numpy())


def assert_follows(counts: np.ndarray, weights: dict[int, float]) -> None:
    numbers = np.array(sorted(weights))
    weight = np.array([weights[number] for number in numbers])
    counts = np.concatenate((counts, np.zeros(max(0, numbers[-1] + 1 - len(counts)), dtype=int)))
    assert counts.sum() == counts[numbers[weight > 0]].sum()  # No other row was drawn.
    expected = weight[weight > 0] / weight.sum() * counts.sum()
    assert chisquare(counts[numbers[weight > 0]], expected).pvalue > 1e-4


FORMULAS = [
    Age(half_life=60),
    Age(half_life=150, floor=0.02, max_age=250),
    Age(half_life=5, floor=0.2, clock="updates"),
]


@pytest.mark.parametrize("age", FORMULAS, ids=str)
@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_in_a_ring_that_wraps(recipe: str, age: Age) -> None:
    options = {"importance_exponent": 0.0} if recipe == "prioritized" else {}
    replay = getattr(recipes, recipe)(400, 64, age=age, seed=3, **options)
    births: list[int] = []
    for update in range(40):
        replay.advance(updates=update)
        replay.extend(numbered_steps(len(births), 25))
        births += range(len(births), len(births) + 25) if age.clock == "rows" else [update] * 25
        replay.update_priority(replay.sample(), torch.rand(64, generator=torch.Generator().manual_seed(update)))
    numbers = np.arange(600, 1_000)
    weight = age.weight((999 if age.clock == "rows" else 39) - np.array(births)[numbers])
    if recipe == "prioritized":
        weight = weight * (replay.sampler.priority_of(torch.from_numpy(numbers % 400)).double().numpy() + 1e-6) ** 0.6
    assert_follows(counts_of(replay), dict(zip(numbers.tolist(), weight, strict=True)))


def test_after_rows_left_by_retention() -> None:
    age = Age(half_life=40, floor=0.1)
    replay = recipes.surprise_retention(200, 64, age=age, priority_exponent=0.0, seed=3)
    births: dict[int, int] = {}
    for turn in range(40):
        rows = numbered_steps(25 * turn, 25)
        replay.extend(rows)
        for number in rows["next", "reward"][replay.last_insertion.rows].flatten().int().tolist():
            births[number] = len(births)
        batch = replay.sample()
        replay.update_priority(batch, torch.rand(64, generator=torch.Generator().manual_seed(turn)))
    numbers = replay.storage[:]["next", "reward"].flatten().int().tolist()
    assert sorted(numbers) != list(range(800, 1_000))  # It is no ring.
    weight = age.weight(len(births) - 1 - np.array([births[number] for number in numbers]))
    assert_follows(counts_of(replay), dict(zip(numbers, weight, strict=True)))


@pytest.mark.parametrize("exponent", [0.0, 0.8])
def test_in_tables_whose_shares_stay(exponent: float) -> None:
    age = Age(half_life=50, floor=0.1, max_age=150)
    goal = EventTable("goal", condition=reward_at_least(1.0), history_length=4, capacity=60, share=0.25)
    replay = recipes.event_tables(
        200, 40, tables=[goal], default_share=0.75, age=age, priority_exponent=exponent, importance_exponent=1.0, seed=3
    )
    for turn in range(50):
        rows = numbered_steps(12 * turn, 12, trajectory=turn)
        rows["number"] = rows["next", "reward"].flatten().int()
        rows["next", "reward"] = (torch.arange(12) == (turn % 7)).float().unsqueeze(1)
        rows["next", "done"][-1] = rows["next", "truncated"][-1] = True
        replay.extend(rows)
        if exponent and turn > 25:
            batch = replay.sample()
            replay.update_priority(batch, torch.rand(40, generator=torch.Generator().manual_seed(turn)) + 0.1)
    drawn = [replay.sample(BATCH) for _ in range(DRAWS // BATCH)]
    table = torch.cat([batch["table"] for batch in drawn]).numpy()
    number = torch.cat([batch["number"] for batch in drawn]).numpy()
    assert (table == 1).mean() == 0.25
    for which, name in enumerate(("default", "goal")):
        slots = torch.from_numpy(replay.writer.tables.slots_of(which))
        numbers = replay.storage.get(slots)["number"].tolist()
        weight = age.weight(599 - np.array(numbers))
        if exponent:
            weight = weight * (replay.sampler.priority_of(slots).double().numpy() + 1e-6) ** exponent
        assert (weight == 0).any(), name  # Some rows are too old.
        assert_follows(np.bincount(number[table == which]), dict(zip(numbers, weight, strict=True)))
        if exponent:
            own = [batch["priority_weight"].flatten()[batch["table"] == which] for batch in drawn[:1]]
            probability = dict(zip(numbers, len(numbers) * weight / weight.sum(), strict=True))
            ratio = np.array([probability[n] for n in drawn[0]["number"][drawn[0]["table"] == which].tolist()])
            scaled = own[0].double().numpy() * ratio
            np.testing.assert_allclose(scaled, scaled[0], rtol=1e-4)


@pytest.mark.parametrize("recipe", ["uniform", "prioritized"])
def test_over_unequal_shards(recipe: str) -> None:
    age = Age(half_life=6, floor=0.1, clock="env_steps")
    shards = [getattr(recipes, recipe)(400, 64, age=age, seed=number) for number in range(3)]
    weights: dict[int, float] = {}
    count = 0
    for step in range(30):
        for number, shard in enumerate(shards):
            shard.advance(env_steps=step)
            rows = 1 + 5 * number
            shard.extend(numbered_steps(count, rows))
            weights |= dict.fromkeys(range(count, count + rows), float(age.weight(np.array(29 - step))))
            count += rows
    divider = Divider(getattr(recipes, recipe)(400, 64, age=age).sampler, seed=2)
    numbers = []
    for _ in range(DRAWS // BATCH):
        division = divider.divide(BATCH, [shard.group_totals() for shard in shards])
        parts = zip(shards, division.parts, strict=True)
        numbers += [shard.sample_shard(part)[0]["next", "reward"].flatten() for shard, part in parts if len(part)]
    assert_follows(np.bincount(torch.cat(numbers).int().numpy()), weights)


def test_sequences_by_the_age_of_their_completion() -> None:
    age = Age(half_life=30, floor=0.1)
    replay = recipes.sequences(300, 64, length=4, age=age, seed=3)
    for turn in range(20):
        rows = numbered_steps(12 * turn, 12, trajectory=turn)
        rows["next", "done"][-1] = rows["next", "truncated"][-1] = True
        for row in rows.split(1):
            replay.extend(row)
    counts = counts_of_first_rows(replay)
    # Of each episode three sequences begin at steps 0, 4, and 8, and are complete three rows later.
    weights = {
        12 * turn + step: float(age.weight(np.array(239 - (12 * turn + step + 3))))
        for turn in range(20)
        for step in (0, 4, 8)
    }
    assert_follows(counts, weights)


def counts_of_first_rows(replay: Replay) -> np.ndarray:
    drawn: list[TensorDict] = [
        replay.sample(BATCH)["next", "reward"][:, 0].flatten() for _ in range(DRAWS // BATCH // 4)
    ]
    return np.bincount(torch.cat(drawn).int().numpy())
