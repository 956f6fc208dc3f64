# SPDX-License-Identifier: Apache-2.0
"""The rows that arrays keep for running episodes, found by the names of the episodes."""

from __future__ import annotations

import numpy as np

from lightning_replay.jit import compiled


class RunningRows:
    """Gives each running episode a row of arrays, and finds it by the name of the episode.

    All methods read arrays in compiled loops, whatever the number of episodes. Names are sorted, so that a batch whose
    names are sorted is found in one pass over both.

    Example:
        >>> running = RunningRows()
        >>> running.open(np.array([7, 9])).tolist(), running.find(np.array([9, 8])).tolist()
        ([0, 1], [1, -1])
    """

    def __init__(self) -> None:
        self._names = np.zeros(0, dtype=np.int64)  # The names of the running episodes ascend. Then comes unused memory.
        self._rows = np.zeros(0, dtype=np.int64)  # Rows of the names, and then the rows that no episode has.
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        """Number of rows that exist. :meth:`open` may raise it."""
        return len(self._rows)

    @property
    def names(self) -> np.ndarray:
        """Names of the running episodes, int64 ascending."""
        return self._names[: self._count]

    @property
    def rows(self) -> np.ndarray:
        """Rows of the running episodes, int64 in the order of :attr:`names`."""
        return self._rows[: self._count]

    def find(self, names: np.ndarray) -> np.ndarray:
        """Returns the row of each episode, int64 ``[n]``, or -1 for an episode that does not run."""
        found = np.empty(len(names), dtype=np.int64)
        _find(names, self._names, self._rows, self._count, found)
        return found

    def open(self, names: np.ndarray) -> np.ndarray:
        """Returns the row of each episode, int64 ``[n]``. Episodes that do not run get one. The names must ascend."""
        found = np.empty(len(names), dtype=np.int64)
        missing = _find(names, self._names, self._rows, self._count, found)
        if missing:
            needed = self._count + missing
            if needed > len(self._rows):
                further = np.arange(len(self._rows), max(needed, 2 * len(self._rows)))
                self._names = np.concatenate((self._names, further))
                self._rows = np.concatenate((self._rows, further))
            _insert(names, missing, self._names, self._rows, self._count, found)
            self._count = needed
        return found

    def close(self, rows: np.ndarray) -> None:
        """Ends the episodes in these rows, int64 ``[n]``. -1 stands for no episode."""
        self._count = _remove(rows, self._names, self._rows, self._count)


@compiled
def _find(wanted, names, rows, count, found):  # type: ignore[no-untyped-def]
    """Fills in the rows of wanted names, and returns how many of them do not run."""
    place = missing = 0
    for number in range(wanted.size):
        name = wanted[number]
        if number and name < wanted[number - 1]:
            place = 0
        # Names that ascend are mostly near each other, so that the steps of the search grow from one.
        step = 1
        while place + step < count and names[place + step] <= name:
            place += step
            step *= 2
        last = min(place + step, count)  # The name is in names[place:last], or nowhere.
        while place + 1 < last:
            middle = (place + last) // 2
            if names[middle] <= name:
                place = middle
            else:
                last = middle
        found[number] = rows[place] if place < count and names[place] == name else -1
        missing += found[number] < 0
    return missing


@compiled
def _insert(wanted, missing, names, rows, count, found):  # type: ignore[no-untyped-def]
    """Inserts the wanted names without a row, which ascend, into the names, and fills in their rows."""
    unused = rows[count : count + missing].copy()
    old, new = count - 1, missing
    for number in range(wanted.size - 1, -1, -1):
        if found[number] >= 0:
            continue
        while old >= 0 and names[old] > wanted[number]:
            names[old + new], rows[old + new] = names[old], rows[old]
            old -= 1
        new -= 1
        found[number] = unused[new]
        names[old + new + 1], rows[old + new + 1] = wanted[number], unused[new]


@compiled
def _remove(closing, names, rows, count):  # type: ignore[no-untyped-def]
    """Removes the names of these rows, and returns how many are left."""
    is_closing = np.zeros(rows.size, np.bool_)
    for row in closing:
        if row >= 0:
            is_closing[row] = True
    kept = 0
    for place in range(count):
        if not is_closing[rows[place]]:
            names[kept], rows[kept] = names[place], rows[place]
            kept += 1
    # If each of several environments begins its next episode at once, it gets the row of the episode before. Then the
    # rows stay in the order of the environments, and memory is read in order.
    place = kept
    for row in range(rows.size):
        if is_closing[row]:
            rows[place] = row
            place += 1
    return kept
