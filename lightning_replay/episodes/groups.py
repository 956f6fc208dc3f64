# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch, grouped by episode."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

_UNNAMED = np.zeros(1, dtype=np.int64)  # the episode of rows without a trajectory


class EpisodeGroups(NamedTuple):
    """Rows ``[N]`` of a batch by running episode, G groups. A row that is done is the last of its episode."""

    trajectory: np.ndarray  #: int64 ``[G]``, ascending.
    order: np.ndarray  #: int64 ``[N]``, the rows group after group, each in order of time.
    start: np.ndarray  #: int64 ``[G + 1]``, at which each group begins in ``order``, and N.
    ended: np.ndarray  #: bool ``[G]``, whether the last row of each group is done.
    done: np.ndarray  #: bool ``[N]``, by row.


def groups_of(trajectory: np.ndarray | None, done: np.ndarray) -> EpisodeGroups:
    """Groups rows by running episode, int64 ``[N]``, or ``None`` if all are of one episode, number 0."""
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
