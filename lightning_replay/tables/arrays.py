# SPDX-License-Identifier: Apache-2.0
"""Arrays of tables and of histories."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np


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


_UNNAMED = np.zeros(1, dtype=np.int64)  # the episode of rows without a trajectory
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


class EpisodeGroups(NamedTuple):
    """Rows ``[N]`` of a batch by running episode, G groups; a row that is done is the last of its episode.

    Example:
        >>> groups = groups_of(np.array([7, 8, 7, 7]), np.array([False, False, True, False]))
        >>> groups.trajectory, groups.order, groups.start, groups.ended
        (array([7, 8]), array([0, 2, 3, 1]), array([0, 3, 4]), array([False, False]))
    """

    trajectory: np.ndarray  #: int64 ``[G]``, ascending.
    order: np.ndarray  #: int64 ``[N]``, the rows group after group, each in order of time.
    start: np.ndarray  #: int64 ``[G + 1]``, where each group begins in ``order``, and N.
    ended: np.ndarray  #: bool ``[G]``, whether the last row of each group is done.
    done: np.ndarray  #: bool ``[N]``, by row.


def groups_of(trajectory: np.ndarray | None, done: np.ndarray) -> EpisodeGroups:
    """Groups rows by running episode, int64 ``[N]``; ``None`` where all are of one, which is 0."""
    count = len(done)
    if trajectory is None or len(trajectory) == 1 or (trajectory == trajectory[0]).all():
        only = _UNNAMED if trajectory is None else trajectory[:1]
        return EpisodeGroups(only, *_one_run(count), done[-1:], done)
    order = np.argsort(trajectory, kind="stable")
    named = trajectory[order]
    start = np.concatenate(([0], np.flatnonzero(named[1:] != named[:-1]) + 1, [count]))
    return EpisodeGroups(named[start[:-1]], order, start, done[order[start[1:] - 1]], done)


@functools.lru_cache(maxsize=16)
def _one_run(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns order and start of the rows of one episode, which are not written."""
    return np.arange(count), np.array((0, count))
