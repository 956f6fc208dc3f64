# SPDX-License-Identifier: Apache-2.0
"""Arrays of tables and of histories, and the compiled loops over them.

Named tuples of arrays are passed on as plain tuples, which a compiled function reads in a third of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from lightning_replay.episodes.groups import EpisodeGroups
from lightning_replay.jit import compiled


class TableArrays(NamedTuple):
    """All tables over ``S`` slots. L tables have E entries together. Slots and counters are int64."""

    capacity: np.ndarray  #: Most entries of each table, ``[L]``.
    offset: np.ndarray  #: Place in ``entries`` at which the ring of each table begins, ``[L]``.
    appended: np.ndarray  #: Entries ever appended to each table, ``[L]``.
    first: np.ndarray  #: Entries before this number left early, ``[L]``.
    entries: np.ndarray  #: Slots ``[E]``: entry k of a table lies at ``offset + k % capacity``.
    position: np.ndarray  #: int32 ``[L, S]``, ``k % capacity`` of each slot, or -1 if it is not in the table.
    references: np.ndarray  #: References of tables and histories to each slot, int32 ``[S]``.
    free: np.ndarray  #: Free slots, a ring ``[S]``: number k lies at ``k % S``.
    written_at: np.ndarray  #: Rows written before the row in each slot, ``[S]``.
    counters: np.ndarray  #: Three counts: see ``TAKEN``, ``FREED`` and ``WRITTEN``.


# Counters of free slots ever taken, of slots ever freed (all are free at first), and of rows ever written.
TAKEN, FREED, WRITTEN = range(3)


class HistoryArrays(NamedTuple):
    """The last ``length`` steps of running episodes, one in each of R rows."""

    steps: np.ndarray  #: Slots ``[R, length]``: step k of an episode lies at ``k % length``.
    added: np.ndarray  #: int64 ``[R]``, steps added to each episode since it began. Only the last are remembered.
    continued: np.ndarray  #: int64 ``[R]``, when each episode was continued last.


class EventArrays(NamedTuple):
    """V events whose histories go to T event tables, which are all tables except the first."""

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
    """Removes entries to make room for new entries, and fills in the places of the new ones.

    The new entries of each table follow ``skipped`` entries, int64 ``[L]``, that leave at once.
    """
    leaving = np.empty(table.size, np.int64)
    count = 0
    is_shared = is_mixed = False
    only = np.int64(-1)
    appended = arrays.appended
    before = appended.copy()
    next_place = np.empty(skipped.size, np.int64)  # A division for every row would take longer than all the rest.
    for number in range(skipped.size):
        appended[number] += skipped[number]
        next_place[number] = appended[number] % arrays.capacity[number]
    for row in range(table.size):
        number = table[row]
        capacity = arrays.capacity[number]
        place = next_place[number]
        next_place[number] = place + 1 if place + 1 < capacity else 0
        places[row] = arrays.offset[number] + place
        old = appended[number] - capacity  # The number of the last entry at this place is negative before any.
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
    # Slots of one table become free in the order of their age. A slot may leave several tables at once.
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
    """Appends a new row to each table of ``table`` and fills in their slots. The slot free longest comes first.

    Returns 1 if it appended the rows. Returns 0, and changes nothing, for a table that does not exist or for more rows
    than the capacity of a table. Returns -1 if too few slots are free although the oldest entries have left.
    """
    arrays = TableArrays(*all_arrays)
    counters = arrays.counters
    capacity = arrays.capacity
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
    """Appends stored slots to tables without them. Of more slots than a capacity, the last are appended."""
    arrays = TableArrays(*all_arrays)
    skipped = -arrays.capacity
    for row in range(table.size):
        skipped[table[row]] += 1
    for number in range(skipped.size):
        skipped[number] = max(skipped[number], 0)
    left = skipped.copy()
    kept_rows = np.empty_like(table)
    kept = 0
    for row in range(table.size):
        if left[table[row]] > 0:
            left[table[row]] -= 1
            continue
        kept_rows[kept] = row
        kept += 1
        arrays.references[slots[row]] += 1  # Before any slot leaves the last table that refers to it.
    kept_table = table[kept_rows[:kept]]
    places = np.empty(kept, np.int64)
    _make_room(arrays, kept_table, skipped, places)
    _place(arrays, kept_table, places, slots[kept_rows[:kept]])


@compiled
def is_run(slots):  # type: ignore[no-untyped-def]
    """Returns whether each slot is the slot after the one before."""
    breaks = 0
    for row in range(1, slots.size):
        breaks += slots[row] != slots[row - 1] + 1
    return breaks == 0


@compiled
def led_to_events(happened, all_events, all_groups, slots, held_in, all_histories):  # type: ignore[no-untyped-def]
    """Finds steps that lead to events in new rows and have not been in the table of the event, and marks them as sent.

    Returns tables and slots, int64: table after table, in the order of the events, and for each event in order of time.
    """
    events = EventArrays(*all_events)
    groups = EpisodeGroups(*all_groups)
    histories = HistoryArrays(*all_histories)
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
    longest = np.zeros(count, np.int64)  # The longest history of the events of one table in each row.
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
def remember(  # type: ignore[no-untyped-def]
    references, free, counters, order, start, done, slots, held_in, steps, added, continued, now
):
    """Appends new rows to the histories of their episodes, and empties the histories of episodes that ended.

    The episodes are continued one after the other, from ``now`` on. Returns how many end with their last new row.
    """
    length = steps.shape[1]
    num_ended = 0
    for group in range(start.size - 1):
        history, first, stop = held_in[group], start[group], start[group + 1]
        continued[history] = now + group
        for step in range(first, stop):
            if done[order[step]]:
                for old in range(max(added[history] - length, 0), added[history]):
                    _release(steps[history, old % length], references, free, counters)
                added[history] = 0
                first = step + 1
        kept = min(stop - first, length)
        for step in range(stop - kept, stop):
            # If an older step were released first, a slot without references would be free in between.
            references[slots[order[step]]] += 1
        for step in range(stop - kept, stop):
            if added[history] >= length:
                _release(steps[history, added[history] % length], references, free, counters)
            steps[history, added[history] % length] = slots[order[step]]
            added[history] += 1
        num_ended += done[order[stop - 1]]
    return num_ended


@njit(inline="always")
def _group_at(rows, count):  # type: ignore[no-untyped-def]
    """Returns the group whose row is at each of ``count`` places, or -1, because memory is read faster in order."""
    groups = np.full(count, -1)
    for group in range(rows.size):
        groups[rows[group]] = group
    return groups


@compiled
def mark_others(own, order, start, last, first, found, is_other):  # type: ignore[no-untyped-def]
    """Marks episodes whose first new row differs from their last observation, and returns how many are marked.

    The words ``own`` lie in ``last`` from the word ``first`` on. Episode k has the row ``found[k]`` in ``last``.
    """
    groups = _group_at(order[start[:-1]], order.size)
    for row in range(order.size):
        group = groups[row]
        if group >= 0 and found[group] >= 0:
            difference = own[row, 0] ^ own[row, 0]
            # A loop that stops at the first difference takes twice the time, as most rows are equal.
            for word in range(own.shape[1]):
                difference |= own[row, word] ^ last[found[group], first + word]
            is_other[group] |= difference != 0
    return np.count_nonzero(is_other)


@compiled
def keep_last(following, order, start, last, first, rows):  # type: ignore[no-untyped-def]
    """Copies the words of the last new row of each episode to its row of ``last``, from the word ``first`` on."""
    groups = _group_at(order[start[1:] - 1], order.size)
    for row in range(order.size):
        if groups[row] >= 0:
            last[rows[groups[row]], first : first + following.shape[1]] = following[row]


@compiled
def draw(capacities, offset, appended, firsts, entries, rows, uniform, table, slots):  # type: ignore[no-untyped-def]
    """Draws ``rows[t]`` entries of each table t, each equally likely, table after table. Fills in tables and slots."""
    drawn = 0
    for number in range(rows.size):
        capacity, first = capacities[number], firsts[number]
        length = min(appended[number] - first, capacity)
        first = 0 if first <= appended[number] - capacity else first % capacity  # A full ring is drawn from place 0 on.
        for draw in range(drawn, drawn + rows[number]):
            rank = min(np.int64(uniform[draw] * length), length - 1)  # The product may be rounded to the length.
            place = first + rank
            table[draw] = number
            slots[draw] = entries[offset[number] + (place if place < capacity else place - capacity)]
        drawn += rows[number]
