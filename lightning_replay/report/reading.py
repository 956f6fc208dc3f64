# SPDX-License-Identifier: Apache-2.0
"""Parts of a saved state, read from its files when they are needed and checked as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_replay.saving.chunks import ChunkedTensor, check_file
from lightning_replay.storage.row_layout import WORD_BYTES, Key, RowLayout

Stored = Tensor | ChunkedTensor

_PIECE_BYTES = 8 << 20  # rows that are unpacked at a time
_FILES_KEPT = 2  # a row may lie in two chunk files


class ChunkBytes:
    """The bytes of a tensor in chunk files; the last files are kept.

    Args:
        tensor: see :func:`~lightning_replay.saving.chunks.locate_chunks`.
    """

    def __init__(self, tensor: ChunkedTensor) -> None:
        self._files = tensor.files
        self._ends = np.cumsum([expected["bytes"] for _, expected in tensor.files])
        self._contents: dict[int, bytearray] = {}

    def read(self, start: int, stop: int) -> bytearray:
        """Returns the bytes from ``start`` to below ``stop``; raises ``DamagedFileError`` for a changed file."""
        found = bytearray()
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            content, end = self._content(number), int(self._ends[number])
            first = start - (end - len(content))
            found += memoryview(content)[first : first + min(stop, end) - start]
            start = min(stop, end)
        return found

    def _content(self, number: int) -> bytearray:
        if number not in self._contents:
            while len(self._contents) >= _FILES_KEPT:
                del self._contents[next(iter(self._contents))]
            file, expected = self._files[number]
            check_file(file, expected, reads=False)  # before that many bytes are allocated
            content = bytearray(expected["bytes"])
            check_file(file, expected, memoryview(content))
            self._contents[number] = content
        return self._contents[number]


def tensor_of(stored: Stored) -> Tensor:
    """Returns a tensor on the CPU, read and checked if it is in chunk files."""
    if isinstance(stored, Tensor):
        return stored.detach().cpu()
    content = ChunkBytes(stored).read(0, stored.num_bytes)
    flat = (
        torch.frombuffer(content, dtype=stored.dtype) if content else torch.zeros(0, dtype=stored.dtype, device="cpu")
    )
    return flat.view(stored.shape)


def array_of(stored: Stored) -> np.ndarray:
    """Returns :func:`tensor_of` as an array."""
    return tensor_of(stored).numpy()


class StoredRows:
    """Rows of equal length, in memory or in chunk files, of which a part is in memory at a time.

    Args:
        rows: ``[N, ...]``; of chunk files nothing is read yet.
    """

    def __init__(self, rows: Stored) -> None:
        self._count = int(rows.shape[0])
        self._rows = rows if isinstance(rows, Tensor) else None
        self._chunks = None if isinstance(rows, Tensor) else ChunkBytes(rows)
        self._shape, self._dtype = rows.shape[1:], rows.dtype
        self._row_bytes = max(1, self._shape.numel() * self._dtype.itemsize)

    def __len__(self) -> int:
        return self._count

    def rows(self, first: int, stop: int) -> Tensor:
        """Returns the rows from ``first`` to below ``stop``, on the CPU."""
        if self._rows is not None:
            return self._rows[first:stop].cpu()
        assert self._chunks is not None
        content = self._chunks.read(first * self._row_bytes, stop * self._row_bytes)
        return torch.frombuffer(content, dtype=self._dtype).view(stop - first, *self._shape)

    def select(self, index: np.ndarray) -> Tensor:
        """Returns the rows of an index, int64 ``[n]``, n > 0, one by one; each chunk file is read at most once."""
        places, inverse = np.unique(index, return_inverse=True)
        return torch.cat([self.rows(place, place + 1) for place in places.tolist()])[torch.from_numpy(inverse)]

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yields all rows in order, a few MiB at a time, each piece with the number of its first row."""
        step = max(1, _PIECE_BYTES // self._row_bytes)
        for first in range(0, self._count, step):
            yield first, self.rows(first, min(first + step, self._count))


class PackedColumns:
    """Columns of packed rows.

    Args:
        rows: int64 ``[N, words]``.
        layout: of each row.
    """

    def __init__(self, rows: Stored, layout: RowLayout) -> None:
        if tuple(rows.shape[1:]) != (layout.row_bytes // WORD_BYTES,) or rows.dtype != torch.int64:
            raise ValueError(f"rows {list(rows.shape)} are not of {layout.row_bytes} bytes each")
        self._rows = StoredRows(rows)
        self.layout: RowLayout = layout

    def __len__(self) -> int:
        return len(self._rows)

    def whole(self, keys: Sequence[Key]) -> dict[Key, np.ndarray]:
        """Returns columns ``[N, ...]`` by key, read in one pass over all rows; those that are not stored are absent."""
        wanted = [key for key in keys if key in self.layout.columns]
        columns: dict[Key, np.ndarray] = {}
        for first, rows in self._rows.pieces() if wanted else ():
            leaves = self.layout.leaves(rows, torch.Size([len(rows)]))
            for key in wanted:
                part = _plain(leaves[key])
                if key not in columns:
                    columns[key] = np.empty((len(self), *part.shape[1:]), part.dtype)
                columns[key][first : first + len(rows)] = part
        return columns

    def of_rows(self, key: Key, slots: np.ndarray) -> np.ndarray:
        """Returns a stored column of rows, ``[n, ...]``, by their slots, int64 ``[n]``, n > 0."""
        rows = self._rows.select(slots)
        return _plain(self.layout.leaves(rows, torch.Size([len(rows)]))[key])


def _plain(values: Tensor) -> np.ndarray:
    """Returns numbers as an array; of a dtype that NumPy lacks as float32."""
    lacks = values.dtype is torch.bfloat16 or (values.is_floating_point() and values.element_size() == 1)
    return (values.float() if lacks else values).numpy()
