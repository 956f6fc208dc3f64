# SPDX-License-Identifier: Apache-2.0
"""Weights for what events are drawn more often than they happen, worked out by hand on tiny tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.events import EventTable
from lightning_replay.samplers.tables import lemma2, lemma2_exact, mixture
from lightning_replay.tables.counts import StateActionCounts, state_action_keys
from lightning_replay.tables.tables import Tables
from tests.event_steps import IsTrue, event_steps

EVERY_SLOT = np.arange(6)


def tables_of(goal: list[int], gap: list[int], default: int = 4) -> Tables:
    """Six rows in slots 0 to 5, sent to the other tables before the first ones leave the default table."""
    tables = Tables({"default": 6, "goal": 4, "gap": 4})
    tables.capacity[0] = default
    slots = tables.append_new_to_each(np.zeros(min(default, 6), dtype=np.int64))
    for table, sent in ((1, goal), (2, gap)):
        tables.append(np.full(len(sent), table), np.array(sent, dtype=np.int64))
    for _ in range(6 - len(slots)):
        tables.append_new_to_each(np.zeros(1, dtype=np.int64))
    return tables


def test_mixture_divides_the_uniform_probability_by_the_one_of_the_draw() -> None:
    """Six rows, goal 4 5, gap 5; shares 1/2 1/4 1/4::

    row        drawn with                          uniform    weight
    0 .. 3     (1/2)/6                             1/6        2
    4          (1/2)/6 + (1/4)/2                   1/6        4/5
    5          (1/2)/6 + (1/4)/2 + (1/4)/1         1/6        4/11
    """
    tables = tables_of([4, 5], [5], default=6)
    weight = mixture(tables, np.array([0.5, 0.25, 0.25]), EVERY_SLOT)
    np.testing.assert_allclose(weight, [2, 2, 2, 2, 4 / 5, 4 / 11])


def test_mixture_leaves_out_a_table_that_is_not_ready() -> None:
    """As above, gap not ready: shares 2/3 1/3 0; row 5 weighs as row 4: (1/6) / (1/9 + 1/6) = 3/5."""
    tables = tables_of([4, 5], [5], default=6)
    weight = mixture(tables, np.array([2 / 3, 1 / 3, 0.0]), EVERY_SLOT)
    np.testing.assert_allclose(weight, [3 / 2] * 4 + [3 / 5] * 2)


def test_mixture_counts_rows_that_left_the_default_table_as_if_they_were_in_it() -> None:
    """Rows 0 and 1 have left the default table of four; goal holds 1 3, shares 1/2 1/2::

    row      drawn with           as if        weight
    1        (1/2)/2              1/4          1
    2        (1/2)/4              1/4          2
    3        (1/2)/4 + (1/2)/2    1/4          2/3
    """
    tables = tables_of([1, 3], [])
    assert tables.slots_of(0).tolist() == [2, 3, 4, 5]
    weight = mixture(tables, np.array([0.5, 0.5, 0.0]), np.array([1, 2, 3]))
    np.testing.assert_allclose(weight, [1, 2, 2 / 3])


def counted() -> Tables:
    """Two kinds of rows, even and odd; four even ones, one of them in an event table, two odd ones, both in one::

    slot     0  1  2  3  4  5          q: even 3/4, odd 0
    kind     e  o  e  o  e  e
    goal           2     3 1
    """
    tables = tables_of([1, 2, 3], [3], default=6)
    tables.state_action_counts = StateActionCounts(tables.num_slots)
    kind = torch.tensor([0, 1, 0, 1, 0, 0])
    rows = TensorDict({"observation": kind.float()[:, None], "action": kind}, [6])
    tables.state_action_counts.store(EVERY_SLOT, state_action_keys(rows))
    for table in (1, 2):
        tables.state_action_counts.send(tables.slots_of(table))
    return tables


def test_the_share_outside_is_counted_over_equal_states_and_actions() -> None:
    np.testing.assert_allclose(counted().state_action_counts.share_outside(EVERY_SLOT), [0.75, 0, 0.75, 0, 0.75, 0.75])


def test_lemma2() -> None:
    """η = 0.3 + 0.1: 1 - η q inside, where q is 3/4 (slot 2) or 0; 1 / 0.6 outside."""
    weight = lemma2(counted(), np.array([0.6, 0.3, 0.1]), EVERY_SLOT)
    np.testing.assert_allclose(weight, [1 / 0.6, 1, 0.7, 1, 1 / 0.6, 1 / 0.6])


def test_lemma2_exact() -> None:
    """(1 - q) / (1 - q + η q) inside: (1/4) / (1/4 + 0.4 * 3/4) = 5/11; the same where q is 0."""
    weight = lemma2_exact(counted(), np.array([0.6, 0.3, 0.1]), EVERY_SLOT)
    np.testing.assert_allclose(weight, [1 / 0.6, 1, 5 / 11, 1, 1 / 0.6, 1 / 0.6])


@pytest.mark.parametrize(("correction", "inside"), [(lemma2, 0.7), (lemma2_exact, 0.25 / (0.25 + 0.3 * 0.75 + 0.075))])
def test_rows_of_a_table_that_is_not_drawn_from_are_outside(correction, inside: float) -> None:
    """The gap has no part of the batch: η = 0.4. Without the goal η = 0.2 and the gap's row 3 alone is inside."""
    tables = counted()
    weight = correction(tables, np.array([0.6, 0.4, 0.0]), EVERY_SLOT)
    np.testing.assert_allclose(weight, [1 / 0.6, 1, inside, 1, 1 / 0.6, 1 / 0.6])
    weight = correction(tables, np.array([0.8, 0.0, 0.2]), EVERY_SLOT)
    np.testing.assert_allclose(weight, [1.25, 1.25, 1.25, 1, 1.25, 1.25])


@pytest.mark.parametrize("correction", [mixture, lemma2, lemma2_exact])
def test_nothing_but_the_default_table_weighs_nothing(correction) -> None:
    np.testing.assert_array_equal(correction(counted(), np.array([1.0, 0.0, 0.0]), EVERY_SLOT), np.ones(6))


@pytest.mark.parametrize("correction", [lemma2, lemma2_exact])
def test_batches_of_events_alone_have_finite_weights(correction) -> None:
    weight = correction(counted(), np.array([0.0, 0.5, 0.5]), np.array([1, 2, 3]))
    assert np.isfinite(weight).all() and weight[0] == weight[2] == 1.0


@pytest.mark.parametrize("correction", [lemma2, lemma2_exact])
def test_without_counts_they_are_refused(correction) -> None:
    with pytest.raises(TypeError, match=r"count_state_actions=True.*'mixture'"):
        correction(tables_of([1], []), np.array([0.6, 0.4, 0.0]), EVERY_SLOT)


def repeated_steps(first: int, count: int, event: bool, **options) -> TensorDict:
    """Steps of one state and action, of which the last is an event or none is."""
    rows = event_steps(first, count, {count - 1: {"goal"}} if event else {}, ["goal"], **options)
    return alike(rows)


def alike(rows: TensorDict) -> TensorDict:
    for column in (rows["observation"], rows["next", "observation"], rows["action"]):
        column.zero_()
    return rows


@pytest.mark.parametrize(
    ("correction", "inside"), [("lemma2", 1 - 0.5 * 0.75), ("lemma2_exact", 0.25 / (0.25 + 0.375))]
)
def test_the_recipe_keeps_the_counts(correction: str, inside: float, tmp_path) -> None:
    """Eight steps of one state and action, two of which led to an event: q = 3/4, η = 1/2."""
    table = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4, min_size=1)
    replay = recipes.event_tables(20, 8, tables=[table], correction=correction, seed=0)
    replay.extend(repeated_steps(0, 4, True))
    replay.extend(repeated_steps(4, 4, False))
    replay.save(tmp_path)
    loaded = recipes.event_tables(20, 8, tables=[table], correction=correction)
    loaded.load(tmp_path)
    for one in (replay, loaded):
        batch = one.sample()
        is_inside = torch.isin(batch["index"], torch.tensor([2, 3]))
        assert bool(is_inside.any()) and not bool(is_inside.all())
        torch.testing.assert_close(batch["priority_weight"], torch.where(is_inside, inside, 2.0))


@pytest.mark.parametrize("correction", ["mixture", "lemma2", "lemma2_exact"])
def test_a_table_with_a_share_of_nothing_leaves_no_trace_in_the_weights(correction: str) -> None:
    """The goal keeps two of eight rows alike, and so q = 3/4; the gap, with a share of 0, the first three as well."""
    goal = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4, share=0.5, min_size=1)
    gap = EventTable("gap", condition=IsTrue("gap"), history_length=3, capacity=4, share=0.0, min_size=1)
    found = []
    for tables in ([goal, gap], [goal]):
        options = {"at_least_one": True, "correction": correction, "default_share": 0.5, "seed": 0}
        replay = recipes.event_tables(20, 8, tables=tables, **options)
        replay.extend(alike(event_steps(0, 8, {2: {"gap"}, 5: {"goal"}}, ["goal", "gap"])))
        batches = torch.cat([replay.sample() for _ in range(20)])
        assert batches["table"].bincount().tolist() == [80, 80]
        found.append((batches["index"], batches["priority_weight"]))
    assert len(replay.table("goal")) == 2
    for with_gap, without in zip(*found, strict=True):
        assert torch.equal(with_gap, without) and torch.isfinite(with_gap).all()


def test_counts_go_on_over_rows_that_were_forgotten() -> None:
    """q is of everything ever stored: after 4 steps with an event, 36 without one in a table of 8."""
    table = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4, min_size=1)
    replay = recipes.event_tables(8, 8, tables=[table], correction="lemma2", seed=0)
    replay.extend(repeated_steps(0, 4, True))
    for first in range(4, 40, 4):
        replay.extend(repeated_steps(first, 4, False))
    batch = replay.sample()
    torch.testing.assert_close(batch["priority_weight"][batch["table"] == 1], torch.full((4,), 1 - 0.5 * 38 / 40))


def test_counts_start_anew_when_the_buffer_is_emptied() -> None:
    table = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4, min_size=1)
    replay = recipes.event_tables(8, 8, tables=[table], correction="lemma2", seed=0)
    replay.extend(repeated_steps(0, 4, False))
    replay.empty()
    replay.extend(repeated_steps(4, 2, True))
    assert replay.sample()["priority_weight"].tolist() == [1.0] * 8


def test_rows_are_told_apart_by_every_column_of_observation_and_action() -> None:
    counts = StateActionCounts(4)
    rows = TensorDict(
        {
            "observation": {"place": torch.tensor([[1.0], [1.0], [1.0], [2.0]]), "door": torch.tensor([0, 0, 1, 0])},
            "action": torch.tensor([[3, 4]] * 4),
        },
        [4],
    )
    counts.store(np.arange(4), state_action_keys(rows))
    counts.send(np.array([0, 3]))
    counts.send(np.array([0]))  # for another event: counted once
    assert counts.share_outside(np.arange(4)).tolist() == [0.5, 0.5, 1.0, 0.0]


def test_rows_without_the_columns_that_are_counted_are_refused() -> None:
    rows = TensorDict({"pixels": torch.zeros(2, 3), "action": torch.zeros(2, 1)}, [2])
    with pytest.raises(ValueError, match=r"no column \['observation'\].*use the correction 'mixture'"):
        state_action_keys(rows)
