# SPDX-License-Identifier: Apache-2.0
"""Stacks come back byte for byte and no frame is kept twice, whoever writes, releases, saves or loads."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_replay import recipes
from lightning_replay.events import EventTable
from lightning_replay.frames import FrameStorage
from lightning_replay.frames import pool as pool_module
from lightning_replay.frames.search import NumbaSearch, TorchSearch
from lightning_replay.state_files import join_state, split_state
from tests.frame_steps import Stacks, distinct, frame_rows, stacks_in, stacks_of

DEPTH = 2
SLOTS = 8
ROOM = 11

# Few numbers, so that frames of different episodes are equal now and then.
EPISODES = st.builds(stacks_of, st.lists(st.integers(0, 9), min_size=2, max_size=7), st.just(DEPTH), st.integers(1, 3))
ANY_STACK = st.tuples(*[st.integers(0, 9)] * DEPTH)
ROWS = st.one_of(EPISODES, st.lists(st.tuples(ANY_STACK, ANY_STACK), min_size=1, max_size=4))


class StorageMachine(RuleBasedStateMachine):
    """Rows anywhere, in any order; the oracle is a list of what each slot holds."""

    search: type = TorchSearch

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pool_module, "search_for", self.search)
        self.storage = FrameStorage(SLOTS, DEPTH, frame_capacity=ROOM)
        self.held: list[Stacks | None] = [None] * SLOTS

    def teardown(self) -> None:
        self.patch.undo()

    @rule(stacks=ROWS, data=st.data())
    def write(self, stacks: list[Stacks], data: st.DataObject) -> None:
        stacks = stacks[:SLOTS]
        slots = data.draw(st.permutations(range(SLOTS)))[: len(stacks)]
        rows = frame_rows(stacks, trajectory=data.draw(st.integers(0, 2)))
        staying = [both for slot, both in enumerate(self.held) if both and slot not in slots]
        fits = distinct([*staying, *stacks]) <= ROOM
        if data.draw(st.booleans()):
            assert self.storage.room_for(rows, torch.tensor(slots)) == fits
            everything = [both for both in self.held if both]
            assert self.storage.room_for(rows) == (distinct([*everything, *stacks]) <= ROOM)
        before = len(self.storage)
        if not fits:
            with pytest.raises(RuntimeError, match="frame_capacity"):
                self.storage.set(torch.tensor(slots), rows)
            assert len(self.storage) == before
            return
        self.storage.set(torch.tensor(slots), rows)
        for slot, both in zip(slots, stacks, strict=True):
            self.held[slot] = both

    @rule(slots=st.sets(st.integers(0, SLOTS - 1), max_size=4))
    def release(self, slots: set[int]) -> None:
        self.storage.release(torch.tensor(sorted(slots), dtype=torch.int64))
        for slot in slots:
            self.held[slot] = None

    @rule()
    def empty(self) -> None:
        self.storage._empty()
        self.held = [None] * SLOTS

    @rule(into_used=st.booleans())
    def save_and_load(self, into_used: bool) -> None:
        again = FrameStorage(SLOTS, DEPTH, frame_capacity=ROOM)
        if into_used:
            again.set(slice(0, 2), frame_rows([((7, 8), (8, 9)), ((1, 1), (1, 2))], trajectory=5))
        values, tensors = split_state(self.storage.state_dict())
        again.load_state_dict(join_state(values, {name: tensor.clone() for name, tensor in tensors.items()}))
        self.storage = again

    @rule()
    def copy(self) -> None:
        self.storage = copy.deepcopy(self.storage)

    @invariant()
    def every_row_comes_back(self) -> None:
        slots = [slot for slot, both in enumerate(self.held) if both]
        if slots:
            assert stacks_in(self.storage.get(torch.tensor(slots))) == [self.held[slot] for slot in slots]
        assert self.storage.num_held <= len(self.storage)

    @invariant()
    def each_frame_is_held_once_and_counted(self) -> None:
        rows = [both for both in self.held if both]
        assert self.storage.frames_held == distinct(rows)
        pool = self.storage._pool
        if pool is None:
            return
        counts = Counter(number for both in rows for stack in both for number in stack)
        assert sorted(counts.values()) == sorted(pool.references[pool.references > 0].tolist())
        assert pool.num_free == ROOM - len(counts)
        assert sorted(pool._free[: pool.num_free].tolist()) == (np.flatnonzero(pool.references[1:] == 0) + 1).tolist()
        chained = [frame for key in set(pool._index.hashes.tolist()) for frame in pool._index.chain(key)]
        assert set(np.flatnonzero(pool.references).tolist()) <= set(chained)

    @precondition(lambda self: self.storage.live_slots is not None)
    @invariant()
    def live_slots_are_those_that_hold_a_row(self) -> None:
        live = self.storage.live_slots
        assert live is not None
        assert sorted(live.slots.tolist()) == [slot for slot, both in enumerate(self.held) if both]


class CollidingMachine(StorageMachine):
    """Every frame has the same hash."""

    class search(TorchSearch):
        def hash_each(self, frames: torch.Tensor) -> np.ndarray:
            return np.full(len(frames), -5)


class CompiledMachine(StorageMachine):
    """With numba."""

    search = NumbaSearch


CHECKS = settings(max_examples=40, stateful_step_count=20, deadline=None)
StorageMachine.TestCase.settings = CollidingMachine.TestCase.settings = CompiledMachine.TestCase.settings = CHECKS
TestTorch = StorageMachine.TestCase
TestColliding = CollidingMachine.TestCase
try:
    import numba  # noqa: F401
except ImportError:
    pass
else:
    TestCompiled = CompiledMachine.TestCase

# Environments side by side: rows of several trajectories, shuffled together in pieces.
BATCHES = st.lists(st.lists(EPISODES, min_size=1, max_size=3), min_size=1, max_size=5)


def side_by_side(episodes: list[list[Stacks]]) -> tuple[list[Stacks], list[int]]:
    """Rows of several environments as a vectorised collector gives them: a step of each in turn."""
    longest = max(map(len, episodes))
    picked = [(name, step) for step in range(longest) for name, rows in enumerate(episodes) if step < len(rows)]
    return [episodes[name][step] for name, step in picked], [name for name, _ in picked]


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(DEPTH + 1, 12), st.integers(2 * DEPTH, 14), st.integers(1, 30), st.booleans())
def test_a_ring_keeps_the_newest_rows_whose_frames_fit(batches, capacity, room, at_once, prioritized) -> None:
    recipe = recipes.prioritized if prioritized else recipes.uniform
    replay = recipe(capacity, 1, frame_stack=DEPTH, frame_capacity=room, seed=0)
    oracle: list[Stacks] = []
    written = 0
    for episodes in batches:
        stacks, names = side_by_side(episodes)
        for start in range(0, len(stacks), at_once):
            part = stacks[start : start + at_once]
            rows = frame_rows(part, first=written, trajectory=names[start : start + at_once])
            index = replay.extend(rows)
            written += len(part)
            for both in part:  # one at a time, which batches of any size must equal
                oracle.append(both)
                while len(oracle) > capacity or distinct(oracle) > room:
                    oracle.pop(0)
            assert len(index) == min(len(part), len(oracle))
            assert stacks_in(replay.storage.get(index)) == part[len(part) - len(index) :]
    live = replay.storage.live_slots
    slots = torch.arange(len(replay.storage)) if live is None else live.state()
    slots = slots[replay.writer.age_of(slots).argsort(descending=True)]
    stored = replay.storage.get(slots)
    assert stacks_in(stored) == oracle and len(replay) == len(oracle)
    assert stored["action"].tolist() == list(range(written - len(oracle), written))
    assert replay.storage.frames_held == distinct(oracle)
    drawn = replay.sample(64)
    for number, both in zip(drawn["action"].tolist(), stacks_in(drawn), strict=True):
        assert oracle[number - written + len(oracle)] == both


def is_event(rows) -> torch.Tensor:
    return rows["action"] % 4 == 3


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(2 * DEPTH, 30), st.integers(1, 30), st.sampled_from(["events", "tasks"]), st.booleans())
def test_tables_keep_the_frames_of_their_rows_alone(batches, room, at_once, kind, prioritized) -> None:
    options = {"frame_stack": DEPTH, "frame_capacity": room, "priority_exponent": float(prioritized), "seed": 0}
    if kind == "events":
        table = EventTable("event", condition=is_event, history_length=3, capacity=4, min_size=1)
        replay = recipes.event_tables(6, 1, tables=[table], max_trajectories=8, **options)
    else:
        replay = recipes.parallel_curriculum(["a", "b"], 4, 1, min_size=1, **options)
    given_rows: list[Stacks] = []
    appended = 0
    for episodes in batches:
        stacks, names = side_by_side(episodes)
        for start in range(0, len(stacks), at_once):
            part = stacks[start : start + at_once]
            names_now = names[start : start + at_once]
            rows = frame_rows(part, first=len(given_rows), trajectory=names_now)
            replay.extend(rows.set("task", torch.tensor(names_now) % 2) if kind == "tasks" else rows)
            given_rows += part
            appended += len(part)
            check_tables(replay, given_rows)
    if replay.storage.frames_held and distinct(given_rows) <= room:  # then nothing left early
        tables = replay.tables
        assert (tables.length == np.minimum(tables.appended, tables.capacity)).all()


def check_tables(replay, given_rows: list[Stacks]) -> None:
    tables, storage = replay.tables, replay.storage
    held = torch.from_numpy(np.flatnonzero(tables.pool.references))
    rows = storage.get(held)
    numbers = rows["action"].tolist()
    assert stacks_in(rows) == [given_rows[number] for number in numbers]
    assert storage.frames_held == distinct([given_rows[number] for number in numbers]) <= storage.frame_capacity
    for table, name in enumerate(tables.names):
        if tables.length[table]:
            actions = replay.table(name)["action"].tolist()
            assert actions == sorted(actions) or name == "event"
    batch = replay.sample(16)
    assert set(batch["action"].tolist()) <= set(numbers)
    assert stacks_in(batch) == [given_rows[number] for number in batch["action"].tolist()]
