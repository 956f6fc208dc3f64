# SPDX-License-Identifier: Apache-2.0
"""What ``numba_kernels`` computes, in NumPy, where numba is missing; arguments and results are described there."""

from __future__ import annotations

import numpy as np

from lightning_replay.tables.arrays import FREED, TAKEN, WRITTEN, EpisodeGroups, EventArrays, HistoryArrays, TableArrays


def release(arrays: TableArrays, slots: np.ndarray) -> None:
    """Removes a reference to each slot, int64 ``[n]``, all different; those without any become free."""
    left = arrays.references[slots] - 1
    arrays.references[slots] = left
    freed = slots[left == 0]
    arrays.free.put(arrays.counters[FREED] + np.arange(len(freed)), freed, mode="wrap")
    arrays.counters[FREED] += len(freed)


def append_new(arrays: TableArrays, table: np.ndarray, slots: np.ndarray) -> int:
    count, counters, num_tables = len(table), arrays.counters, len(arrays.capacity)
    if table.min() < 0 or table.max() >= num_tables:
        return 0
    if (np.bincount(table, minlength=num_tables) > arrays.capacity).any():
        return 0
    places = _make_room(arrays, table, np.zeros(num_tables, dtype=np.int64))
    if counters[FREED] - counters[TAKEN] < count:
        return -1
    slots[:] = arrays.free.take(counters[TAKEN] + np.arange(count), mode="wrap")
    counters[TAKEN] += count
    arrays.references[slots] = 1
    arrays.written_at[slots] = counters[WRITTEN] + np.arange(count)
    counters[WRITTEN] += count
    _place(arrays, table, places, slots)
    return 1


def append(arrays: TableArrays, table: np.ndarray, slots: np.ndarray) -> None:
    skipped = np.maximum(np.bincount(table, minlength=len(arrays.capacity)) - arrays.capacity, 0)
    if skipped.any():
        stays = _rank(table) >= skipped[table]
        table, slots = table[stays], slots[stays]
    np.add.at(arrays.references, slots, 1)  # first: a slot may leave the last table that refers to it
    _place(arrays, table, _make_room(arrays, table, skipped), slots)


def is_run(slots: np.ndarray) -> bool:
    return bool((slots[1:] == slots[:-1] + 1).all())


def led_to_events(
    happened: np.ndarray,
    events: EventArrays,
    groups: EpisodeGroups,
    slots: np.ndarray,
    held_in: np.ndarray,
    histories: HistoryArrays,
) -> tuple[np.ndarray, np.ndarray]:
    steps_until = _steps_until_rows(np.any(happened, axis=0), groups, slots, held_in, histories)
    tables, found = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for table in np.unique(events.table).tolist():
        is_of_table = events.table == table
        longest = (happened[is_of_table] * events.history_length[is_of_table, None]).max(0)
        for row in np.flatnonzero(longest).tolist():
            window = steps_until[row][-longest[row] :]
            new = window[~events.sent[window, table]]
            events.sent[new, table] = True
            tables.append(np.full(len(new), table + 1))
            found.append(new)
    return np.concatenate(tables), np.concatenate(found)


def _steps_until_rows(
    wanted: np.ndarray, groups: EpisodeGroups, slots: np.ndarray, held_in: np.ndarray, histories: HistoryArrays
) -> dict[int, np.ndarray]:
    """Returns the slots of the known steps of an episode up to each of the wanted rows, bool ``[N]``, by row."""
    steps_until = {}
    for history, start, stop in zip(held_in, groups.start[:-1], groups.start[1:], strict=True):
        episode, rows = _held(histories, history), groups.order[start:stop]
        first = 0
        for place, row in enumerate(rows.tolist()):
            if wanted[row]:
                steps_until[row] = np.concatenate((episode, slots[rows[first : place + 1]]))
            if groups.done[row]:
                episode, first = episode[:0], place + 1
    return steps_until


def remember(
    arrays: TableArrays, groups: EpisodeGroups, slots: np.ndarray, held_in: np.ndarray, histories: HistoryArrays
) -> None:
    length = histories.steps.shape[1]
    for history, start, stop in zip(held_in, groups.start[:-1], groups.start[1:], strict=True):
        new = slots[groups.order[start:stop]]
        ends = np.flatnonzero(groups.done[groups.order[start:stop]])
        if len(ends):
            release(arrays, _held(histories, history))
            histories.added[history] = 0
            new = new[ends[-1] + 1 :]
        new = new[max(len(new) - length, 0) :]
        arrays.references[new] += 1
        before = histories.added[history]
        after = before + len(new)
        release(arrays, _held(histories, history)[: max(min(before, length) + len(new) - length, 0)])
        histories.steps[history, np.arange(before, after) % max(length, 1)] = new
        histories.added[history] = after


def follow(
    arrays: TableArrays,
    happened: np.ndarray,
    events: EventArrays,
    groups: EpisodeGroups,
    slots: np.ndarray,
    held_in: np.ndarray,
    histories: HistoryArrays,
) -> tuple[np.ndarray, np.ndarray]:
    events.sent[slots] = False
    tables, steps = led_to_events(happened, events, groups, slots, held_in, histories)
    if len(tables):
        append(arrays, tables, steps)
    remember(arrays, groups, slots, held_in, histories)
    return tables, steps


def draw(arrays: TableArrays, rows: np.ndarray, uniform: np.ndarray, table: np.ndarray, slots: np.ndarray) -> None:
    table[:] = np.repeat(np.arange(len(rows)), rows)
    length = np.minimum(arrays.appended - arrays.first, arrays.capacity)[table]
    ranks = np.minimum((uniform * length).astype(np.int64), length - 1)  # a product may be rounded to the length itself
    first = np.where(arrays.first > arrays.appended - arrays.capacity, arrays.first, 0)[table]
    slots[:] = arrays.entries[arrays.offset[table] + (first + ranks) % arrays.capacity[table]]


def _held(histories: HistoryArrays, history: int) -> np.ndarray:
    count, length = int(histories.added[history]), histories.steps.shape[1]
    return histories.steps[history, np.arange(max(count - length, 0), count) % max(length, 1)]


def _make_room(arrays: TableArrays, table: np.ndarray, skipped: np.ndarray) -> np.ndarray:
    """Removes the entries in the way of new ones, after ``skipped`` ones ``[L]``; returns their places in the rings."""
    before = arrays.appended.copy()
    arrays.appended[:] = before + skipped + np.bincount(table, minlength=len(before))
    capacity = arrays.capacity[table]
    places = ((before + skipped)[table] + _rank(table)) % capacity
    # The number of the last entry at each place, negative before any was appended.
    last = before[table] - 1
    taken = last - (last - places) % capacity >= arrays.first[table]
    places += arrays.offset[table]
    if taken.any():
        tables, leaving = table[taken], arrays.entries[places[taken]]
        arrays.position[tables, leaving] = -1
        if not ((tables == tables[0]).all() or (arrays.references[leaving] == 1).all()):
            leaving, times = np.unique(leaving, return_counts=True)  # a slot may leave several tables at once
            arrays.references[leaving] -= (times - 1).astype(np.int32)
        release(arrays, leaving)  # of one table free in order of age
    return places


def _place(arrays: TableArrays, table: np.ndarray, places: np.ndarray, slots: np.ndarray) -> None:
    arrays.entries[places] = slots
    arrays.position[table, slots] = places - arrays.offset[table]


def _rank(table: np.ndarray) -> np.ndarray:
    """Returns how many earlier entries have the same table, int64 ``[N]``: 0 0 1 2 1 for 2 0 2 2 0."""
    steps = np.arange(len(table))
    counts = np.bincount(table)
    if len(counts) < 2 or counts[-1] == len(table):
        return steps
    rank = np.empty_like(steps)
    rank[np.argsort(table, kind="stable")] = steps - np.repeat(np.cumsum(counts) - counts, counts)
    return rank
