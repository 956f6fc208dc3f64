# SPDX-License-Identifier: Apache-2.0
"""Buffers over tables as a whole: what they show, count, save and forget."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_replay import load_replay, recipes
from lightning_replay.events import EventTable
from lightning_replay.table_replay import TableReplay
from tests.event_steps import IsTrue, event_steps, fill


def goal_table(**options) -> EventTable:
    given = {"condition": IsTrue("goal"), "history_length": 2, "capacity": 4, "min_size": 1}
    return EventTable("goal", **given | options)


def events(**options) -> TableReplay:
    return recipes.event_tables(**{"capacity": 6, "batch_size": 4, "tables": [goal_table()], "seed": 0} | options)


def test_the_length_counts_rows_once_however_many_tables_hold_them() -> None:
    """Capacity 6; after 15 steps 9 .. 14 are in the default table, and 7 8 12 13 in goal: 8 rows."""
    replay = events()
    assert len(replay) == 0
    fill(replay)
    assert len(replay) == 8
    assert replay.table("goal")["action"].tolist() == [7, 8, 12, 13]
    assert replay.table("default")["action"].tolist() == list(range(9, 15))


def test_a_table_is_shown_as_a_copy() -> None:
    replay = events()
    fill(replay)
    replay.table("goal")["observation"].fill_(-1.0)
    assert replay.table("goal")["observation"].flatten().tolist() == [7, 8, 12, 13]
    with pytest.raises(KeyError, match="no table 'gaol'; there are 'default', 'goal'"):
        replay.table("gaol")
    with pytest.raises(RuntimeError, match="empty"):
        events().table("goal")


@pytest.mark.parametrize("correction", ["none", "continuous"])
def test_the_default_table_waits_for_its_own_minimum(correction: str) -> None:
    """Batches of 4, of which the default table needs 3, 5 or by default 4 rows."""
    steps = event_steps(0, 6, {}, ["goal"])
    for given, needed in ((3, 3), (5, 5), (None, 4)):
        replay = events(min_size=given, correction=correction)
        for count in range(1, 7):
            replay.extend(steps[count - 1 : count])
            if count >= needed:
                assert len(replay.sample()) == 4
            else:
                with pytest.raises(RuntimeError, match=f"{needed}"):
                    replay.sample()


def test_a_table_with_a_share_of_nothing_is_kept_shown_and_saved(tmp_path) -> None:
    replay = events(tables=[goal_table(share=0.0)], default_share=1.0, at_least_one=True)
    fill(replay)
    assert replay.table("goal")["action"].tolist() == [7, 8, 12, 13]
    replay.save(tmp_path)
    loaded = load_replay(tmp_path, trust=["tests"])
    for one in (replay, loaded):
        assert torch.cat([one.sample()["table"] for _ in range(20)]).tolist() == [0] * 80
        assert one.stats()["tables"]["goal"]["share_drawn"] == 0.0 and one.stats()["tables"]["goal"]["size"] == 4


def test_stats_of_each_table() -> None:
    replay = events()
    fill(replay)
    for _ in range(3):
        replay.sample()
    stats = replay.stats()
    assert stats["histories_forgotten"] == 0 and stats["size"] == 8
    assert stats["tables"]["default"] == dict(
        size=6, capacity=6, fill=1.0, evicted=9, share_drawn=0.5, age_mean=2.5, age_max=5
    )
    # 7 8 12 13 of 0 .. 14: ages 7 6 2 1. Six rows were sent, three of fifteen steps were events.
    assert stats["tables"]["goal"] == dict(
        size=4, capacity=4, fill=1.0, evicted=2, share_drawn=0.5, age_mean=4.0, age_max=7, event_share=0.2
    )


def test_stats_of_empty_tables() -> None:
    for table in events().stats()["tables"].values():
        assert (table["size"], table["fill"], table["share_drawn"], table["age_mean"]) == (0, 0.0, 0.0, 0.0)


def test_the_bytes_are_those_of_rows_tables_and_priorities() -> None:
    plain, prioritized = events(), events(priority_exponent=1.0)
    for replay in (plain, prioritized):
        fill(replay)
        replay.sample()
    assert plain.nbytes == plain.storage.nbytes + plain.tables.nbytes
    assert prioritized.nbytes == plain.nbytes + prioritized.sampler.nbytes


def test_a_buffer_with_other_tables_refuses_the_state_and_keeps_its_rows(tmp_path) -> None:
    """As many slots and entries in all, in tables of other capacities, names or order."""
    second = [EventTable(name, condition=IsTrue("goal"), history_length=2, capacity=4, min_size=1) for name in "xy"]
    pairs = [
        (events(), events(capacity=4, tables=[goal_table(capacity=6)])),
        (events(tables=second), events(tables=second[::-1])),
    ]
    for number, (saved, replay) in enumerate(pairs):
        fill(saved)
        fill(replay, episodes=1)
        before = replay.table("default")["action"].tolist()
        saved.save(tmp_path / str(number))
        with pytest.raises(ValueError, match=r"the saved buffer has tables \[\['default', 6\].*Nothing was loaded"):
            replay.load(tmp_path / str(number))
        assert replay.table("default")["action"].tolist() == before


def test_prefetched_batches_carry_their_tables() -> None:
    replay = events(prefetch=3, priority_exponent=0.5)
    fill(replay)
    for number in range(20):
        batch = replay.sample()
        assert batch["table"].tolist() == [0, 0, 1, 1]
        replay.update_priority(batch["index"], torch.rand(4), generation=batch["generation"])
        fill(replay, 1, first=15 + 5 * number)
    replay.empty()
    with pytest.raises(RuntimeError, match="no table"):
        replay.sample()


@pytest.mark.parametrize("priority_exponent", [0.0, 1.0])
def test_an_emptied_buffer_is_as_new(priority_exponent: float) -> None:
    replay = events(priority_exponent=priority_exponent)
    fill(replay)
    batch = replay.sample()
    replay.update_priority(batch["index"], torch.full((4,), 9.0))
    replay.empty()
    assert len(replay) == 0 and replay.stats()["tables"]["default"]["evicted"] == 0
    assert replay.sampler.default_priority == 1.0
    with pytest.raises(RuntimeError, match="no table"):
        replay.sample()
    fill(replay, 1)
    replay.update_priority(batch["index"], torch.rand(4), generation=batch["generation"])
    assert set(replay.sample()["action"].tolist()) <= set(range(5)), "nothing of before is drawn"
    assert replay.sampler.default_priority == 1.0, "feedback for what was forgotten is late"


def test_returns_over_several_steps_run_along_the_episode_and_not_along_the_table() -> None:
    """Rewards 1 2 3 4 of steps 0 .. 3, the third an event of two steps; discount 1/2, two steps::

    row    return              steps
    1      2 + 3/2 = 3.5       2
    2      3 + 4/2 = 5         2        step 3 is not in the goal table
    """
    replay = events(default_share=0.0, n_steps=2, discount=0.5)
    rows = event_steps(0, 4, {2: {"goal"}}, ["goal"])
    rows["next", "reward"] = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    replay.extend(rows)
    batch = replay.sample(32)
    returns = dict(zip(batch["action"].tolist(), batch["next", "reward"].flatten().tolist(), strict=True))
    assert returns == {1: 3.5, 2: 5.0}
    assert batch["next", "observation"].flatten().tolist() == (batch["action"] + 2).tolist()


def test_returns_end_where_a_later_step_was_overwritten() -> None:
    """Steps 0 1 are held by goal, step 2 and those after leave the default table and are written over."""
    replay = recipes.event_tables(2, 2, tables=[goal_table()], default_share=0.0, n_steps=3, discount=0.5, seed=0)
    rows = event_steps(0, 4, {1: {"goal"}}, ["goal"])
    rows["next", "reward"] = torch.ones(4, 1)
    replay.extend(rows)
    for first in range(4, 84, 4):
        later = event_steps(first, 4, {}, ["goal"])
        later["next", "reward"] = torch.full((4, 1), 100.0)
        replay.extend(later)
    batch = replay.sample(32)
    returns = dict(zip(batch["action"].tolist(), batch["next", "reward"].flatten().tolist(), strict=True))
    assert returns == {0: 1.5, 1: 1.0}
    assert batch["steps_to_next_obs"].flatten().tolist() == (2 - batch["action"]).tolist()


def test_interrupted_episodes_are_closed_in_every_table_that_holds_the_row() -> None:
    replay = events()
    index = replay.extend(event_steps(0, 4, {3: {"goal"}}, ["goal"], ends=False))
    generation = replay.storage.generation_of(index)
    replay.end_episodes(slots=index[-1:], generation=generation[-1:] + 1)
    assert not bool(replay.table("goal")["next", "truncated"].any()), "the slot holds another row by now"
    replay.end_episodes(slots=index[-1:], generation=generation[-1:])
    assert replay.table("goal")["next", "truncated"].flatten().tolist() == [False, True]
    replay.extend(event_steps(4, 1, {0: {"goal"}}, ["goal"]))
    assert replay.table("goal")["action"].tolist() == [2, 3, 4]


def test_a_copy_of_a_buffer_has_tables_of_its_own() -> None:
    replay = events()
    fill(replay)
    other = copy.deepcopy(replay)
    fill(other, 2, first=15)
    assert replay.table("goal")["action"].tolist() == [7, 8, 12, 13]
    assert other.table("goal")["action"].tolist() == [17, 18, 22, 23]
    assert other.sampler is not replay.sampler and other.tables is other.writer.tables
