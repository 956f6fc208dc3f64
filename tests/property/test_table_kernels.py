# SPDX-License-Identifier: Apache-2.0
"""Loops over tables, compiled and in NumPy, change the same arrays in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.tables import numba_kernels, numpy_kernels
from lightning_replay.tables.arrays import EventArrays, HistoryArrays, groups_of
from lightning_replay.tables.tables import Tables

CAPACITIES = {"default": 5, "near": 3, "far": 7}
LENGTHS = [(0, 1), (0, 4), (1, 3)]  # table and history length of three events
rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 7)), min_size=1, max_size=5)


class World:
    """Tables and histories of three episodes, in rows 0, 1 and 2, changed by one back end."""

    def __init__(self, loops: Any) -> None:
        self.loops = loops
        self.tables = Tables(CAPACITIES, extra_slots=30)
        self.histories = HistoryArrays(np.zeros((3, 3), dtype=np.int64), np.zeros(3, dtype=np.int64))
        table, length = np.array(LENGTHS).T.copy()
        self.events = EventArrays(table, length, np.zeros((self.tables.num_slots, 2), dtype=bool))

    def add(self, given: list[tuple[int, int, int]]) -> tuple[np.ndarray, ...]:
        """Rows by episode, a 0 for an ended one, and a bit for each event."""
        trajectory, end, bits = np.array(given, dtype=np.int64).T.copy()
        happened = (bits >> np.arange(3)[:, None] & 1).astype(bool)
        groups, slots = groups_of(trajectory, end == 0), np.empty(len(given), dtype=np.int64)
        assert self.loops.append_new(self.tables.arrays, np.zeros(len(given), dtype=np.int64), slots) == 1
        held_in = groups.trajectory.copy()
        follow = self.loops.follow
        return slots, *follow(self.tables.arrays, happened, self.events, groups, slots, held_in, self.histories)

    def draw(self, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        number = np.array(counts) * (self.tables.length > 0)
        uniform = torch.rand(int(number.sum()), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
        table, slots = np.empty((2, len(uniform)), dtype=np.int64)
        self.loops.draw(self.tables.arrays, number, uniform, table, slots)
        return table, slots

    def check_draw(self, table: np.ndarray, slots: np.ndarray) -> None:
        held = [set(self.tables.slots_of(number).tolist()) for number in range(len(self.tables))]
        assert all(slot in held[number] for number, slot in zip(table.tolist(), slots.tolist(), strict=True))

    @property
    def arrays(self) -> list[np.ndarray]:
        return [*self.tables.arrays, *self.histories, self.events.sent]


@settings(max_examples=150)
@given(
    calls=st.lists(st.tuples(rows, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=10),
    counts=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_rows_that_lead_to_events(calls, counts) -> None:
    compiled, plain = World(numba_kernels), World(numpy_kernels)
    for given_rows, table, leaving in calls:
        results = [world.add(given_rows) for world in (compiled, plain)]
        for one, other in zip(*results, strict=True):
            assert one.tolist() == other.tolist()
        for world in (compiled, plain):
            if table < 3 and leaving <= world.tables.length[table]:
                world.tables.leave_early(table, leaving)
        check_same(compiled, plain)
        drawn = [world.draw(counts) for world in (compiled, plain)]
        assert [one.tolist() for one in drawn[0]] == [one.tolist() for one in drawn[1]]
        compiled.check_draw(*drawn[0])


@settings(max_examples=150)
@given(calls=st.lists(st.lists(st.integers(-1, 3), min_size=1, max_size=12), min_size=1, max_size=6), sends=st.data())
def test_rows_of_several_tables(calls, sends) -> None:
    compiled, plain = World(numba_kernels), World(numpy_kernels)
    for table in calls:
        fits = [
            world.loops.append_new(world.tables.arrays, np.array(table), np.empty(len(table), dtype=np.int64))
            for world in (compiled, plain)
        ]
        assert fits[0] == fits[1]
        pairs = [
            (number, int(slot))
            for number in range(3)
            for slot in np.flatnonzero(compiled.tables.pool.references)
            if compiled.tables.position[number, slot] < 0
        ]
        if pairs:
            sent = sends.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12))
            number, slots = np.array(sent, dtype=np.int64).reshape(-1, 2).T.copy()
            for world in (compiled, plain):
                world.loops.append(world.tables.arrays, number, slots)
        check_same(compiled, plain)


def check_same(one: World, other: World) -> None:
    for first, second in zip(one.arrays, other.arrays, strict=True):
        assert (first == second).all()
    for world in (one, other):
        references = np.zeros(world.tables.num_slots, dtype=int)
        for number in range(3):
            np.add.at(references, world.tables.slots_of(number), 1)
        assert (world.tables.pool.references >= references).all()
        free = world.tables.pool.state_dict()["free"].tolist()
        assert sorted([*free, *world.tables.pool.references.nonzero()[0].tolist()]) == list(range(len(references)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
def test_slots_that_follow_one_another(slots) -> None:
    expected = slots == list(range(slots[0], slots[0] + len(slots)))
    assert [loops.is_run(np.array(slots)) for loops in (numba_kernels, numpy_kernels)] == [expected] * 2
