# SPDX-License-Identifier: Apache-2.0
"""Shares of a batch, by hand-worked numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable
from lightning_replay.samplers.table_corrections import mixture
from lightning_replay.samplers.table_shares import TableShares, largest_remainder, with_one_of_each
from lightning_replay.table_replay import TableReplay
from lightning_replay.tables import Tables
from tests.event_steps import IsTrue, event_steps
from tests.transitions import numbered_steps

SHARES = {"default": 0.5, "goal": 0.3, "gap": 0.2}


def tables_of_lengths(default: int, goal: int, gap: int) -> Tables:
    """The first slots of the default table are in the others as well."""
    tables = Tables({"default": 10, "goal": 10, "gap": 10})
    slots = tables.append_new_to_each(np.zeros(default, dtype=np.int64))
    for table, count in ((1, goal), (2, gap)):
        tables.append(np.full(count, table), slots[:count])
    return tables


def prioritized(**options) -> TableReplay:
    """Six steps in slots 0 to 5; the goal, at the last but one, sends slots 3 and 4 to its table."""
    table = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4, min_size=1)
    given = {"capacity": 6, "batch_size": 4, "priority_exponent": 1.0, "priority_offset": 0.0, "seed": 0}
    replay = recipes.event_tables(tables=[table], **given | options)
    replay.extend(event_steps(0, 6, {4: {"goal"}}, ["goal"]))
    return replay


def weights_by_row(replay: TableReplay, batches: int = 30) -> dict[tuple[int, int], float]:
    """The weight of each row by table and slot."""
    found = {}
    for _ in range(batches):
        batch = replay.sample()
        keys = zip(batch["table"].tolist(), batch["index"].tolist(), strict=True)
        found.update(zip(keys, batch["priority_weight"].tolist(), strict=True))
    return found


@pytest.mark.parametrize(
    ("shares", "count", "expected"),
    [
        ([0.5, 0.3, 0.2], 10, [5, 3, 2]),
        ([0.5, 0.3, 0.2], 7, [4, 2, 1]),  # 3.5, 2.1, 1.4: the one left goes to the half
        ([0.5, 0.25, 0.25], 6, [3, 2, 1]),  # 3, 1.5, 1.5: equal remainders, the earlier table
        ([1 / 3, 1 / 3, 1 / 3], 3, [1, 1, 1]),
        ([0.1, 0.2, 0.7], 10, [1, 2, 7]),
        ([0.3, 0.3, 0.4], 2, [1, 0, 1]),  # 0.6, 0.6, 0.8
        ([1.0, 0.0, 0.0], 5, [5, 0, 0]),
        ([0.7, 1 - 0.7], 5, [4, 1]),  # 3.5 and, but for rounding, 1.5
        ([0.0, 0.999, 0.001], 256, [0, 256, 0]),
    ],
)
def test_rows_are_dealt_out_by_largest_remainder(shares, count: int, expected) -> None:
    assert largest_remainder(np.array(shares), count).tolist() == expected


@pytest.mark.parametrize(
    ("rows", "ready", "expected"),
    [
        ([7, 0, 1, 0], [1, 1, 1, 0], [6, 1, 1, 0]),
        ([8, 0, 0], [1, 1, 1], [6, 1, 1]),
        ([2, 0, 0], [1, 1, 1], [1, 1, 0]),  # fewer rows than tables
        ([1, 0, 0], [1, 1, 1], [1, 0, 0]),
        ([4, 4, 0], [1, 1, 0], [4, 4, 0]),
    ],
)
def test_every_ready_table_gets_one_from_the_richest(rows, ready, expected) -> None:
    given = np.array(rows)
    assert with_one_of_each(given, np.array(ready, dtype=bool)).tolist() == expected
    assert given.tolist() == rows


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((9, 3, 1), [0.5, 0.3, 0.2]),
        ((9, 2, 1), [5 / 7, 0.0, 2 / 7]),  # goal needs 3
        ((9, 3, 0), [5 / 8, 3 / 8, 0.0]),  # an empty table is never drawn from
        ((9, 2, 0), [1.0, 0.0, 0.0]),
        ((4, 4, 4), [0.0, 0.6, 0.4]),  # the default table too can hold too little
    ],
)
def test_tables_that_hold_too_little_are_left_out(lengths, expected) -> None:
    sampler = TableShares(SHARES, min_sizes={"default": 5, "goal": 3}, seed=0)
    np.testing.assert_allclose(sampler.ready_shares(tables_of_lengths(*lengths)), expected)


def test_least_sizes_can_be_changed_between_draws() -> None:
    sampler, tables = TableShares(SHARES, min_sizes={"default": 5, "goal": 3}, seed=0), tables_of_lengths(9, 2, 1)
    assert sampler.ready_shares(tables)[1] == 0.0
    sampler.set_min_sizes({"goal": 2})
    np.testing.assert_allclose(sampler.ready_shares(tables), [0.5, 0.3, 0.2])
    assert sampler.min_sizes == {"default": 5, "goal": 2}


def test_a_batch_is_dealt_out_among_those_that_are_left() -> None:
    tables = tables_of_lengths(9, 2, 1)
    assert TableShares(SHARES, {"goal": 3}).rows_of_tables(tables, 10).tolist() == [7, 0, 3]
    assert TableShares(SHARES, {"goal": 3}, at_least_one=True).rows_of_tables(tables, 2).tolist() == [1, 0, 1]
    assert TableShares(SHARES, at_least_one=True).rows_of_tables(tables, 2).tolist() == [1, 1, 0]


def test_multinomial_batches_have_the_size_asked_for() -> None:
    sampler = TableShares(SHARES, {"goal": 3}, multinomial=True, seed=0)
    rows = np.stack([sampler.rows_of_tables(tables_of_lengths(9, 2, 1), 10) for _ in range(50)])
    assert (rows.sum(1) == 10).all() and not rows[:, 1].any()
    assert len(np.unique(rows[:, 0])) > 3
    least = TableShares(SHARES, multinomial=True, at_least_one=True, seed=0)
    assert min(least.rows_of_tables(tables_of_lengths(9, 2, 1), 3).min() for _ in range(50)) == 1


@pytest.mark.parametrize("shares", [SHARES, {"default": 0.0, "goal": 1.0, "gap": 0.0}])
def test_nothing_to_draw_from_is_refused_with_what_there_is(shares) -> None:
    sampler = TableShares(shares, {"default": 5})
    with pytest.raises(RuntimeError, match=r"'default': 4, 'goal': 0.*needed are \{'default': 5.*Collect more"):
        sampler.rows_of_tables(tables_of_lengths(4, 0, 0), 2)


def test_a_full_table_without_a_share_gives_no_rows_while_the_others_wait() -> None:
    sampler = TableShares({"default": 0.0, "goal": 1.0, "gap": 0.0})
    with pytest.raises(RuntimeError, match="no table with a share"):
        sampler.rows_of_tables(tables_of_lengths(9, 0, 0), 2)
    assert sampler.rows_of_tables(tables_of_lengths(9, 1, 0), 2).tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table_shares": {"default": 0.5, "goal": 0.6}}, r"sums to 1.1; .*sum to 1. Got \{'default': 0.5, 'goal'"),
        ({"table_shares": {"default": 1.5, "goal": -0.5}}, "sums to 1; shares of a batch must be from 0 on"),
        ({"table_shares": {"default": float("nan")}}, "sums to nan"),
        ({"table_shares": {"default": 1.0}, "priority_exponent": -0.1}, "priority_exponent is -0.1"),
        ({"table_shares": {"default": 1.0}, "priority_offset": float("inf")}, "priority_offset is inf"),
        ({"table_shares": {"default": 1.0}, "importance_exponent": -1.0}, "importance_exponent is -1"),
    ],
)
def test_bad_options_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableShares(**options)


@pytest.mark.parametrize(
    "sampler",
    [
        TableShares({"default": 0.5, "gaol": 0.5}),
        TableShares({"default": 1.0}),
        TableShares(SHARES, min_sizes={"gaol": 3}),
    ],
)
def test_shares_of_other_tables_are_refused(sampler) -> None:
    with pytest.raises(ValueError, match=r"the tables are \['default', 'goal', 'gap'\]. Give a share to each"):
        sampler.rows_of_tables(tables_of_lengths(3, 0, 0), 1)


def test_a_buffer_without_tables_is_refused() -> None:
    replay = Replay(storage=PackedStorage(8), sampler=TableShares({"default": 1.0}), batch_size=2)
    replay.extend(numbered_steps(0, 4))
    with pytest.raises(TypeError, match="TableShares draws from tables.*EventTableWriter or a TaskTableWriter"):
        replay.sample()


def test_batches_are_the_rows_of_table_after_table() -> None:
    replay = prioritized(priority_exponent=0.0, batch_size=6, default_share=0.5)
    batch = replay.sample()
    assert batch["table"].tolist() == [0, 0, 0, 1, 1, 1] and batch["table"].dtype == torch.int64
    assert set(batch["index"][3:].tolist()) <= {3, 4}
    assert "priority_weight" not in batch
    assert replay.stats()["tables"]["goal"]["share_drawn"] == 0.5


def test_the_weight_is_the_product_of_correction_and_priorities() -> None:
    """Shares 1/2 each, |B_0| = 6, goal holds 3 and 4. mixture: outside 2, inside (1/6) / (1/12 + 1/4) = 1/2."""
    replay = prioritized(importance_exponent=1.0, correction="mixture")
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 3, 4]))
    found = weights_by_row(replay)
    assert found[0, 5] == pytest.approx(2 * (0.5 / 2))
    assert found[0, 4] == pytest.approx(0.5 * (0.5 / 1.5)) and found[1, 3] == pytest.approx(0.5 * 1)


def test_weights_over_the_largest_of_the_batch() -> None:
    """As above without priorities: 2 outside and 1/2 inside, so 1 and 1/4."""
    replay = prioritized(priority_exponent=0.0, correction="mixture", normalize_over_batch=True, batch_size=64)
    batch = replay.sample()
    inside = torch.isin(batch["index"], torch.tensor([3, 4]))
    assert torch.equal(batch["priority_weight"], torch.where(inside, 0.25, 1.0))


def test_a_correction_takes_the_shares_that_rounding_makes() -> None:
    """0.7 and 0.3 of 5 rows are 4 and 1, so 0.8 and 0.2: outside 1 / 0.8, inside (1/6) / (0.8/6 + 0.2/2)."""
    replay = prioritized(priority_exponent=0.0, correction="mixture", default_share=0.7, batch_size=5)
    assert replay.sample()["table"].tolist() == [0, 0, 0, 0, 1]
    found = weights_by_row(replay)
    assert found[0, 0] == pytest.approx(1 / 0.8) and found[1, 3] == pytest.approx(1 / (0.8 + 0.6))
    drawn = prioritized(priority_exponent=0.0, correction="mixture", default_share=0.7, batch_size=5, multinomial=True)
    found = weights_by_row(drawn)
    assert found[0, 0] == pytest.approx(1 / 0.7), "where the numbers are drawn too, the shares stay those given"


def test_it_says_what_it_is() -> None:
    sampler = TableShares({"default": 1.0}, correction=mixture)
    assert repr(sampler) == "TableShares({'default': 1.0}, priority_exponent=0.0)"
