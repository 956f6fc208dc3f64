# SPDX-License-Identifier: Apache-2.0
"""Arrays of tables and of histories, and the compiled loops over them.

Named tuples of arrays are passed on as plain ones: a compiled function reads those in a third of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from lightning_replay.episodes.groups import EpisodeGroups
from lightning_replay.jit import compiled


class TableArrays(NamedTuple):
    """All tables over ``S`` slots. L tables have E entries together; slots and counters are int64."""

    capacity: np.ndarray  #: ``[L]``
    offset: np.ndarray  #: ``[L]``, where the ring of each table begins in ``entries``.
    appended: np.ndarray  #: ``[L]``, entries ever appended.
    first: np.ndarray  #: ``[L]``, entries before it left early.
    entries: np.ndarray  #: Slots ``[E]``: entry k of a table lies at ``offset + k % capacity``.
    position: np.ndarray  #: int32 ``[L, S]``, ``k % capacity`` of each slot; -1 where a table does not hold it.
    references: np.ndarray  #: int32 ``[S]``, of tables and histories.
    free: np.ndarray  #: Free slots, a ring ``[S]``: number k lies at ``k % S``.
    written_at: np.ndarray  #: ``[S]``, rows written before the one in each slot.
    counters: np.ndarray  #: ``[3]``: see ``TAKEN``, ``FREED`` and ``WRITTEN``.


TAKEN, FREED, WRITTEN = 0, 1, 2  # free slots ever taken, slots ever freed (all at first), rows ever written


class HistoryArrays(NamedTuple):
    """The last ``length`` steps of running episodes, one in each of R rows."""

    steps: np.ndarray  #: Slots ``[R, length]``: step k of an episode lies at ``k % length``.
    added: np.ndarray  #: int64 ``[R]``, steps added to each since it began; the last of them are held.


class EventArrays(NamedTuple):
    """V events whose histories go to T tables, those after the first."""

    table: np.ndarray  #: int64 ``[V]`` ascending, the event table of each event, counted from 0.
    history_length: np.ndarray  #: int64 ``[V]``, steps up to and including the event.
    sent: np.ndarray  #: bool ``[S, T]``, whether the row in a slot has been in an event table.


@njit(inline="always")
def _release(slot, references, free, counters):  # type: ignore[no-untyped-def]
    references[slot] -= 1
    if references[slot] == 0:
        free[counters[FREED] % free.size] = slot
        counters[FREED] += 1


@njit(inline="always")
def _make_room(arrays, table, skipped, places):  # type: ignore[no-untyped-def]
    """Removes the entries in the way of new ones, which follow ``skipped`` others ``[L]``; fills in their places."""
    leaving = np.empty(table.size, np.int64)
    count, is_shared, is_mixed, only = 0, False, False, np.int64(-1)
    before, appended = arrays.appended.copy(), arrays.appended
    next_place = np.empty(skipped.size, np.int64)  # in each ring; a division for every row would take longest of all
    for number in range(skipped.size):
        appended[number] += skipped[number]
        next_place[number] = appended[number] % arrays.capacity[number]
    for row in range(table.size):
        number = table[row]
        capacity, place = arrays.capacity[number], next_place[number]
        next_place[number] = place + 1 if place + 1 < capacity else 0
        places[row] = arrays.offset[number] + place
        old = appended[number] - capacity  # the last entry at this place; negative before any
        if skipped[number] > 0:
            old = before[number] - 1 - (before[number] - 1 - place) % capacity
        appended[number] += 1
        if old >= arrays.first[number]:
            slot = arrays.entries[places[row]]
            arrays.position[number, slot] = -1
            is_shared |= arrays.references[slot] > 1
            is_mixed |= count > 0 and number != only
            only = number
            leaving[count] = slot
            count += 1
    # Of one table free in order of age; a slot may leave several tables at once.
    ordered = np.sort(leaving[:count]) if is_shared and is_mixed else leaving
    end = arrays.counters[FREED] % arrays.free.size
    for row in range(count):
        slot = ordered[row]
        arrays.references[slot] -= 1
        if arrays.references[slot] == 0:
            arrays.free[end] = slot
            end = end + 1 if end + 1 < arrays.free.size else 0
            arrays.counters[FREED] += 1


@njit(inline="always")
def _place(arrays, table, places, slots):  # type: ignore[no-untyped-def]
    for row in range(table.size):
        arrays.entries[places[row]] = slots[row]
        arrays.position[table[row], slots[row]] = places[row] - arrays.offset[table[row]]


@compiled
def append_new(all_arrays, table, slots):  # type: ignore[no-untyped-def]
    """Appends a new row to each table of ``table``; fills in their slots, free for longest first.

    Returns 1; 0, with nothing changed, for a table that does not exist or more rows for one than its capacity; -1 where
    too few slots are free although the oldest entries have left.
    """
    arrays = TableArrays(*all_arrays)
    counters, capacity = arrays.counters, arrays.capacity
    new = np.zeros(capacity.size, np.int64)
    for row in range(table.size):
        number = table[row]
        if number < 0 or number >= capacity.size or new[number] == capacity[number]:
            return 0
        new[number] += 1
    places = np.empty(table.size, np.int64)
    new[:] = 0
    _make_room(arrays, table, new, places)
    if counters[FREED] - counters[TAKEN] < table.size:
        return -1
    start = counters[TAKEN] % arrays.free.size
    for row in range(table.size):
        slot = arrays.free[start]
        start = start + 1 if start + 1 < arrays.free.size else 0
        slots[row] = slot
        arrays.references[slot] = 1
        arrays.written_at[slot] = counters[WRITTEN] + row
    counters[TAKEN] += table.size
    counters[WRITTEN] += table.size
    _place(arrays, table, places, slots)
    return 1


@compiled
def append(all_arrays, table, slots):  # type: ignore[no-untyped-def]
    """Appends slots with references to tables without them; of more than a capacity the last ones."""
    arrays = TableArrays(*all_arrays)
    skipped = -arrays.capacity
    for row in range(table.size):
        skipped[table[row]] += 1
    for number in range(skipped.size):
        skipped[number] = max(skipped[number], 0)
    left = skipped.copy()
    kept_table, kept_slots, kept = np.empty_like(table), np.empty_like(slots), 0
    for row in range(table.size):
        if left[table[row]] > 0:
            left[table[row]] -= 1
            continue
        kept_table[kept], kept_slots[kept] = table[row], slots[row]
        kept += 1
        arrays.references[slots[row]] += 1  # first: a slot may leave the last table that refers to it
    kept_table, kept_slots = kept_table[:kept], kept_slots[:kept]
    places = np.empty(kept, np.int64)
    _make_room(arrays, kept_table, skipped, places)
    _place(arrays, kept_table, places, kept_slots)


@compiled
def is_run(slots):  # type: ignore[no-untyped-def]
    breaks = 0
    for row in range(1, slots.size):
        breaks += slots[row] != slots[row - 1] + 1
    return breaks == 0


@compiled
def led_to_events(happened, all_events, all_groups, slots, held_in, all_histories):  # type: ignore[no-untyped-def]
    """Finds the steps that lead to events in new rows and have not been in their tables; marks them as sent.

    Returns tables and slots, int64: table after table, in the order of the events, for each in order of time.
    """
    events, groups, histories = EventArrays(*all_events), EpisodeGroups(*all_groups), HistoryArrays(*all_histories)
    num_events, count = happened.shape
    place, begin, group_of = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    for group in range(groups.start.size - 1):
        first = groups.start[group]
        for step in range(groups.start[group], groups.start[group + 1]):
            row = groups.order[step]
            place[row], begin[row], group_of[row] = step, first, group
            first = step + 1 if groups.done[row] else first
    length = histories.steps.shape[1]
    held = 0
    for group in range(held_in.size):
        held += min(histories.added[held_in[group]], length)
    most = events.sent.shape[1] * (count + held)
    tables, found, total = np.empty(most, np.int64), np.empty(most, np.int64), 0
    longest = np.zeros(count, np.int64)  # history length of the events of one table in each row
    for event in range(num_events):
        table = events.table[event]
        for row in range(count):
            if happened[event, row]:
                longest[row] = max(longest[row], events.history_length[event])
        if event + 1 < num_events and events.table[event + 1] == table:
            continue
        for row in range(count):
            if longest[row] == 0:
                continue
            from_batch = min(longest[row], place[row] - begin[row] + 1)
            past = 0
            # Only the first episode of a group goes on from an earlier batch.
            if begin[row] == groups.start[group_of[row]]:
                past = min(longest[row] - from_batch, min(histories.added[held_in[group_of[row]]], length))
            for step in range(-past, from_batch):
                if step < 0:
                    history = held_in[group_of[row]]
                    slot = histories.steps[history, (histories.added[history] + step) % length]
                else:
                    slot = slots[groups.order[place[row] - from_batch + 1 + step]]
                if not events.sent[slot, table]:
                    events.sent[slot, table] = True
                    tables[total], found[total] = table + 1, slot
                    total += 1
            longest[row] = 0
    return tables[:total], found[:total]


@compiled
def remember(references, free, counters, order, start, done, slots, held_in, steps, added):  # type: ignore[no-untyped-def]
    """Appends new rows to the histories of their episodes, and empties those of episodes that ended."""
    length = steps.shape[1]
    for group in range(start.size - 1):
        history, first, stop = held_in[group], start[group], start[group + 1]
        for step in range(first, stop):
            if done[order[step]]:
                for old in range(max(added[history] - length, 0), added[history]):
                    _release(steps[history, old % length], references, free, counters)
                added[history], first = 0, step + 1
        kept = min(stop - first, length)
        for step in range(stop - kept, stop):
            # Before an older step is released: a slot without references would be free in between.
            references[slots[order[step]]] += 1
        for step in range(stop - kept, stop):
            if added[history] >= length:
                _release(steps[history, added[history] % length], references, free, counters)
            steps[history, added[history] % length] = slots[order[step]]
            added[history] += 1


@compiled
def draw(capacities, offset, appended, firsts, entries, rows, uniform, table, slots):  # type: ignore[no-untyped-def]
    """Draws ``rows[t]`` entries of each table t, each equally likely, table after table; fills in tables and slots."""
    drawn = 0
    for number in range(rows.size):
        capacity, first = capacities[number], firsts[number]
        length = min(appended[number] - first, capacity)
        first = 0 if first <= appended[number] - capacity else first % capacity  # 0 where the ring is full
        for draw in range(drawn, drawn + rows[number]):
            rank = min(np.int64(uniform[draw] * length), length - 1)  # a product may be rounded to the length itself
            place = first + rank
            table[draw] = number
            slots[draw] = entries[offset[number] + (place if place < capacity else place - capacity)]
        drawn += rows[number]
