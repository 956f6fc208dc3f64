# SPDX-License-Identifier: Apache-2.0
"""The correction for continuous states: two priorities over all tables."""

from __future__ import annotations

import pytest
import torch

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable
from lightning_replay.samplers import ContinuousCorrectionSampler
from lightning_replay.table_replay import TableReplay
from tests.event_steps import IsTrue, event_steps


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
    replay = filled()
    batches = [replay.sample() for _ in range(60)]
    found = {}
    for batch in batches:
        assert batch["priority_weight"].dtype == torch.float32 and batch["table"].dtype == torch.int64
        rows = zip(batch["table"].tolist(), batch["priority_weight"].tolist(), strict=True)
        found.update(zip(batch["action"].tolist(), rows, strict=True))
    third = pytest.approx(1 / 3)
    assert found == {row: (1, third) for row in (1, 2, 7, 8)} | {9: (2, third)} | {6: (0, 1), 10: (0, 1), 11: (0, 1)}
    shares = [table["share_drawn"] for table in replay.stats()["tables"].values()]
    assert sum(shares) == pytest.approx(1.0) and min(shares) > 0


def test_how_likely_each_table_is_and_the_weight_before_it_is_divided_by_the_largest() -> None:
    """Priorities 3/2 of 1 2 7 8 (goal) and 9 (gap), 1/2 of 6 10 11: 6 + 3/2 + 3/2 = 9, or 6 * 3/2, or 18 * 1/2."""
    for options in ({}, {"normalize_over_batch": True}):
        replay, found = filled(return_probabilities=True, **options), {}
        for batch in (replay.sample() for _ in range(60)):
            assert batch["table_probability"].dtype == batch["raw_weight"].dtype == torch.float32
            keys = zip(batch["table"].tolist(), batch["action"].tolist(), strict=True)
            values = zip(batch["table_probability"].tolist(), batch["raw_weight"].tolist(), strict=True)
            found.update(zip(keys, values, strict=True))
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
    found = {}
    for batch in (replay.sample() for _ in range(60)):
        found.update(zip(batch["action"].tolist(), batch["table"].tolist(), strict=True))
    assert found == {8: 2, 9: 2, 12: 1, 13: 1, 14: 1, 15: 1, 16: 0, 17: 0}


def test_weights_over_the_largest_of_the_batch() -> None:
    replay = filled(normalize_over_batch=True)
    assert {float(replay.sample(1)["priority_weight"]) for _ in range(30)} == {1.0}


def test_too_few_rows_are_refused_and_a_buffer_without_tables_too() -> None:
    replay = filled()
    replay.empty()
    replay.extend(event_steps(0, 3, {2: {"goal"}}, ["goal", "gap"]))
    with pytest.raises(RuntimeError, match="'default' holds 3 rows and 6 are needed; collect more"):
        replay.sample()
    with pytest.raises(TypeError, match="draws from tables and the buffer's writer keeps none"):
        Replay(storage=PackedStorage(9), sampler=ContinuousCorrectionSampler(0.5), batch_size=2)


@pytest.mark.parametrize("options", [{"multinomial": True}, {"at_least_one": True}, {"priority_exponent": 0.6}])
def test_what_does_not_go_with_it_is_refused(options) -> None:
    with pytest.raises(ValueError, match="continuous.*leave out multinomial, at_least_one and priority_exponent"):
        filled(**options)
