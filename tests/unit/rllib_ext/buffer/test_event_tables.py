# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict

import rllib_ext
from lightning_replay import recipes
from lightning_replay.events import Event, EventTable, every_of, first_in_episode, info_key, reward_at_least
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.building import built
from rllib_ext.episodes import EpisodeConverter
from tests.unit.rllib_ext.episodes import buffer_of, column, numbered, numbers
from tests.unit.rllib_ext.my_conditions import first_number_is_even

EVENTS = "lightning_replay.events"
MINE = first_number_is_even.__module__


def at_least(threshold: float) -> dict[str, Any]:
    return {"class_path": f"{EVENTS}.reward_at_least", "init_args": {"threshold": threshold}}


def buffer(**options: Any) -> RecipeEpisodeReplayBuffer:
    return buffer_of(rllib_ext.replay_config("event_tables", **{"capacity": 100, "seed": 0, **options}))


def rewards(replay: Any, table: str) -> list[int]:
    return replay.table(table)["next", "reward"].flatten().int().tolist()


def test_tables_as_dicts_are_the_tables_as_objects() -> None:
    conditions = [at_least(1.0), f"{MINE}.first_number_is_even"]
    both = {"class_path": f"{EVENTS}.EveryOf", "init_args": {"conditions": conditions}}
    once = {"class_path": f"{EVENTS}.first_in_episode", "init_args": {"condition": at_least(2.0)}}
    tables = built(
        [
            {"name": "plain", "condition": at_least(3.0), "history_length": 4, "capacity": 10, "share": 0.2},
            {"name": "mine", "condition": f"{MINE}.first_number_is_even", "capacity": 300, "min_size": 7},
            {
                "name": "several",
                "capacity": 9,
                "events": [{"condition": both, "history_length": 2}, Event(once_of(5.0), 3)],
            },
            {"class_path": f"{EVENTS}.EventTable", "init_args": {"name": "once", "condition": once, "capacity": 200}},
            EventTable("object", info_key("goal"), capacity=200),
        ],
        "tables",
    )
    expected = [
        EventTable("plain", reward_at_least(3.0), 4, capacity=10, share=0.2),
        EventTable("mine", first_number_is_even, capacity=300, min_size=7),
        EventTable(
            "several",
            capacity=9,
            events=[Event(every_of(reward_at_least(1.0), first_number_is_even), 2), Event(once_of(5.0), 3)],
        ),
        EventTable("once", once_of(2.0), capacity=200),
        EventTable("object", info_key("goal"), capacity=200),
    ]
    assert [repr(table) for table in tables] == [repr(table) for table in expected]


def once_of(threshold: float) -> Any:
    return first_in_episode(reward_at_least(threshold))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"condition": "no.such.condition"}, r"tables[0].condition names 'no.such.condition', which cannot be"),
        ({"condition": f"{MINE}.missing"}, "cannot be imported"),
        ({"condition": "reward_at_least"}, "condition is 'reward_at_least'; it must be a condition"),
        ({"condition": f"{MINE}.NOT_CALLABLE"}, "condition is 3; it must be a condition such as"),
        ({"condition": 5}, "condition is 5; it must be a condition such as"),
        ({"condition": f"{EVENTS}.reward_at_least"}, "missing a required argument: 'threshold'"),
        ({"condition": {"path": "x"}}, "condition is {'path': 'x'}; it must be a condition"),
        ({"condition": {**at_least(1.0), "init_args": {"value": 1}}}, "RewardAtLeast has no argument 'value'"),
        ({"condition": at_least(float("nan"))}, "threshold is nan; it must be a finite number"),
        ({"condition": at_least(1.0), "size": 3}, "EventTable has no argument 'size'"),
        ({}, "given neither condition nor events"),
        ({"condition": at_least(1.0), "name": "default"}, "taken twice"),
        ({"events": [{"history_length": 3}]}, "missing a required argument: 'condition'"),
    ],
)
def test_tables_that_cannot_be_built_are_refused_when_the_config_is_written(table: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        buffer(tables=[{"name": "goal", "history_length": 5, "capacity": 1000, **table}])


def test_tables_hold_what_a_plain_replay_holds_of_the_same_steps() -> None:
    tables = [
        {"name": "late", "condition": at_least(104.0), "history_length": 4, "capacity": 6},
        {"name": "even", "condition": f"{MINE}.first_number_is_even", "history_length": 2, "capacity": 50},
    ]
    ours = buffer(tables=tables, capacity=12)
    plain = recipes.event_tables(12, batch_size=1, tables=built(tables, "tables"), seed=0)
    converter = EpisodeConverter()
    calls = [  # two runners, whose fragments arrive by turns; one is sent twice
        [numbered("a", 3), numbered("b", 2, offset=100)],
        [numbered("b", 3, offset=100, start=2, lookback=1), numbered("a", 2, start=3, terminated=True)],
        [numbered("b", 3, offset=100, start=2, lookback=1), numbered("c", 4, offset=200)],
        [numbered("c", 1, offset=200, start=4, truncated=True), numbered("b", 4, offset=100, start=5, truncated=True)],
    ]
    for call in calls:
        ours.add(call)
        rows = converter.transitions(converter.flatten(call))
        assert rows is not None
        plain.extend_columns(rows)
    # b sends 101 to 104, then c 200 to 204, then b 105 to 108: the newest six
    assert rewards(plain, "late") == [203, 204, 105, 106, 107, 108]
    for name in ("default", "late", "even"):
        held, expected = ours.replay.table(name), plain.table(name)
        assert (held == expected).all(), name
    assert len(ours) == len(plain)


def test_histories_of_lost_runners_are_forgotten_and_no_rows_refused() -> None:
    tables = [{"name": "end", "condition": at_least(3.0), "history_length": 3, "capacity": 50}]
    lossy = buffer(tables=tables, capacity=1000)
    for number in range(300):  # none of them ends
        lossy.add(numbered(f"lost {number}", 2))
    lossy.add(numbered("kept", 2))
    lossy.add(numbered("kept", 2, start=2, terminated=True))
    assert rewards(lossy.replay, "end") == [1, 2, 3]
    assert lossy.replay.stats()["histories_forgotten"] == 301 - 128
    strict = buffer(tables=tables, forget_stale=False, max_trajectories=1)
    strict.add(numbered("a", 2))
    with pytest.raises(ValueError, match="2 episodes would run at once"):
        strict.add(numbered("b", 2))


def test_small_tables_wait_for_a_batch_and_shares_are_kept() -> None:
    end = {"condition": at_least(20.0), "history_length": 1, "capacity": 30}
    tables = [{"name": "follows", "share": 0.3, **end}, {"name": "given", "share": 0.2, "min_size": 3, **end}]
    waiting = buffer(tables=tables)
    waiting.add(numbered("a", 25))  # 5 events
    assert drawn_from(waiting, 10) == [7, 0, 3]  # 0.5 and 0.2, renormalised
    waiting.add(numbered("a", 5, start=25))
    assert drawn_from(waiting, 10) == [5, 3, 2]
    assert drawn_from(waiting, 40) == [29, 0, 11]  # fewer rows than a batch: what holds most is drawn from


def test_a_minimum_that_is_given_for_the_default_table_wins_over_the_batch() -> None:
    tables = [{"name": "end", "condition": at_least(20.0), "history_length": 1, "capacity": 30, "min_size": 3}]
    waiting = buffer(tables=tables, min_size=28)
    waiting.add(numbered("a", 25))  # 5 events
    assert drawn_from(waiting, 10) == [0, 10, 0]
    waiting.add(numbered("a", 3, start=25))
    for rows in (10, 40):
        assert drawn_from(waiting, rows) == [rows // 2, rows // 2, 0]
    assert waiting.replay.sampler.min_sizes["default"] == 28
    early = buffer(tables=tables, min_size=2)
    early.add(numbered("a", 2))
    assert drawn_from(early, 10) == [10, 0, 0]
    with pytest.raises(ValueError, match="min_size is 101 and the default table holds 100"):
        buffer(tables=tables, min_size=101)


def test_only_tables_with_a_share_say_how_many_rows_there_are_to_draw() -> None:
    """The default table has 25 rows and no share; five rows are fewer than a batch, and all there are."""
    tables = [{"name": "end", "condition": at_least(20.0), "history_length": 1, "capacity": 30}]
    alone = buffer(tables=tables, default_share=0.0)
    alone.add(numbered("a", 25))
    assert drawn_from(alone, 10) == [0, 10, 0]


def drawn_from(buffer: RecipeEpisodeReplayBuffer, rows: int) -> list[int]:
    batches = buffer.replay.sample
    drawn: list[TensorDict] = []
    buffer.replay.sample = lambda count: drawn.append(batches(count)) or drawn[0]  # type: ignore[method-assign]
    buffer.sample(num_items=rows)
    buffer.replay.sample = batches  # type: ignore[method-assign]
    return np.bincount(drawn[0]["table"].numpy(), minlength=3).tolist()


def test_td_errors_and_returns_over_several_steps() -> None:
    tables = [{"name": "end", "condition": at_least(8.0), "history_length": 3, "capacity": 30, "min_size": 1}]
    learned = buffer(tables=tables, priority_exponent=1.0)
    learned.add(numbered("a", 9, terminated=True))
    episodes = learned.sample(num_items=64, n_step=3, gamma=1.0)
    starts, returns = numbers(episodes), column(episodes, "get_rewards")
    assert returns.tolist() == [sum(range(int(start), min(int(start) + 3, 9))) for start in starts]
    assert (starts >= 6).mean() > 0.5
    learned.update_priorities(np.where(starts == 4, 100.0, 0.0))
    assert (numbers(learned.sample(num_items=64)) == 4).sum() == 32  # its share; the rows of the other table are others


def test_a_condition_alone_in_events_is_an_event() -> None:
    path = f"{EVENTS}.reward_at_least"
    alone = [{"class_path": path, "init_args": {"threshold": 1.0}}, f"{MINE}.first_number_is_even"]
    (table,) = built([{"name": "goal", "events": alone, "capacity": 500}], "tables")
    assert [type(event).__name__ for event in table.events] == ["Event", "Event"]
    assert repr(table.events[0].condition) == "reward_at_least(1.0)" and callable(table.events[1].condition)
