# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from lightning_replay import PackedStorage, recipes
from lightning_replay.events import (
    Event,
    EventTable,
    every_of,
    first_in_episode,
    info_key,
    key_in_region,
    reward_at_least,
    sustained,
)
from lightning_replay.samplers.tables import TableShares
from lightning_replay.table_replay import TableReplay
from lightning_replay.writers.tables import EventTableWriter
from tests.attack.states import fingerprint
from tests.event_steps import IsTrue, event_steps
from tests.transitions import connected, numbered_steps

CASES = json.loads((Path(__file__).parents[2] / "fixtures" / "sset_table_contents.json").read_text())["cases"]


def ids(replay: TableReplay, table: str) -> list[int]:
    return replay.table(table)["observation"].flatten().tolist()


def goal_table(**options) -> EventTable:
    return EventTable("goal", **{"condition": reward_at_least(1.0), "history_length": 3, "capacity": 10} | options)


@pytest.mark.parametrize("rows_per_call", [1, 3, 100])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_tables_hold_what_the_fixture_says(case, rows_per_call: int) -> None:
    given = case["inputs"]
    by_table: dict[str, list[Event]] = {}
    for spec in given["event_specs"]:
        event = Event(IsTrue(spec["event"]), spec["history_length_incl_event_step"])
        by_table.setdefault(spec["table"], []).append(event)
    tables = [EventTable(name, events=events, capacity=100) for name, events in by_table.items()]
    for table in tables:
        # Set afterwards: one case has a history longer than its table, which EventTable itself refuses.
        table.capacity = given["table_capacities"][table.name]
    replay = recipes.event_tables(capacity=given["default_capacity"], batch_size=1, tables=tables)
    names = [spec["event"] for spec in given["event_specs"]]
    first = 0
    for episode, expected in zip(given["episodes"], case["expected"], strict=True):
        events = {step: set(true) for step, true in episode["events_true_in_next_state"]}
        rows = event_steps(first, episode["steps"], events, names)
        for start in range(0, episode["steps"], rows_per_call):
            replay.extend(rows[start : start + rows_per_call])
        first += episode["steps"]
        assert ids(replay, "default") == expected["default"]
        for name, content in expected["tables"].items():
            assert ids(replay, name) == content


def test_an_interrupted_episode_is_forgotten() -> None:
    replay = recipes.event_tables(capacity=10, batch_size=1, tables=[goal_table(condition=IsTrue("goal"))])
    slots = replay.extend(event_steps(0, 2, {}, ["goal"], ends=False))
    replay.end_episodes(slots=slots[-1:], generation=replay.storage.generation_of(slots[-1:]))
    replay.extend(event_steps(2, 1, {0: {"goal"}}, ["goal"]))
    assert ids(replay, "goal") == [2]
    assert bool(replay.table("default")["next", "truncated"][1])


def unchanged_by(replay: TableReplay, rows: TensorDict, error: type[Exception], message: str) -> None:
    before = len(replay)
    with pytest.raises(error, match=message):
        replay.extend(rows)
    assert len(replay) == before


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (lambda steps: steps["next", "reward"] + 1, "event table 'goal'.*float32"),
        (lambda steps: steps["no such column"], "event table 'goal'.*raised"),
        (lambda steps: steps["next", "reward"].add_(1) > 5, "event table 'goal'.*changed a column"),
        (lambda steps: steps.set("mark", steps["next", "done"])["mark"], "event table 'goal'.*lock"),
    ],
)
def test_a_bad_condition_is_named_and_nothing_is_stored(condition, message: str) -> None:
    replay = recipes.event_tables(capacity=10, batch_size=1, tables=[goal_table(condition=condition)])
    unchanged_by(replay, event_steps(0, 4, {}, []), ValueError, message)


def test_a_refused_batch_leaves_what_other_conditions_remember() -> None:
    """The second condition refuses the second call; the stretch that the first follows goes on as before."""
    refuses = [False]

    def refuse(steps):
        return steps["missing"] if refuses[0] else steps["next", "goal"]

    tables = [
        EventTable("held", condition=sustained(IsTrue("goal"), steps=2), history_length=1, capacity=10),
        EventTable("other", condition=refuse, history_length=1, capacity=10),
    ]
    replay = recipes.event_tables(capacity=10, batch_size=1, tables=tables)
    replay.extend(event_steps(0, 1, {0: {"goal"}}, ["goal"], ends=False))
    refuses[0] = True
    unchanged_by(replay, event_steps(1, 1, {0: {"goal"}}, ["goal"], ends=False), ValueError, "missing")
    refuses[0] = False
    replay.extend(event_steps(1, 1, {0: {"goal"}}, ["goal"], ends=False))
    assert ids(replay, "held") == [1]


def test_a_condition_that_is_always_true_is_warned_of_with_its_share() -> None:
    always = goal_table(condition=lambda steps: steps["next", "reward"] >= 0)
    replay = recipes.event_tables(capacity=10, batch_size=1, tables=[always])
    with pytest.warns(UserWarning, match="'goal' is true on 100% of all steps"):
        replay.extend(event_steps(0, 1_000, {}, []))


@pytest.mark.parametrize("as_columns", [False, True])
def test_conditions_that_are_never_true_are_warned_of_once_each(as_columns: bool) -> None:
    """Of as many rows as the table keeps; while no episode has ended, at the next table's, or of twice as many rows."""
    tables = [
        EventTable("goal", reward_at_least(1e6), history_length=2, capacity=5),
        EventTable("late", key_in_region("observation", low=1e6), history_length=2, capacity=1_500),
        EventTable("both", events=[Event(reward_at_least(900.0), 2), Event(info_key("never"), 2)], capacity=50),
    ]
    replay = recipes.event_tables(capacity=4_000, batch_size=1, tables=tables)

    def extend(first: int, ends: bool) -> list[str]:
        steps = numbered_steps(first, 500, done_every=100 if ends else 0)
        steps["next", "never"] = torch.zeros(500, dtype=torch.bool)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for rows in steps.split(50):
                if as_columns:
                    replay.extend_columns(dict(rows.items(True, True)))
                else:
                    replay.extend(rows)
        return [str(one.message) for one in heard if "event table" in str(one.message)]

    assert not extend(0, ends=False)
    assert not extend(500, ends=False)  # nothing is known of the ends of episodes
    before = replay.state_dict()
    goal, late, both = extend(1_000, ends=True)
    assert "event table 'late', key_in_region('observation'" in late
    assert "stored values of component 0 of 'observation' are 0 to 1499. If" in late
    assert "event table 'goal', reward_at_least(1000000.0) was true at none of 1,500 steps" in goal
    assert "stored values of ('next', 'reward') are 0 to 1499. If" in goal
    assert "event table 'both', info_key('never', at_least=0.5)" in both  # of its two events this one alone
    assert "stored values of ('next', 'never') are 0 to 0. If" in both
    after = replay.state_dict()
    assert not extend(1_500, ends=True)
    for state, expected in ((after, []), (before, [goal, late, both])):
        replay = recipes.event_tables(capacity=4_000, batch_size=1, tables=tables)
        replay.load_state_dict(state)
        assert [one for first in range(1_000, 3_000, 500) for one in extend(first, ends=True)] == expected


def test_a_warning_says_what_a_condition_looks_at() -> None:
    corners = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    steps = numbered_steps(0, 1_000, done_every=10)
    steps["observation"] = corners.repeat(500, 1)
    conditions = {
        "alone reaches its bounds": key_in_region("observation", low=1.0),
        "component 1 of 'observation' are 0 to 1": first_in_episode(key_in_region("observation", [None, 2.0])),
        "'reward') are 0 to 999": every_of(lambda steps: steps["next", "reward"].flatten() < 0),
    }
    for message, condition in conditions.items():
        table = EventTable("goal", condition=condition, history_length=1, capacity=5)
        replay = recipes.event_tables(1_000, 1, tables=[table], check_continuity=False)
        with pytest.warns(UserWarning, match=re.escape(message)) as heard:
            replay.extend(steps)
        assert len(heard) == 1


@pytest.mark.parametrize("history_length", [1, 4])
def test_what_is_remembered_of_abandoned_episodes_is_bounded(history_length: int) -> None:
    """300 episodes begin, two at a time, and none ends; of the last three the histories and the conditions know."""
    goal = IsTrue("goal")
    condition = every_of(first_in_episode(goal), sustained(goal, 3))
    table = goal_table(condition=condition, history_length=history_length, capacity=9, min_size=1)
    replay = recipes.event_tables(10, 1, tables=[table], max_trajectories=3, forget_stale=True)
    for first in range(0, 300, 2):
        rows = event_steps(first, 2, {0: {"goal"}, 1: {"goal"}}, ["goal"], ends=False)
        rows["trajectory"] = torch.arange(first, first + 2)
        replay.extend(rows)
    state = replay.state_dict()["writer"]
    assert state["histories"]["trajectory"].tolist() == [297, 298, 299]
    for part in state["conditions"][0]["conditions"]:
        assert part["trajectory"].tolist() == [297, 298, 299]
    assert replay.stats()["histories_forgotten"] == 297
    assert len(replay) <= 10 + 3 * (history_length - 1) + 9


def test_room_for_episodes_is_needed_in_the_middle_of_rows_that_are_written_in_parts() -> None:
    """Three episodes run over steps 0 to 2 and end at 3 to 5; the default table takes 3 rows at a time."""
    rows = event_steps(0, 6, {}, ["goal"], ends=False)
    rows["trajectory"] = torch.tensor([0, 1, 2, 0, 1, 2])
    connected(rows)
    rows["next", "done"][3:] = True
    options = {"capacity": 3, "batch_size": 1, "tables": [goal_table(condition=IsTrue("goal"))]}
    replay = recipes.event_tables(**options, max_trajectories=2)
    unchanged_by(replay, rows, ValueError, "3 episodes would run at once")
    assert len(recipes.event_tables(**options, max_trajectories=3).extend(rows)) == 3


def test_rows_without_what_lemma_2_counts_are_refused_and_nothing_is_stored() -> None:
    tables = [goal_table(condition=IsTrue("goal"))]
    replay = recipes.event_tables(capacity=10, batch_size=1, tables=tables, correction="lemma2")
    unchanged_by(replay, event_steps(0, 4, {}, ["goal"]).exclude("action"), ValueError, "no column.*action")


def test_rows_that_a_condition_refuses_fix_no_columns() -> None:
    replay = recipes.event_tables(capacity=10, batch_size=1, tables=[goal_table(condition=IsTrue("goal"))])
    unchanged_by(replay, event_steps(0, 4, {}, []), ValueError, "goal")
    flags = event_steps(0, 4, {}, ["goal"]).set(("next", "done"), torch.zeros(4, 1))
    unchanged_by(replay, flags, ValueError, "'done'.*is float32; flags of ends must be bool")
    assert len(replay.extend(event_steps(0, 4, {}, ["goal"]))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_share": 0.5, "tables": [goal_table(share=0.6)]}, "table_shares sums to 1.1"),
        ({"default_share": 0.5, "tables": [goal_table(share=0.5), EventTable("gap", bool, 3, capacity=9)]}, "leave 0"),
        ({"tables": [goal_table(), goal_table()]}, "'goal'.*taken twice"),
        ({"tables": [EventTable("default", bool, 3, capacity=9)]}, "'default'.*taken twice"),
        ({"tables": []}, "at least one EventTable"),
        ({"tables": [goal_table()], "min_size": 11}, "min_size is 11 .* 10 rows at most: it can never fill"),
        ({"tables": [goal_table(share=0.0)], "default_share": 1.0, "correction": "continuous"}, "all tables at once"),
        ({"tables": [goal_table()], "batch_size": 500}, "below batch_size 500"),
    ],
)
def test_bad_options_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipes.event_tables(**{"capacity": 10, "batch_size": 1} | options)


def test_torchrls_own_buffer_works_with_writer_and_sampler() -> None:
    writer = EventTableWriter(10, [goal_table(condition=IsTrue("goal"))])
    replay = TensorDictReplayBuffer(
        storage=PackedStorage(writer.num_slots),
        writer=writer,
        sampler=TableShares({"default": 0.5, "goal": 0.5}, seed=0),
        batch_size=4,
    )
    replay.extend(event_steps(0, 6, {5: {"goal"}}, ["goal"]))
    batch = replay.sample()
    assert batch["table"].tolist() == [0, 0, 1, 1]
    assert set(batch["observation"][2:].flatten().tolist()) <= {3.0, 4.0, 5.0}


def test_emptied_tables_start_anew() -> None:
    replay = recipes.event_tables(capacity=10, batch_size=1, tables=[goal_table(condition=IsTrue("goal"))], seed=0)
    replay.extend(event_steps(0, 6, {5: {"goal"}}, ["goal"], ends=False))
    replay.empty()
    assert len(replay) == 0 and replay.stats()["tables"]["goal"]["size"] == 0
    replay.extend(event_steps(6, 2, {1: {"goal"}}, ["goal"]))
    assert ids(replay, "goal") == [6, 7]


FORGED_NUMBERS = [
    *[(("tables", "slots", "free"), value) for value in (2**44, -1, 0)],
    *[(("tables", "slots", "references"), value) for value in (-1, 2)],
    *[(("tables", "entries"), value) for value in (2**44, -1)],
    *[(("tables", "appended"), value) for value in (-(2**63) + 10, 2**62, 0)],
    *[(("tables", "first"), value) for value in (-(2**55), 2**62)],
    *[(("tables", "written_at"), value) for value in (2**62, -1)],
    *[(("histories", "slots"), value) for value in (2**44, -1, 0)],
    *[(("histories", "length"), value) for value in (-1, 0, 3)],
]


@pytest.mark.parametrize(("path", "value"), FORGED_NUMBERS, ids=str)
def test_numbers_that_disagree_are_refused_before_compiled_loops_follow_them(path: tuple[str, ...], value: int) -> None:
    replay = recipes.event_tables(capacity=20, batch_size=4, tables=[goal_table()], seed=0)
    replay.extend(numbered_steps(0, 30))
    state, other = replay.state_dict(), recipes.event_tables(capacity=20, batch_size=4, tables=[goal_table()], seed=0)
    before = fingerprint(other.state_dict())
    inner = state["writer"]
    for key in path:
        inner = inner[key]
    assert len(inner) and inner[-1] != value
    inner[-1] = value
    with pytest.raises(ValueError, match=r"disagree|not those of its running episodes"):
        other.load_state_dict(state)
    assert fingerprint(other.state_dict()) == before
