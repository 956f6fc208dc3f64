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
from lightning_replay.saving.states import join_state, split_state
from lightning_replay.storage import frame_pool as pool_module
from lightning_replay.storage.frame_pool import NumbaSearch, TorchSearch
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.storage.occupancy import SlotSet
from tests.frame_steps import IMAGE_KEYS, Stacks, distinct, frame_rows, of_wrist, stacks_in, stacks_of
from tests.table_oracle import TableOracle

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
    image_key = IMAGE_KEYS[0]

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pool_module, "NumbaSearch", self.search)
        self.storage = FrameStorage(SLOTS, DEPTH, self.image_key, frame_capacity=ROOM)
        self.held: list[Stacks | None] = [None] * SLOTS

    def teardown(self) -> None:
        self.patch.undo()

    @rule(stacks=ROWS, data=st.data())
    def write(self, stacks: list[Stacks], data: st.DataObject) -> None:
        stacks = stacks[:SLOTS]
        slots = data.draw(st.permutations(range(SLOTS)))[: len(stacks)]
        rows = frame_rows(stacks, trajectory=data.draw(st.integers(0, 2)), key=self.image_key)
        staying = [both for slot, both in enumerate(self.held) if both and slot not in slots]
        fits = distinct([*staying, *stacks], self.image_key) <= ROOM
        if data.draw(st.booleans()):
            assert (self.storage.frames_missing(self.storage.checked_values(rows), torch.tensor(slots)) == 0) == fits
            everything = [both for both in self.held if both]
            assert (self.storage.frames_missing(self.storage.checked_values(rows)) == 0) == (
                distinct([*everything, *stacks], self.image_key) <= ROOM
            )
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
        again = FrameStorage(SLOTS, DEPTH, self.image_key, frame_capacity=ROOM)
        if into_used:
            again.set(slice(0, 2), frame_rows([((7, 8), (8, 9)), ((1, 1), (1, 2))], trajectory=5, key=self.image_key))
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
            rows = self.storage.get(torch.tensor(slots))
            assert stacks_in(rows, self.image_key) == [self.held[slot] for slot in slots]
        assert self.storage.num_stored <= len(self.storage)

    @invariant()
    def each_frame_is_held_once_and_counted(self) -> None:
        rows = [both for both in self.held if both]
        assert self.storage.frames_held == distinct(rows, self.image_key)
        for images, shown in zip(self.storage._images or (), (rows, of_wrist(rows)), strict=False):
            self.check_pool(images.pool, shown)

    @staticmethod
    def check_pool(pool: pool_module.FramePool, rows: list[Stacks]) -> None:
        counts = Counter(number for both in rows for stack in both for number in stack)
        assert sorted(counts.values()) == sorted(pool.references[pool.references > 0].tolist())
        assert pool.num_free == ROOM - len(counts)
        assert sorted(pool._free[: pool.num_free].tolist()) == (np.flatnonzero(pool.references[1:] == 0) + 1).tolist()
        hashes, heads, following = pool._index
        chained: set[int] = set()
        for bucket, frame in enumerate(heads.tolist()):
            while frame:
                assert int(hashes[frame]) & (len(heads) - 1) == bucket
                chained.add(frame)
                frame = int(following[frame])
        assert set(np.flatnonzero(pool.references).tolist()) <= chained

    @precondition(lambda self: isinstance(self.storage.occupancy, SlotSet))
    @invariant()
    def the_slots_held_are_those_that_hold_a_row(self) -> None:
        assert self.storage.occupancy.slots().tolist() == [slot for slot, both in enumerate(self.held) if both]


class CollidingMachine(StorageMachine):
    """Every frame has the same hash."""

    class search(TorchSearch):
        def hash_each(self, frames: torch.Tensor) -> np.ndarray:
            return np.full(len(frames), -5)


class CompiledMachine(StorageMachine):
    """With the search of a CPU."""

    search = NumbaSearch


class TwoCamerasMachine(CompiledMachine):
    """With two columns of stacks, of different shapes."""

    image_key = IMAGE_KEYS[1]


CHECKS = settings(max_examples=40, stateful_step_count=20, deadline=None)
for machine in (StorageMachine, CollidingMachine, CompiledMachine, TwoCamerasMachine):
    machine.TestCase.settings = CHECKS
TestTorch = pytest.mark.slow(StorageMachine.TestCase)
TestColliding = pytest.mark.slow(CollidingMachine.TestCase)
TestCompiled = pytest.mark.slow(CompiledMachine.TestCase)
TestTwoCameras = pytest.mark.slow(TwoCamerasMachine.TestCase)
CAMERAS = st.sampled_from(IMAGE_KEYS)

# Environments side by side: rows of several trajectories, shuffled together in pieces.
BATCHES = st.lists(st.lists(EPISODES, min_size=1, max_size=3), min_size=1, max_size=5)


def side_by_side(episodes: list[list[Stacks]]) -> tuple[list[Stacks], list[int]]:
    """Rows of several environments as a vectorised collector gives them: a step of each in turn."""
    longest = max(map(len, episodes))
    picked = [(name, step) for step in range(longest) for name, rows in enumerate(episodes) if step < len(rows)]
    return [episodes[name][step] for name, step in picked], [name for name, _ in picked]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(DEPTH + 1, 12), st.integers(2 * DEPTH, 14), st.integers(1, 30), st.booleans(), CAMERAS)
def test_a_ring_keeps_the_newest_rows_whose_frames_fit(batches, capacity, room, at_once, prioritized, key) -> None:
    recipe = recipes.prioritized if prioritized else recipes.uniform
    replay = recipe(capacity, 1, frame_stack=DEPTH, image_key=key, frame_capacity=room, seed=0)
    oracle: list[Stacks] = []
    written = 0
    for episodes in batches:
        stacks, names = side_by_side(episodes)
        for start in range(0, len(stacks), at_once):
            part = stacks[start : start + at_once]
            rows = frame_rows(part, first=written, trajectory=names[start : start + at_once], key=key)
            index = replay.extend(rows)
            written += len(part)
            for both in part:  # one at a time, which batches of any size must equal
                oracle.append(both)
                while len(oracle) > capacity or distinct(oracle, key) > room:
                    oracle.pop(0)
            assert len(index) == min(len(part), len(oracle))
            assert stacks_in(replay.storage.get(index), key) == part[len(part) - len(index) :]
    slots = replay.storage.occupancy.slots()
    slots = slots[replay.writer.age_of(slots).argsort(descending=True)]
    stored = replay.storage.get(slots)
    assert stacks_in(stored, key) == oracle and len(replay) == len(oracle)
    assert stored["action"].tolist() == list(range(written - len(oracle), written))
    assert replay.storage.frames_held == distinct(oracle, key)
    drawn = replay.sample(64)
    for number, both in zip(drawn["action"].tolist(), stacks_in(drawn, key), strict=True):
        assert oracle[number - written + len(oracle)] == both


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(8, 14), st.integers(2 * DEPTH, 14), st.integers(1, 30), CAMERAS, st.data())
def test_returns_drawn_from_a_ring_end_with_the_stack_of_their_last_step(batches, capacity, room, at_once, key, data):
    frames = {"frame_stack": DEPTH, "image_key": key, "frame_capacity": room}
    replay = recipes.uniform(capacity, 1, n_steps=3, discount=0.5, check_continuity=False, seed=0, **frames)
    oracle: list[tuple[int, int, Stacks, bool]] = []  # number, trajectory, stacks, done
    written = trajectories = 0
    for episodes in batches:
        stacks, names = side_by_side(episodes)
        done = [names[place] not in names[place + 1 :] and data.draw(st.booleans()) for place in range(len(names))]
        for start in range(0, len(stacks), at_once):
            part = slice(start, start + at_once)
            names_now = [trajectories + name for name in names[part]]
            rows = frame_rows(stacks[part], first=written, trajectory=names_now, key=key)
            for name in ("done", "terminated"):
                rows["next", name] = torch.tensor(done[part]).unsqueeze(1)
            replay.extend(rows)
            for both, name, is_done in zip(stacks[part], names_now, done[part], strict=True):
                oracle.append((written, name, both, is_done))
                written += 1
                while len(oracle) > capacity or distinct([row[2] for row in oracle], key) > room:
                    oracle.pop(0)
        trajectories += len(episodes)
    batch = replay.sample(48)
    numbers = [row[0] for row in oracle]
    for place, number in enumerate(batch["action"].tolist()):
        steps: list[tuple[int, int, Stacks, bool]] = []
        for row in oracle[numbers.index(number) :]:
            if row[1] == oracle[numbers.index(number)][1] and len(steps) < 3 and not (steps and steps[-1][3]):
                steps.append(row)
        assert stacks_in(batch[place : place + 1], key) == [(steps[0][2][0], steps[-1][2][1])]
        assert int(batch["steps_to_next_obs"][place]) == len(steps)
        assert float(batch["next", "reward"][place]) == sum(0.5**later * row[0] for later, row in enumerate(steps))


def is_event(rows) -> torch.Tensor:
    return rows["action"] % 4 == 3


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(4, 30), st.integers(1, 30), st.sampled_from(["events", "tasks"]), st.booleans(), CAMERAS)
def test_tables_keep_the_frames_of_their_rows_alone(batches, room, at_once, kind, prioritized, key) -> None:
    options = {"frame_stack": DEPTH, "frame_capacity": room, "priority_exponent": float(prioritized), "seed": 0}
    options["image_key"] = key
    if kind == "events":
        table = EventTable("event", condition=is_event, history_length=3, capacity=4, min_size=1)
        replay = recipes.event_tables(6, 1, tables=[table], max_trajectories=8, check_continuity=False, **options)
    else:
        replay = recipes.parallel_curriculum(["a", "b"], 4, 1, min_size=1, check_continuity=False, **options)
    given_rows: list[Stacks] = []
    appended = 0
    for episodes in batches:
        stacks, names = side_by_side(episodes)
        for start in range(0, len(stacks), at_once):
            part = stacks[start : start + at_once]
            names_now = names[start : start + at_once]
            rows = frame_rows(part, first=len(given_rows), trajectory=names_now, key=key)
            replay.extend(rows.set("task", torch.tensor(names_now) % 2) if kind == "tasks" else rows)
            given_rows += part
            appended += len(part)
            check_tables(replay, given_rows, key)
    if replay.storage.frames_held and distinct(given_rows, key) <= room:  # then nothing left early
        tables = replay.tables
        assert (tables.length == np.minimum(tables.appended, tables.capacity)).all()


def check_tables(replay, given_rows: list[Stacks], key="pixels") -> None:
    tables, storage = replay.tables, replay.storage
    held = torch.from_numpy(np.flatnonzero(tables.references))
    rows = storage.get(held)
    numbers = rows["action"].tolist()
    assert stacks_in(rows, key) == [given_rows[number] for number in numbers]
    assert storage.frames_held == distinct([given_rows[number] for number in numbers], key) <= storage.frame_capacity
    for table, name in enumerate(tables.names):
        if tables.length[table]:
            actions = replay.table(name)["action"].tolist()
            assert actions == sorted(actions) or name == "event"
    batch = replay.sample(16)
    assert set(batch["action"].tolist()) <= set(numbers)
    assert stacks_in(batch, key) == [given_rows[number] for number in batch["action"].tolist()]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(2 * DEPTH, 20), st.integers(1, 30))
def test_the_oldest_rows_leave_the_fullest_table_of_tasks(batches, room, at_once) -> None:
    capacity = 4
    options = {"frame_stack": DEPTH, "frame_capacity": room, "min_size": 1, "seed": 0}
    replay = recipes.parallel_curriculum(["a", "b"], capacity, 1, **options)
    oracle: dict[int, list[tuple[int, Stacks]]] = {0: [], 1: []}
    written = 0
    for episodes in batches:
        stacks, names = side_by_side(episodes)
        for start in range(0, len(stacks), at_once):
            part, tasks = stacks[start : start + at_once], [name % 2 for name in names[start : start + at_once]]
            rows = frame_rows(part, first=written)
            index = replay.extend(rows.set("task", torch.tensor(tasks)))
            new = [(written + place, both, task) for place, (both, task) in enumerate(zip(part, tasks, strict=True))]
            written += len(new)
            # Of more rows than a table takes the last ones; and as many together as fit whatever their frames are.
            new = [row for row in new if sum(row[0] < later[0] and row[2] == later[2] for later in new) < capacity]
            together = min(2 * capacity, room // (2 * DEPTH))
            for first in range(0, len(new), together):
                add_to_tables(oracle, new[first : first + together], capacity, room)
            kept = {number for table in oracle.values() for number, _ in table}
            assert replay.storage.get(index)["action"].tolist() == [row[0] for row in new if row[0] in kept]
    for task, name in enumerate("ab"):
        if oracle[task]:
            table = replay.table(name)
            assert list(zip(table["action"].tolist(), stacks_in(table), strict=True)) == oracle[task]
    assert replay.tables.length.tolist() == [len(table) for table in oracle.values()]
    assert replay.storage.frames_held == distinct(both for table in oracle.values() for _, both in table)


def add_to_tables(oracle, new: list[tuple[int, Stacks, int]], capacity: int, room: int) -> None:
    """Appends rows to the tables of their tasks; then the fullest gives up its oldest one until the frames fit."""
    for number, both, task in new:
        oracle[task] = [*oracle[task], (number, both)][-capacity:]
    first = new[0][0]
    while distinct(both for table in oracle.values() for _, both in table) > room:
        with_old = [task for task, table in oracle.items() if table and table[0][0] < first]
        del oracle[max(with_old, key=lambda task: len(oracle[task]))][0]


class FrameTableOracle(TableOracle):
    """With one event table, and room for so many frames; ``stacks`` are those of the numbered steps."""

    def __init__(self, capacity: int, event_capacity: int, history_length: int, room: int) -> None:
        super().__init__(capacity, {"event": (event_capacity, [("event", history_length)])})
        self.event_capacity, self.room = event_capacity, room
        self.stacks: list[Stacks] = []

    def make_room(self) -> None:
        while distinct(self.stacks[number] for number in self.references()) > self.room:
            event = self.contents["event"]
            default_share = len(self.default) / self._capacity if len(self.default) > 1 else 0.0  # the new step stays
            if default_share or event:
                leaves_default = default_share >= len(event) / self.event_capacity
                del (self.default if leaves_default else event)[0]
            else:
                next(steps for steps in self._episodes.values() if steps).clear()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(2 * DEPTH, 14), st.data())
def test_event_tables_and_histories_give_up_steps_one_by_one(batches, room, data) -> None:
    table = EventTable("event", condition=is_event, history_length=3, capacity=4, min_size=1)
    options = {"frame_stack": DEPTH, "frame_capacity": room, "seed": 0}
    replay = recipes.event_tables(5, 1, tables=[table], max_trajectories=16, check_continuity=False, **options)
    oracle = FrameTableOracle(5, 4, 3, room)
    trajectories = 0
    for episodes in batches:
        stacks, names = side_by_side(episodes)
        for place, (both, name) in enumerate(zip(stacks, names, strict=True)):
            number, done = len(oracle.stacks), name not in names[place + 1 :] and data.draw(st.booleans())
            oracle.stacks.append(both)
            oracle.add(number, trajectories + name, {"event"} if number % 4 == 3 else set(), done)
            replay.extend(frame_rows([both], first=number, trajectory=trajectories + name, done=done))
            assert replay.tables.length.tolist() == [len(oracle.default), len(oracle.contents["event"])]
            assert replay.storage.frames_held == distinct(oracle.stacks[step] for step in oracle.references())
        trajectories += len(episodes)
        for content, held in (("default", oracle.default), ("event", oracle.contents["event"])):
            if held:
                rows = replay.table(content)
                assert rows["action"].tolist() == held
                assert stacks_in(rows) == [oracle.stacks[number] for number in held]
    assert len(replay) == len(oracle.references())
