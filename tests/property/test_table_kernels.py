# SPDX-License-Identifier: Apache-2.0
"""Loops over tables against plain lists of slots."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.tables import kernels as numba_kernels
from lightning_replay.tables.tables import Tables

CAPACITIES = {"default": 5, "near": 3, "far": 7}


class Lists:
    """The slots of each table, oldest first, and the free slots in the order in which they are taken."""

    def __init__(self, num_slots: int) -> None:
        self.tables: list[list[int]] = [[] for _ in CAPACITIES]
        self.references = [0] * num_slots
        self.free = list(range(num_slots))

    def append(self, table: list[int], slots: list[int]) -> None:
        leaving: list[tuple[int, int]] = []
        for number, slot in zip(table, slots, strict=True):
            self.tables[number].append(slot)
            self.references[slot] += 1
        for number, capacity in zip(table, np.array([*CAPACITIES.values()])[table].tolist(), strict=True):
            if len(self.tables[number]) > capacity:
                leaving.append((number, self.tables[number].pop(0)))
        self.release(leaving)

    def release(self, leaving: list[tuple[int, int]]) -> None:
        """Slots of one table become free in order of age; of several that share slots, in the order of slots."""
        shared = any(self.references[slot] > 1 for _, slot in leaving)
        slots = [slot for _, slot in leaving]
        for slot in sorted(slots) if shared and len({number for number, _ in leaving}) > 1 else slots:
            self.references[slot] -= 1
            if not self.references[slot]:
                self.free.append(slot)


@settings(max_examples=130)
@given(
    calls=st.lists(st.lists(st.integers(-1, 3), min_size=1, max_size=12), min_size=1, max_size=6),
    leaving=st.integers(0, 3),
    sends=st.data(),
)
def test_rows_of_several_tables(calls, leaving, sends) -> None:
    tables = Tables(CAPACITIES, extra_slots=30)
    lists = Lists(tables.num_slots)
    for table in calls:
        slots = tables.try_append_new(np.array(table))
        fits = min(table) >= 0 and max(table) < 3
        fits = fits and all(table.count(number) <= most for number, most in enumerate(CAPACITIES.values()))
        assert (slots is not None) == fits
        if slots is not None:
            # The oldest entries leave first, and may make room for the new rows.
            new = [-1] * len(table)
            before = [list(one) for one in lists.tables]
            gone = []
            for number in table:
                before[number].append(-1)
                if len(before[number]) > list(CAPACITIES.values())[number]:
                    gone.append((number, before[number].pop(0)))
            lists.tables = before
            lists.release(gone)
            for place, number in enumerate(table):
                new[place] = lists.free.pop(0)
                lists.references[new[place]] = 1
                lists.tables[number][lists.tables[number].index(-1)] = new[place]
            assert slots.tolist() == new
        check_same(tables, lists)
        held = [slot for slot, count in enumerate(lists.references) if count]
        pairs = [(number, slot) for number in range(3) for slot in held if slot not in lists.tables[number]]
        if pairs:
            sent = sends.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12))
            kept = [
                (number, slot)
                for place, (number, slot) in enumerate(sent)
                if sum(later == number for later, _ in sent[place:]) <= list(CAPACITIES.values())[number]
            ]
            tables.append(*np.array(sent, dtype=np.int64).reshape(-1, 2).T.copy())
            lists.append([number for number, _ in kept], [slot for _, slot in kept])
        check_same(tables, lists)
        early = min(leaving, len(lists.tables[1]))
        tables.leave_early(1, early)
        lists.release([(1, lists.tables[1].pop(0)) for _ in range(early)])
        check_same(tables, lists)
        check_draw(tables, lists)


def check_same(tables: Tables, lists: Lists) -> None:
    assert [tables.slots_of(number).tolist() for number in range(3)] == lists.tables
    assert tables.references.tolist() == lists.references
    assert tables.state_dict()["slots"]["free"].tolist() == lists.free
    for number, slots in enumerate(lists.tables):
        assert np.flatnonzero(tables.position[number] >= 0).tolist() == sorted(slots)


def check_draw(tables: Tables, lists: Lists) -> None:
    """Equal parts of [0, 1) belong to the entries of a table."""
    middles = [(np.arange(len(slots)) + 0.5) / len(slots) for slots in lists.tables if slots]
    rows = tables.length
    table, slots = tables.draw(rows, np.concatenate([np.zeros(0), *middles]))
    assert table.tolist() == np.repeat(np.arange(3), rows).tolist()
    for number, held in enumerate(lists.tables):
        assert sorted(slots[table == number].tolist()) == sorted(held)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
def test_slots_that_follow_one_another(slots) -> None:
    assert numba_kernels.is_run(np.array(slots)) == (slots == list(range(slots[0], slots[0] + len(slots))))
