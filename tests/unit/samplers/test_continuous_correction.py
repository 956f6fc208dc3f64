# SPDX-License-Identifier: Apache-2.0
"""The correction for continuous states: two priorities over all tables."""

from __future__ import annotations

import pytest

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable
from lightning_replay.samplers import ContinuousCorrectionSampler
from lightning_replay.table_replay import TableReplay
from tests.event_steps import IsTrue, by_row, event_steps


def filled(**options) -> TableReplay:
    """Twelve steps, 6 to 11 in the default table; goal holds 1 and 2, which have left it, and 7 and 8; gap 8 and 9."""
    tables = [
        EventTable(name, condition=IsTrue(name), history_length=2, capacity=4, share=0.25) for name in ("goal", "gap")
    ]
    replay = recipes.event_tables(
        **{"capacity": 6, "batch_size": 6, "tables": tables, "correction": "continuous", "seed": 0} | options
    )
    replay.extend(event_steps(0, 12, {2: {"goal"}, 8: {"goal"}, 9: {"gap"}}, ["goal", "gap"]))
    return replay


def test_rows_of_events_weigh_less_and_name_their_table() -> None:
    """η = 1/2: priorities 3/2 and 1/2, so a third of the weight of rows outside."""
    replay, third = filled(), pytest.approx(1 / 3)
    inside = {(1, row): third for row in (1, 2, 7, 8)} | {(2, 9): third}
    assert by_row(replay, row="action") == inside | {(0, 6): 1, (0, 10): 1, (0, 11): 1}
    shares = [table["share_drawn"] for table in replay.stats()["tables"].values()]
    assert sum(shares) == pytest.approx(1.0) and min(shares) > 0


def test_how_likely_each_table_is_and_the_weight_before_it_is_divided_by_the_largest() -> None:
    """Priorities 3/2 of 1 2 7 8 (goal) and 9 (gap), 1/2 of 6 10 11: 6 + 3/2 + 3/2 = 9, or 6 * 3/2, or 18 * 1/2."""
    for options in ({}, {"normalize_over_batch": True}):
        replay = filled(return_probabilities=True, **options)
        found = by_row(replay, "table_probability", "raw_weight", row="action")
        expected = {1: (pytest.approx(2 / 3), 6.0), 2: (pytest.approx(1 / 6), 6.0), 0: (pytest.approx(1 / 6), 18.0)}
        of_rows = {1: (1, 2, 7, 8), 2: (9,), 0: (6, 10, 11)}
        assert found == {(table, row): expected[table] for table, rows in of_rows.items() for row in rows}
    assert {"table_probability", "raw_weight"}.isdisjoint(filled().sample().keys())
    with pytest.raises(TypeError, match="return_probabilities is None; it must be True or False"):
        ContinuousCorrectionSampler(0.5, return_probabilities=None)  # type: ignore[arg-type]


def test_priorities_follow_what_enters_and_leaves_the_tables() -> None:
    """Two more events push the steps before out of goal, and six more steps 6 to 11 out of the default table."""
    replay = filled()
    replay.sample()
    replay.extend(event_steps(12, 6, {1: {"goal"}, 3: {"goal"}}, ["goal", "gap"]))
    found = by_row(replay, row="action").keys()
    assert found == {(2, 8), (2, 9), (1, 12), (1, 13), (1, 14), (1, 15), (0, 16), (0, 17)}


def test_weights_over_the_largest_of_the_batch() -> None:
    replay = filled(normalize_over_batch=True)
    assert {float(replay.sample(1)["priority_weight"]) for _ in range(30)} == {1.0}


def test_too_few_rows_are_refused_and_a_buffer_without_tables_too() -> None:
    replay = filled()
    replay.empty()
    replay.extend(event_steps(0, 3, {2: {"goal"}}, ["goal", "gap"]))
    with pytest.raises(RuntimeError, match="'default' holds 3 of 6 rows; collect more"):
        replay.sample()
    with pytest.raises(TypeError, match="draws from tables, the writer keeps none"):
        Replay(storage=PackedStorage(9), sampler=ContinuousCorrectionSampler(0.5), batch_size=2)


@pytest.mark.parametrize("options", [{"multinomial": True}, {"at_least_one": True}, {"priority_exponent": 0.6}])
def test_what_does_not_go_with_it_is_refused(options) -> None:
    with pytest.raises(ValueError, match=f"continuous.*leave out {next(iter(options))}, or"):
        filled(**options)


def test_every_table_is_drawn_from() -> None:
    unused = EventTable("unused", condition=IsTrue("goal"), history_length=2, capacity=4, share=0.0)
    with pytest.raises(ValueError, match="continuous.*leave out table 'unused' of share 0, or use"):
        recipes.event_tables(8, 2, tables=[unused], default_share=1.0, correction="continuous")
