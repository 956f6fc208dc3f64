# SPDX-License-Identifier: Apache-2.0
"""Any history of rows, clocks, TD errors, evictions, and loads has the probabilities of the formula over all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay import Age, Replay, recipes
from lightning_replay.divided_draws import Divider
from tests.transitions import numbered_steps

CAPACITY = 12
FORMULAS = st.sampled_from(
    [
        Age(half_life=3, floor=0.1),
        Age(half_life=0.4, floor=0.05),
        Age(half_life=5, floor=0.3, max_age=9),
        Age(max_age=4),
        Age(half_life=3, floor=0.2, clock="updates"),
        Age(half_life=2, floor=1e-3, max_age=15, clock="env_steps"),
        Age(half_life=1, floor=1.0),
        Age(half_life=2, floor=0.05, max_age=40, version_key="policy"),
    ]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 30)),
        st.tuples(st.just("advance"), st.integers(0, 200)),
        st.tuples(st.just("feedback"), st.integers(0, 2**31)),
        st.tuples(st.just("sample"), st.just(0)),
        st.tuples(st.just("load"), st.integers(-4, 4)),
        st.tuples(st.just("empty"), st.just(0)),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("recipe", ["uniform", "prioritized", "surprise_retention"])
@settings(max_examples=80, deadline=None)
@given(age=FORMULAS, steps=STEPS)
def test_probabilities_are_those_of_the_formula(recipe: str, age: Age, steps: list[tuple[str, int]]) -> None:
    options: dict[str, Any] = {} if recipe == "uniform" else {"priority_exponent": 0.7, "importance_exponent": 0.0}
    replay = getattr(recipes, recipe)(CAPACITY, 4, age=age, seed=0, **options)
    births: dict[int, int] = {}  # by the number of the row
    given_rows = 0
    version = 0
    readings = {"env_steps": 0, "updates": 0}
    for step, value in steps:
        if step == "extend":
            rows = numbered_steps(given_rows, value)
            rows["policy"] = version + torch.arange(value) // 8
            version += value // 8
            given_rows += value
            replay.extend(rows)
            for row in rows[replay.last_insertion.rows].unbind(0):
                number = int(row["next", "reward"])
                births[number] = len(births) if age.clock == "rows" else readings[age.clock]
                if age.version_key is not None:
                    births[number] = int(row["policy"])
        elif step == "advance":
            readings = {name: reading + value for name, reading in readings.items()}
            replay.advance(**readings)
        elif step == "load":
            # The half-life may become another one of any size.
            half_life = None if age.half_life is None else age.half_life * 10.0**value
            age = replace(age, half_life=half_life)
            saved = replay.state_dict()
            replay = getattr(recipes, recipe)(CAPACITY, 4, age=age, seed=0, **options)
            replay.load_state_dict(saved)
        elif step == "empty":
            replay.empty()
            births.clear()
        elif len(replay):
            can_draw = assert_drawn_by_the_formula(replay, age, births, readings)
            if step == "feedback" and can_draw:
                errors = torch.rand(4, generator=torch.Generator().manual_seed(value)) * 3
                replay.update_priority(replay.sample(), errors)


def assert_drawn_by_the_formula(replay: Replay, age: Age, births: dict[int, int], readings: dict[str, int]) -> bool:
    """Returns whether any row can be drawn."""
    slots = torch.arange(len(replay))
    numbers = replay.storage[:]["next", "reward"].flatten().int().tolist()
    now = len(births) - 1 if age.clock == "rows" else readings[age.clock]
    if age.version_key is not None:
        now = max(births.values())
    weight = age.weight(now - np.array([births[number] for number in numbers]))
    priority = replay.sampler.priority_of(slots)
    if priority is not None:
        weight = weight * (priority.double().numpy() + 1e-6) ** 0.7
    if not weight.sum():
        with pytest.raises(RuntimeError, match="older than max_age"):
            replay.sample()
        return False
    expected = dict(zip(numbers, weight / weight.sum(), strict=True))
    division = Divider(replay.sampler, seed=1).divide(600, [replay.group_totals()])
    batch, shard = replay.sample_shard(division.parts[0])
    drawn = dict(zip(batch["next", "reward"].flatten().int().tolist(), shard.probability.tolist(), strict=True))
    assert drawn == pytest.approx({number: expected[number] for number in drawn}, rel=1e-4)
    # Of 600 points a row of this probability is missed once in 10^13.
    assert {number for number, probability in expected.items() if probability > 0.05} <= set(drawn)
    return True
