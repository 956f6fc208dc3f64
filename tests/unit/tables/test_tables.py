# SPDX-License-Identifier: Apache-2.0
"""Slots and tables along small timelines."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_replay.tables.kernels import TAKEN
from lightning_replay.tables.tables import Tables


def numbers(*slots: int) -> np.ndarray:
    return np.array(slots, dtype=np.int64)


def new(tables: Tables, table: int, count: int) -> list[int]:
    return tables.append_new_to_each(np.full(count, table)).tolist()


def send(tables: Tables, table: int, *slots: int) -> None:
    tables.append(np.full(len(slots), table), numbers(*slots))


def held(tables: Tables) -> list[list[int]]:
    return [tables.slots_of(number).tolist() for number in range(len(tables))]


def free(tables: Tables) -> list[int]:
    return tables.state_dict()["slots"]["free"].tolist()


def test_freed_slots_are_announced_once_and_in_order() -> None:
    tables, freed = Tables({"all": 2}, extra_slots=1), []
    tables.on_free = lambda slots: freed.append(slots.tolist())
    new(tables, 0, 2)
    assert freed == []
    new(tables, 0, 2)
    assert freed == [[0, 1]]
    tables.leave_early(0, 2)
    assert freed == [[0, 1], [2, 0]], "across the end of the list of free slots"


def test_more_rows_than_a_table_takes_are_refused_and_nothing_is_changed() -> None:
    tables = Tables({"first": 2, "second": 1})
    for table in ([0, 0, 0], [1, 1], [2], [-1]):
        assert tables.try_append_new(numbers(*table)) is None
        with pytest.raises(ValueError, match="the 2 tables take at once .2, 1."):
            tables.append_new_to_each(numbers(*table))
    assert tables.count == 0 and tables.rows_written == 0 and held(tables) == [[], []]


def test_rows_without_a_free_slot_are_refused() -> None:
    """As after a damaged save."""
    tables = Tables({"all": 2})
    tables.arrays.counters[TAKEN] = 1
    with pytest.raises(RuntimeError, match="2 rows are to be written, 1 slots are free.*num_slots"):
        new(tables, 0, 2)


def test_a_slot_lives_while_one_table_refers_to_it() -> None:
    """Default of 2, goal of 2; a goes to goal before it leaves the default table::

    written     default     goal     free
    a b         a b         a        2 3
    c           b c         a        3
    d           c d         a        1          b is free, a is not
    (c)         c d         a c      1
    (d)         c d         c d      1 0        a leaves goal, its last table
    """
    tables = Tables({"default": 2, "goal": 2})
    assert new(tables, 0, 2) == [0, 1]
    send(tables, 1, 0)
    assert tables.references.tolist() == [2, 1, 0, 0]
    assert new(tables, 0, 1) == [2] and held(tables) == [[1, 2], [0]] and free(tables) == [3]
    assert new(tables, 0, 1) == [3] and held(tables) == [[2, 3], [0]] and free(tables) == [1]
    send(tables, 1, 2)
    assert held(tables) == [[2, 3], [0, 2]] and tables.count == 3
    send(tables, 1, 3)
    assert held(tables) == [[2, 3], [2, 3]] and free(tables) == [1, 0]
    assert tables.references.tolist() == [0, 0, 2, 2]
    assert (tables.position[1, [0, 2]] >= 0).tolist() == [False, True]


def test_of_more_slots_than_a_table_holds_the_last_stay() -> None:
    tables = Tables({"default": 5, "goal": 2})
    slots = new(tables, 0, 5)
    send(tables, 1, *slots[:1])
    send(tables, 1, *slots[1:])
    assert held(tables)[1] == slots[-2:]
    assert tables.appended.tolist() == [5, 5], "those that were passed over count as come and gone"
    assert tables.references.tolist()[:5] == [1, 1, 1, 2, 2]
    send(tables, 1, slots[0])
    assert held(tables)[1] == [slots[4], slots[0]]


def test_cleared_tables_are_as_new() -> None:
    tables = Tables({"default": 2, "goal": 1}, extra_slots=1)
    send(tables, 1, *new(tables, 0, 1))
    tables.clear()
    assert held(tables) == [[], []] and tables.count == 0 and tables.rows_written == 0
    assert (tables.position[1, :4] == -1).all()
    assert new(tables, 0, 2) == [0, 1]


def test_the_state_of_other_tables_is_refused() -> None:
    state = Tables({"default": 3, "goal": 2}).state_dict()
    with pytest.raises(ValueError, match="saved tables hold 5 entries over 5 slots, these 4 over 4.*capacities"):
        Tables({"default": 3, "goal": 1}).check_state(state, np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="5 entries over 5 slots, these 5 over 6"):
        Tables({"default": 3, "goal": 2}, extra_slots=1).check_state(state, np.zeros(0, dtype=np.int64))


def test_a_table_is_asked_for_by_its_name() -> None:
    tables = Tables({"default": 3, "goal": 2})
    assert tables.number("goal") == 1
    with pytest.raises(KeyError, match="no table 'gaol'.*'default', 'goal'"):
        tables.number("gaol")


def test_the_bytes_are_eight_an_entry_twelve_a_slot_and_four_a_slot_and_table() -> None:
    """300 entries, 310 slots: a free list and a time of writing of 8 bytes, references and 2 positions of 4."""
    tables = Tables({"default": 200, "goal": 100}, extra_slots=10)
    assert tables.nbytes == 300 * 8 + 310 * (8 + 8 + 4 + 2 * 4)
