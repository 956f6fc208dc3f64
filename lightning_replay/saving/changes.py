# SPDX-License-Identifier: Apache-2.0
"""Which rows of a tensor were written since its content was last hashed, so that a save need not read all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK_SHIFT = 6  # writes are noted for blocks of 64 rows


class Changes:
    """Counts the snapshots of a tensor, and keeps for each block of rows how many there were when it was last written.

    What a part of the tensor was found to be in a snapshot, its fingerprint, holds until a block of that part is
    written. So it does not matter where a save went, whether it was completed, and who else saved there since. Not
    locked: the lock of the snapshots is held for every call.

    Example:
        >>> changes = Changes()
        >>> changes.write(slice(0, 1000))
        >>> changes.keep_result((0, 500), "found", changes.next_moment())
        >>> later = changes.next_moment()
        >>> changes.result((0, 500), later, 0, 500), changes.result((500, 1000), later, 500, 1000)
        ('found', None)
        >>> changes.write(np.array([17])); changes.result((0, 500), later, 0, 500) is None
        True
    """

    def __init__(self) -> None:
        self._moment = 1  # the number of the next snapshot
        self._written = np.zeros(0, dtype=np.int64)  # by block, the moment of its last write
        self._all_written = 0  # the moment of the last write to rows that were not named
        self._results: dict[Any, tuple[Any, int]] = {}

    def write(self, slots: slice | np.ndarray) -> None:
        """Notes a write to rows, a slice or int64 ``[n]``."""
        if isinstance(slots, slice):
            first, stop = slots.start >> BLOCK_SHIFT, (slots.stop - 1 >> BLOCK_SHIFT) + 1
            if stop > len(self._written):
                self._grow(stop)
            self._written[first:stop] = self._moment
        elif len(slots):
            blocks = slots >> BLOCK_SHIFT
            try:
                self._written[blocks] = self._moment
            except IndexError:  # rarely; to look for the highest block first takes longer than all else
                self._grow(int(blocks.max()) + 1)
                self._written[blocks] = self._moment

    def write_any(self) -> None:
        """Notes a write to rows that are not named: nothing found before holds any more."""
        self._all_written = self._moment

    def next_moment(self) -> int:
        """Begins a snapshot and returns its number; later writes come after it."""
        self._moment += 1
        return self._moment - 1

    def keep_result(self, part: Any, result: Any, moment: int) -> None:
        """Keeps what a part was found to be in the snapshot of this number."""
        if moment > self._results.get(part, (None, 0))[1]:
            self._results[part] = result, moment

    def result(self, part: Any, moment: int, first: int, stop: int) -> Any | None:
        """Returns what a part, the rows from ``first`` to below ``stop``, is in the snapshot of this number.

        ``None`` where nothing was kept, or where one of the rows was written after that snapshot or the one of the
        result, whichever was first.
        """
        result, found_at = self._results.get(part, (None, 0))
        blocks = self._written[first >> BLOCK_SHIFT : (stop - 1 >> BLOCK_SHIFT) + 1]
        return result if max(self._all_written, blocks.max(initial=0)) <= min(moment, found_at) else None

    def _grow(self, blocks: int) -> None:
        grown = np.zeros(max(blocks, 2 * len(self._written)), dtype=np.int64)
        grown[: len(self._written)] = self._written
        self._written = grown
