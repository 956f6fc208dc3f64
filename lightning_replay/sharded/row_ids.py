# SPDX-License-Identifier: Apache-2.0
"""Identities of rows in a sharded replay, by which TD errors find them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

#: A batch carries the number of starts of a shard modulo this.
NUM_EPOCHS = 1 << 11


class RowIds(NamedTuple):
    """Drawn rows of a sharded replay, n of them.

    A slot that was written since has another generation, and a shard that was started again another epoch.

    Attributes:
        shard, epoch: int64 ``[n]``.
        slot: int64 ``[n]``, or ``[n, 2]`` of pairs.
        generation: int64, as ``slot``, or ``[n]`` where feedback belongs to the first of a pair alone.

    Example:
        >>> first = RowIds.of_shard(0, 1, np.array([4, 2]), np.array([0, 0]))
        >>> ids = RowIds.joined([first, RowIds.of_shard(2, 1, np.array([7]), np.array([3]))])
        >>> ids.take(np.array([2, 0])).slot.tolist(), ids.current(np.array([1, 1, 2])).tolist()
        ([7, 4], [True, True, False])
    """

    shard: np.ndarray
    epoch: np.ndarray
    slot: np.ndarray
    generation: np.ndarray

    @classmethod
    def of_shard(cls, shard: int, epoch: int, slot: np.ndarray, generation: np.ndarray) -> RowIds:
        return cls(np.full(len(slot), shard), np.full(len(slot), epoch), slot, generation)

    @classmethod
    def joined(cls, parts: Sequence[RowIds]) -> RowIds:
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def take(self, places: np.ndarray) -> RowIds:
        return RowIds(*(column[places] for column in self))

    def current(self, epochs: np.ndarray) -> np.ndarray:
        """Returns whether each row's shard is still in the epoch in which it was drawn, bool ``[n]``."""
        return (epochs[self.shard] - self.epoch) % NUM_EPOCHS == 0

    def by_shard(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields each shard that has rows here, and their places, int64, in order."""
        for shard in np.unique(self.shard).tolist():
            yield shard, np.flatnonzero(self.shard == shard)
