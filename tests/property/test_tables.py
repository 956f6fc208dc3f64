# SPDX-License-Identifier: Apache-2.0
"""Tables of counted references against lists of step numbers."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay import load_replay, recipes
from lightning_replay.events import Event, EventTable
from lightning_replay.schedulers import OneTask, UniformTasks
from lightning_replay.table_replay import TableReplay
from tests.event_steps import IsTrue, event_steps
from tests.table_oracle import TableOracle

EVENTS = ("a", "b")
steps = st.tuples(st.integers(0, 2), st.sets(st.sampled_from(EVENTS)), st.integers(0, 5))


@st.composite
def event_table(draw, name: str) -> tuple[str, tuple[int, list[tuple[str, int]]]]:
    events = [
        (event, draw(st.integers(1, 6))) for event in draw(st.lists(st.sampled_from(EVENTS), min_size=1, unique=True))
    ]
    return name, (draw(st.integers(max(length for _, length in events), 9)), events)


def contents(replay: TableReplay, table: str) -> list[int]:
    return replay.table(table)["action"].tolist()


def rows_of(given: list[tuple[int, set[str], int]], first: int) -> TensorDict:
    rows = event_steps(first, len(given), {place: true for place, (_, true, _) in enumerate(given)}, EVENTS)
    rows["trajectory"] = torch.tensor([trajectory for trajectory, _, _ in given])
    for flag in ("terminated", "done"):
        rows["next", flag] = torch.tensor([[end == 0] for _, _, end in given])
    return rows


def check_same(replay: TableReplay, oracle: TableOracle) -> None:
    assert contents(replay, "default") == oracle.default
    for name, content in oracle.contents.items():
        assert contents(replay, name) == content
    references = replay.tables.references
    alive = references.nonzero()[0]
    numbers = replay.storage.get(torch.from_numpy(alive))["action"].tolist()
    assert dict(zip(numbers, references[alive].tolist(), strict=True)) == dict(oracle.references())
    assert len(replay) == len(oracle.references())
    free = replay.tables.state_dict()["slots"]["free"].tolist()
    assert sorted([*free, *alive.tolist()]) == list(range(replay.capacity)), "every slot is free or referred to, once"


@pytest.mark.slow
@settings(max_examples=80)
@given(
    capacity=st.integers(1, 8),
    tables=st.tuples(event_table("first"), event_table("second")),
    calls=st.lists(st.lists(steps, min_size=1, max_size=12), min_size=1, max_size=8),
    saved_after=st.integers(0, 7),
)
def test_event_tables_hold_what_plain_lists_hold(capacity, tables, calls, saved_after) -> None:
    oracle = TableOracle(capacity, dict(tables))
    replay = recipes.event_tables(
        capacity=capacity,
        batch_size=1,
        max_trajectories=3,
        check_continuity=False,  # the rows of an episode have any observations here
        tables=[
            EventTable(name, events=[Event(IsTrue(event), length) for event, length in events], capacity=most)
            for name, (most, events) in tables
        ],
    )
    first = 0
    for number, call in enumerate(calls):
        index = replay.extend(rows_of(call, first))
        for place, (trajectory, true, end) in enumerate(call):
            oracle.add(first + place, trajectory, true, end == 0)
        first += len(call)
        check_same(replay, oracle)
        assert replay.storage.get(index)["action"].tolist() == oracle.default[-len(index) :]
        if number == saved_after:
            with tempfile.TemporaryDirectory() as directory:
                replay.save(directory)
                replay = load_replay(directory, trust=["tests"], end_episodes=False)
            check_same(replay, oracle)


@settings(max_examples=40)
@given(
    capacity=st.integers(1, 5),
    calls=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6),
    shared=st.booleans(),
)
def test_task_tables_hold_what_plain_lists_hold(capacity, calls, shared) -> None:
    tasks = ["target", "far", "near"]
    scheduler = OneTask("target") if shared else UniformTasks()
    replay = recipes.parallel_curriculum(tasks, capacity, batch_size=1, scheduler=scheduler)
    expected: dict[str, list[int]] = {name: [] for name in replay.tables.names}
    first = 0
    for call in calls:
        rows = event_steps(first, len(call), {}, [])
        rows["task"] = torch.tensor(call)
        replay.extend(rows)
        for place, task in enumerate(call):
            name = "all tasks" if shared else tasks[task]
            most = 3 * capacity if shared else capacity
            expected[name] = [*expected[name], first + place][-most:]
        first += len(call)
        for name, content in expected.items():
            assert contents(replay, name) == content
        assert len(replay) == sum(map(len, expected.values()))
