# SPDX-License-Identifier: Apache-2.0
"""However rows are divided over replays, their weights and probabilities are those in one replay of all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay import recipes
from lightning_replay.divided_draws import GroupTotals
from lightning_replay.events import Event, EventTable
from lightning_replay.replay import Replay
from tests.divided import Shards
from tests.event_steps import IsTrue

# Lengths of the episodes of each replay; the first replay holds an episode with a goal.
divisions = st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=5).map(lambda lengths: [[5], *lengths])
priorities = st.lists(st.floats(0.01, 100.0), min_size=100, max_size=100)
exponents = st.sampled_from([0.0, 0.3, 1.0])


def of_tables(exponent: float, beta: float, share: float = 0.4, **options: Any) -> Replay:
    table = EventTable("goal", events=[Event(IsTrue("goal"), 3)], capacity=100, share=share, min_size=1)
    given_options = {"capacity": 100, "batch_size": 2, "default_share": 1 - share, "min_size": 1, "seed": 1}
    given_options |= {"priority_exponent": exponent, "importance_exponent": beta}
    return recipes.event_tables(tables=[table], **given_options | options)


def by_row(numbers: Any, columns: dict[str, Any]) -> dict[tuple[int, int], dict[str, float]]:
    """What a batch has for each row, by number and table; the same wherever a row is drawn again."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    tables = columns.pop("table", np.zeros(len(numbers), dtype=np.int64))
    for place, (number, table) in enumerate(zip(numbers.tolist(), tables.tolist(), strict=True)):
        own = {name: float(column[place]) for name, column in columns.items()}
        assert rows.setdefault((number, table), own) == pytest.approx(own, rel=1e-6)
    return rows


def assert_alike(shards: Shards, batch_size: int = 400) -> None:
    """Rows that the divided draw and that of the whole both have are drawn alike, in the same columns."""
    divided = by_row(*shards.draw(batch_size))
    batch, info = shards.whole.sample(batch_size, return_info=True)
    names = ("table", "priority_weight", "table_probability", "raw_weight")
    whole = by_row(batch["action"].numpy(), {name: info[name].numpy() for name in names if name in info})
    both = divided.keys() & whole.keys()
    assert len(both) > 0
    for row in both:
        assert divided[row] == pytest.approx(whole[row], rel=1e-5)


@pytest.mark.slow
@settings(max_examples=30)
@given(lengths=divisions, priority=priorities, exponent=exponents, beta=exponents)
def test_prioritized_weights_are_those_of_one_replay(lengths, priority, exponent, beta) -> None:
    options = {"priority_exponent": exponent, "importance_exponent": beta, "seed": 1}
    shards = Shards(lambda: recipes.prioritized(100, 2, **options), lengths)
    shards.give_priorities(torch.tensor(priority))
    assert_alike(shards)


@settings(max_examples=30)
@given(lengths=divisions, priority=priorities, exponent=exponents)
def test_prioritized_rows_are_those_of_one_replay_at_the_same_points(lengths, priority, exponent) -> None:
    """Rows of the whole lie in the order of the replays here, so that a point of the sum is the same row in both."""
    options = {"priority_exponent": exponent, "normalize_over_batch": True, "seed": 1}
    shards = Shards(lambda: recipes.prioritized(100, 2, **options), lengths)
    shards.give_priorities(torch.tensor(priority))
    shards.whole.sampler._rng.set_state(shards.divider.state_dict()["generator"])
    numbers, columns = shards.draw(200)
    batch = shards.whole.sample(200)
    order, order_of_whole = np.argsort(numbers, kind="stable"), batch["action"].argsort(stable=True)
    assert (numbers[order] == batch["action"][order_of_whole].numpy()).mean() > 0.98  # but for rounding at edges
    if (numbers[order] == batch["action"][order_of_whole].numpy()).all():
        expected = batch["priority_weight"][order_of_whole].numpy()
        np.testing.assert_allclose(columns["priority_weight"][order], expected, rtol=1e-6)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    lengths=divisions,
    priority=priorities,
    exponent=exponents,
    beta=exponents,
    correction=st.sampled_from(["none", "mixture"]),
    multinomial=st.booleans(),
    share=st.sampled_from([0.4, 0.4, 0.0]),
)
def test_weights_of_tables_are_those_of_one_replay(lengths, priority, exponent, beta, correction, multinomial, share):
    options = {"correction": correction, "multinomial": multinomial, "return_probabilities": True, "share": share}
    shards = Shards(lambda: of_tables(exponent, beta, **options), lengths)
    if exponent:
        shards.give_priorities(torch.tensor(priority))
    assert_alike(shards)


@pytest.mark.slow
@settings(max_examples=30)
@given(lengths=divisions)
def test_weights_of_the_continuous_correction_are_those_of_one_replay(lengths) -> None:
    shards = Shards(lambda: of_tables(0.0, 0.4, correction="continuous", return_probabilities=True), lengths)
    assert_alike(shards)


@pytest.mark.slow
@settings(max_examples=30)
@given(lengths=divisions, priority=priorities, exponent=exponents, batch_size=st.integers(1, 40))
def test_totals_add_up_and_parts_are_the_batch(lengths, priority, exponent, batch_size) -> None:
    shards = Shards(lambda: of_tables(exponent, 0.4), lengths)
    if exponent:
        shards.give_priorities(torch.tensor(priority))
    totals = shards.totals()
    summed, whole = GroupTotals.summed([one for one in totals if one is not None]), shards.whole.group_totals()
    np.testing.assert_allclose(summed.mass, whole.mass, rtol=1e-6)
    np.testing.assert_array_equal(summed.rows, whole.rows)
    np.testing.assert_array_equal(summed.smallest, whole.smallest)
    assert summed.max_priority == whole.max_priority
    division = shards.divider.divide(batch_size, totals)
    rows = sum(np.bincount(part.groups, minlength=2) for part in division.parts)
    assert rows.tolist() == shards.whole.sampler.rows_of_tables(shards.whole.tables, batch_size)[0].tolist()
    for part, one in zip(division.parts, totals, strict=True):
        assert ((part.points >= 0) & (part.points < 1)).all()
        assert (one.mass[part.groups] > 0).all()
