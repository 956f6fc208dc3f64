# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch that lie in the object store, and how a process fetches its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from lightning_replay.sharded.batch_index import numbers_of
from lightning_replay.sharded.draws import RemoteBatch
from lightning_replay.sharded.fetching import Block, cut_blocks, fetched
from lightning_replay.sharded.row_ids import RowIds
from lightning_replay.sharded.row_routing import Columns

if TYPE_CHECKING:
    pass


class DrawnRows(NamedTuple):
    """Rows of a batch that one process fetches."""

    blocks: list[Block]  # where they are, in order
    ids: RowIds
    columns: dict[str, np.ndarray]  # [n] each, which depend on all shards, such as priority_weight

    @classmethod
    def of(cls, batch: RemoteBatch) -> DrawnRows:
        return cls(batch.blocks, batch.ids, batch.columns)

    def __len__(self) -> int:
        return len(self.ids.shard)

    def cut(self, start: int, stop: int) -> DrawnRows:
        columns = {name: column[start:stop] for name, column in self.columns.items()}
        return DrawnRows(cut_blocks(self.blocks, start, stop), self.ids.take(np.arange(start, stop)), columns)


class FetchedRows:
    """Rows of one or several draws, fetched from the object store within ``timeout_s`` and joined to a batch."""

    def __init__(self, key: int, timeout_s: float) -> None:
        self._key, self._timeout_s = key, timeout_s
        self._blocks: list[Columns] = []
        self._numbers: list[Columns] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def fetch(self, drawn: DrawnRows) -> None:
        """Adds the rows of a draw, except those that were lost with their shard."""
        is_here = np.ones(len(drawn), dtype=bool)
        found: list[Columns | None] = fetched([block.reference for block in drawn.blocks], self._timeout_s)
        first = 0
        for (_, start, stop), columns in zip(drawn.blocks, found, strict=True):
            if columns is None:
                is_here[first : first + stop - start] = False
            else:
                self._blocks.append({key: column[start:stop] for key, column in columns.items()})
            first += stop - start
        index, generation = numbers_of(drawn.ids.take(is_here), self._key)
        numbers: Columns = {("index",): index, ("generation",): generation}
        self._numbers.append(numbers | {(name,): column[is_here] for name, column in drawn.columns.items()})
        self._count += len(index)

    def batch(self) -> TensorDict:
        batch = TensorDict({}, batch_size=[self._count])
        for parts in (self._blocks, self._numbers):
            for key in parts[0]:
                column = np.concatenate([part[key] for part in parts])
                batch.set(key if len(key) > 1 else key[0], torch.from_numpy(column))
        return batch
