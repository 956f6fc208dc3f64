# SPDX-License-Identifier: Apache-2.0
"""Shares of a batch, by hand-worked numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_replay import PackedStorage, Replay, load_replay, recipes
from lightning_replay.events import EventTable
from lightning_replay.samplers.tables import TableShares, largest_remainder, with_one_of_each
from lightning_replay.tables.tables import Tables
from tests.event_steps import IsTrue, by_row, event_steps, six_steps

SHARES = {"default": 0.5, "goal": 0.3, "gap": 0.2}
PROBABILITIES = ("table_probability", "raw_weight")


def tables_of_lengths(default: int, goal: int, gap: int) -> Tables:
    """The first slots of the default table are in the others as well."""
    tables = Tables({"default": 10, "goal": 10, "gap": 10})
    slots = tables.append_new_to_each(np.zeros(default, dtype=np.int64))
    for table, count in ((1, goal), (2, gap)):
        tables.append(np.full(count, table), slots[:count])
    return tables


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
    assert TableShares(SHARES, {"goal": 3}).rows_of_tables(tables, 10)[0].tolist() == [7, 0, 3]
    assert TableShares(SHARES, {"goal": 3}, at_least_one=True).rows_of_tables(tables, 2)[0].tolist() == [1, 0, 1]
    assert TableShares(SHARES, at_least_one=True).rows_of_tables(tables, 2)[0].tolist() == [1, 1, 0]


def test_multinomial_batches_have_the_size_asked_for() -> None:
    sampler = TableShares(SHARES, {"goal": 3}, multinomial=True, seed=0)
    rows = np.stack([sampler.rows_of_tables(tables_of_lengths(9, 2, 1), 10)[0] for _ in range(50)])
    assert (rows.sum(1) == 10).all() and not rows[:, 1].any()
    assert len(np.unique(rows[:, 0])) > 3
    least = TableShares(SHARES, multinomial=True, at_least_one=True, seed=0)
    assert min(least.rows_of_tables(tables_of_lengths(9, 2, 1), 3)[0].min() for _ in range(50)) == 1


@pytest.mark.parametrize("shares", [SHARES, {"default": 0.0, "goal": 1.0, "gap": 0.0}])
def test_nothing_to_draw_from_is_refused_with_what_there_is(shares) -> None:
    sampler = TableShares(shares, {"default": 5})
    with pytest.raises(RuntimeError, match=r"'default': 4, 'goal': 0.*needed are \{'default': 5.*Collect more"):
        sampler.rows_of_tables(tables_of_lengths(4, 0, 0), 2)


def test_a_full_table_without_a_share_gives_no_rows_while_the_others_wait() -> None:
    sampler = TableShares({"default": 0.0, "goal": 1.0, "gap": 0.0})
    with pytest.raises(RuntimeError, match="no table with a share"):
        sampler.rows_of_tables(tables_of_lengths(9, 0, 0), 2)
    assert sampler.rows_of_tables(tables_of_lengths(9, 1, 0), 2)[0].tolist() == [0, 2, 0]


@pytest.mark.parametrize("options", [{}, {"multinomial": True}, {"at_least_one": True}])
@pytest.mark.parametrize("name", SHARES)
def test_a_table_without_a_share_is_never_drawn_from_nor_waited_for(name: str, options) -> None:
    shares = dict.fromkeys(SHARES, 0.5) | {name: 0.0}
    sampler, number = TableShares(shares, {name: 9}, seed=0, **options), list(SHARES).index(name)
    for lengths in ((9, 5, 5), (5, 5, 5)):  # it holds enough, or not
        rows = np.stack([sampler.rows_of_tables(tables_of_lengths(*lengths), 7)[0] for _ in range(30)])
        assert not rows[:, number].any() and (rows.sum(1) == 7).all()
        assert (np.delete(rows, number, axis=1) > 0).any(0).all()


def test_the_last_draw_there_is_falls_into_a_table_with_a_share(monkeypatch) -> None:
    """Normalised, 0.2, 0.4, 0.3 and 0.1 sum to a little less than 1 in floating point, less than the largest draw."""
    shares = dict(zip("abcde", (0.2, 0.4, 0.3, 0.1, 0.0), strict=True))
    tables = Tables(dict.fromkeys(shares, 3))
    tables.append_new_to_each(np.arange(5))
    sampler, largest = TableShares(shares, multinomial=True), 1 - 2**-53
    assert np.cumsum(sampler.ready_shares(tables))[-1] < largest
    monkeypatch.setattr(torch, "rand", lambda count, **options: torch.full((count,), largest, dtype=torch.float64))
    assert sampler.rows_of_tables(tables, 5)[0].tolist() == [0, 0, 0, 5, 0]


def test_weights_are_over_the_largest_of_the_tables_that_have_a_share() -> None:
    """Priorities 1 1 2 1 9 4 of the default table, 1 9 of the goal's: |B| P is at least 6/18, and 2/10 in the goal."""
    for share, expected in ((0.0, 1.0), (0.5, (2 / 10) / (6 / 18))):
        table = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4, share=share, min_size=1)
        replay = recipes.event_tables(
            **{"capacity": 6, "batch_size": 4, "tables": [table], "default_share": 1 - share, "seed": 0},
            **{"priority_exponent": 1.0, "priority_offset": 0.0, "importance_exponent": 1.0},
        )
        replay.extend(event_steps(0, 6, {4: {"goal"}}, ["goal"]))
        replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 9, 4]))
        found = by_row(replay)
        assert found[0, 0] == pytest.approx(expected) and ((1, 4) in found) == (share > 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table_shares": {"default": 0.5, "goal": 0.6}}, r"sums to 1.1; .*sum to 1. Got \{'default': 0.5, 'goal'"),
        ({"table_shares": {"default": float("nan")}}, r"table_shares\['default'\] is nan"),
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
    with pytest.raises(ValueError, match=r"tables are \['default', 'goal', 'gap'\]; give each a share"):
        sampler.rows_of_tables(tables_of_lengths(3, 0, 0), 1)


def test_a_buffer_without_tables_is_refused() -> None:
    with pytest.raises(TypeError, match="TableShares draws from tables, .*EventTableWriter or TaskTableWriter"):
        Replay(storage=PackedStorage(8), sampler=TableShares({"default": 1.0}), batch_size=2)


def test_batches_are_the_rows_of_table_after_table() -> None:
    replay = six_steps(priority_exponent=0.0, batch_size=6, default_share=0.5)
    batch = replay.sample()
    assert batch["table"].tolist() == [0, 0, 0, 1, 1, 1] and batch["table"].dtype == torch.int64
    assert set(batch["index"][3:].tolist()) <= {3, 4}
    assert "priority_weight" not in batch
    assert replay.stats()["tables"]["goal"]["share_drawn"] == 0.5


def test_the_weight_is_the_product_of_correction_and_priorities() -> None:
    """Shares 1/2 each, |B_0| = 6, goal holds 3 and 4. mixture: outside 2, inside (1/6) / (1/12 + 1/4) = 1/2."""
    replay = six_steps(importance_exponent=1.0, correction="mixture")
    replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 3, 4]))
    found = by_row(replay)
    assert found[0, 5] == pytest.approx(2 * (0.5 / 2))
    assert found[0, 4] == pytest.approx(0.5 * (0.5 / 1.5)) and found[1, 3] == pytest.approx(0.5 * 1)


def test_weights_over_the_largest_of_the_batch() -> None:
    """As above without priorities: 2 outside and 1/2 inside, so 1 and 1/4."""
    replay = six_steps(priority_exponent=0.0, correction="mixture", normalize_over_batch=True, batch_size=64)
    batch = replay.sample()
    inside = torch.isin(batch["index"], torch.tensor([3, 4]))
    assert torch.equal(batch["priority_weight"], torch.where(inside, 0.25, 1.0))


def test_a_correction_takes_the_shares_that_rounding_makes() -> None:
    """0.7 and 0.3 of 5 rows are 4 and 1, so 0.8 and 0.2: outside 1 / 0.8, inside (1/6) / (0.8/6 + 0.2/2)."""
    replay = six_steps(priority_exponent=0.0, correction="mixture", default_share=0.7, batch_size=5)
    assert replay.sample()["table"].tolist() == [0, 0, 0, 0, 1]
    found = by_row(replay)
    assert found[0, 0] == pytest.approx(1 / 0.8) and found[1, 3] == pytest.approx(1 / (0.8 + 0.6))
    drawn = six_steps(priority_exponent=0.0, correction="mixture", default_share=0.7, batch_size=5, multinomial=True)
    found = by_row(drawn)
    assert found[0, 0] == pytest.approx(1 / 0.7), "where the numbers are drawn too, the shares stay those given"


@pytest.mark.parametrize(
    ("options", "of_default", "of_goal"),
    [
        ({}, 0.8, 0.2),  # 3.5 and 1.5 of 5 rows are 4 and 1
        ({"at_least_one": True, "default_share": 0.99}, 0.8, 0.2),  # 5 and 0, and then 4 and 1
        ({"multinomial": True}, 0.7, 0.3),  # numbers are drawn too: the shares themselves
        ({"multinomial": True, "least_of_goal": 4}, 1.0, None),  # the goal's table, which needs 4 rows, holds 2
    ],
)
def test_how_likely_the_table_of_a_row_is(options, of_default: float, of_goal: float | None) -> None:
    given = {"priority_exponent": 0.0, "default_share": 0.7, "batch_size": 5, "return_probabilities": True} | options
    found = by_row(six_steps(**given), *PROBABILITIES)
    assert {probability for (table, _), (probability, _) in found.items() if table == 0} == {np.float32(of_default)}
    of_events = {probability for (table, _), (probability, _) in found.items() if table == 1}
    assert of_events == (set() if of_goal is None else {np.float32(of_goal)})
    assert {raw for _, raw in found.values()} == {1.0}, "neither a correction nor priorities"


def test_weights_before_they_are_divided_by_the_largest() -> None:
    """As the product above: mixture 2 outside and 1/2 inside, |B| P = 6 p / 12 in the default table, 2 p / 4 in goal::

    row           priority    |B| P    raw weight
    default 0     1           1/2      2 / (1/2)
    default 2     2           1        2
    default 4     3           3/2      (1/2) / (3/2)
    goal 3        1           1/2      (1/2) / (1/2)
    """
    options = {"importance_exponent": 1.0, "correction": "mixture", "return_probabilities": True}
    for more in ({}, {"normalize_over_batch": True}):
        replay = six_steps(**options, **more)
        replay.update_priority(torch.arange(6), torch.tensor([1.0, 1, 2, 1, 3, 4]))
        found = by_row(replay, *PROBABILITIES)
        raw = {row: value for row, (_, value) in found.items()}
        assert raw[0, 0] == pytest.approx(4.0) and raw[0, 2] == pytest.approx(2.0)
        assert raw[0, 4] == pytest.approx(1 / 3) and raw[1, 3] == pytest.approx(1.0)
        assert {probability for probability, _ in found.values()} == {0.5}
        batch = replay.sample()
        quotient = batch["raw_weight"] / batch["priority_weight"]
        largest = batch["raw_weight"].max() if more else torch.tensor(2.0)  # 1 / (|B| P) at most, without the mixture
        torch.testing.assert_close(quotient, largest.expand(4))


def test_raw_weights_without_a_correction_of_priorities_are_those_of_the_tables() -> None:
    replay = six_steps(importance_exponent=0.0, correction="mixture", return_probabilities=True)
    raw = {row: value for row, (_, value) in by_row(replay, *PROBABILITIES).items()}
    assert raw[0, 0] == 2.0 and raw[0, 4] == raw[1, 3] == pytest.approx(0.5)


def test_probabilities_are_given_where_they_are_asked_for_and_saved_as_an_option(tmp_path) -> None:
    assert {"table_probability", "raw_weight"}.isdisjoint(six_steps().sample().keys())
    six_steps(return_probabilities=True).save(tmp_path)
    assert {"table_probability", "raw_weight"} <= set(load_replay(tmp_path, trust=["tests"]).sample().keys())
