# SPDX-License-Identifier: Apache-2.0
"""New rows put together in memory first, from which whole rows are copied into their slots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.storage.row_kernels import copy_rows
from lightning_replay.storage.row_layout import RowLayout
from lightning_replay.storage.stored_column import GENERATION, StoredColumn
from lightning_replay.storage.transition_check import Column

_BLOCK_BYTES = 2**18  # fits the second-level cache
_MOST_ROW_BYTES = 4096  # columns of longer rows are written as fast one by one


class RowBlock:
    """Writes columns into scattered rows on the CPU, or into one, in a third of the time of a write of every column.

    Args:
        layout: of the rows.
        rows: int64 ``[capacity, words]``, contiguous.
    """

    def __init__(self, layout: RowLayout, rows: Tensor) -> None:
        self.length: int = _BLOCK_BYTES // layout.row_bytes  #: Rows of the block.
        block = torch.zeros(self.length, rows.shape[1], dtype=torch.int64, device="cpu")
        views = layout.unpack(block, torch.Size([self.length]))
        self._columns = [StoredColumn(key, views.get(key)) for key in layout.columns if key != GENERATION]
        self._generation = views.get(GENERATION).storage_offset()  # the word of a row
        offsets = [column.tensor.storage_offset() * column.tensor.itemsize for column in self._columns]
        self._order = sorted(range(len(offsets)), key=offsets.__getitem__)
        self._before_generation = sum(offset < 8 * self._generation for offset in offsets)
        self._block, self._rows = block.numpy(), rows.numpy()
        everything: Any = self._rows.reshape(-1).view(np.uint8)
        self._bytes, self._row_bytes = memoryview(everything), layout.row_bytes

    @staticmethod
    def fits(layout: RowLayout, rows: Tensor) -> bool:
        """Returns whether rows are short enough, and on the CPU."""
        return rows.device.type == "cpu" and layout.row_bytes <= _MOST_ROW_BYTES

    def write_one(self, slots: Any, values: Sequence[Any], least_generation: int) -> bool:
        """Writes columns ``[1, ...]`` into a slice of one slot by one copy.

        ``False``, with nothing written, for a slice of more, or where a column is a tensor or not contiguous.
        """
        slot = slots.start
        if slots.stop - slot != 1:
            return False
        generation = max(int(self._rows[slot, self._generation]), least_generation) + 1
        parts = [values[place] for place in self._order]
        parts.insert(self._before_generation, generation.to_bytes(8, sys.byteorder))
        try:
            row = b"".join(parts)
        except TypeError:
            return False
        start = slot * self._row_bytes
        self._bytes[start : start + len(row)] = row
        return True

    def write(self, slots: np.ndarray, values: Sequence[Column], least_generation: int) -> int:
        """Writes columns ``[N, ...]`` into slots, int64 ``[N]``, all different, whose generations are raised by one.

        Returns the highest slot.

        Args:
            slots: where each row goes.
            values: in the order of the layout's columns.
            least_generation: a generation below it counts as this one before it is raised.
        """
        highest = 0
        for start in range(0, len(slots), self.length):
            part = slots[start : start + self.length]
            count = len(part)
            for column, value in zip(self._columns, values, strict=True):
                column.write(slice(0, count), value if count == len(slots) else value[start : start + count])
            now = copy_rows(self._rows, part, self._block, self._generation, least_generation)
            highest = max(highest, now)
        return highest
