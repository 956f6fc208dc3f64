# SPDX-License-Identifier: Apache-2.0
"""Rows of a saved state, read when they are needed, and the images in them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_replay.saving.chunks import ChunkedTensor, check_file
from lightning_replay.storage.rows import FRAMES, WORD_BYTES, Key, RowLayout, frames_by_column

Stored = Tensor | ChunkedTensor

_PIECE_BYTES = 8 << 20  # rows that are unpacked at a time


def array_of(stored: Stored) -> np.ndarray:
    """Returns a tensor ``[N, ...]`` as an array, read and checked if it is in chunk files."""
    return StoredRows(stored).rows(0, int(stored.shape[0])).numpy()


class StoredRows:
    """Rows ``[N, ...]``, in memory or in chunk files, of which one is read and checked, and in memory, at a time."""

    def __init__(self, rows: Stored) -> None:
        self._rows = rows
        self._row_bytes = max(1, rows.shape[1:].numel() * rows.dtype.itemsize)
        self._ends = np.zeros(0) if isinstance(rows, Tensor) else np.cumsum([one["bytes"] for _, one in rows.files])
        self._number, self._content = -1, bytearray()  # of the file that was read last

    def __len__(self) -> int:
        return int(self._rows.shape[0])

    def rows(self, first: int, stop: int) -> Tensor:
        """Returns the rows from ``first`` to below ``stop``, on the CPU."""
        if isinstance(self._rows, Tensor):
            return self._rows[first:stop].detach().cpu()
        found = bytearray()
        start = first * self._row_bytes
        end = stop * self._row_bytes
        while start < end:  # rows may lie in several files
            number = int(np.searchsorted(self._ends, start, side="right"))
            if number != self._number:
                self._read(number, *self._rows.files[number])
            begin = int(self._ends[number]) - len(self._content)
            found += memoryview(self._content)[start - begin : end - begin]
            start = begin + len(self._content)
        # an empty buffer has no memory to share
        flat = (
            torch.frombuffer(found, dtype=self._rows.dtype)
            if found
            else torch.zeros(0, dtype=self._rows.dtype, device="cpu")
        )
        return flat.view(stop - first, *self._rows.shape[1:])

    def _read(self, number: int, file: Path, expected: Mapping[str, Any]) -> None:
        self._number, self._content = -1, bytearray()  # the former file leaves memory first
        check_file(file, expected, reads=False)  # before that many bytes are allocated
        content = bytearray(expected["bytes"])
        check_file(file, expected, memoryview(content))
        self._number = number
        self._content = content

    def select(self, index: np.ndarray) -> Tensor:
        """Returns the rows of an index, int64 ``[n]``, n > 0, one by one. Each chunk file is read at most once."""
        places, inverse = np.unique(index, return_inverse=True)
        return torch.cat([self.rows(place, place + 1) for place in places.tolist()])[torch.from_numpy(inverse)]

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yields all rows in order, a few MiB at a time, each piece with the number of its first row."""
        step = max(1, _PIECE_BYTES // self._row_bytes)
        for first in range(0, len(self), step):
            yield first, self.rows(first, min(first + step, len(self)))


class PackedColumns:
    """Columns of packed rows, int64 ``[N, words]``, each of a ``layout``."""

    def __init__(self, rows: Stored, layout: RowLayout) -> None:
        if tuple(rows.shape[1:]) != (layout.row_bytes // WORD_BYTES,) or rows.dtype != torch.int64:
            raise ValueError(f"rows {list(rows.shape)} are not of {layout.row_bytes} bytes each")
        self._rows = StoredRows(rows)
        self.layout: RowLayout = layout

    def whole(self, keys: Sequence[Key]) -> dict[Key, np.ndarray]:
        """Returns columns ``[N, ...]`` by key, read in one pass over all rows. Keys that are not stored are absent."""
        wanted = [key for key in keys if key in self.layout.columns]
        pieces: dict[Key, list[np.ndarray]] = {key: [] for key in wanted}
        for _, rows in self._rows.pieces() if wanted else ():
            leaves = self.layout.leaves(rows, torch.Size([len(rows)]))
            for key in wanted:
                pieces[key].append(_plain(leaves[key]).copy())  # The copy lets the piece leave memory.
        return {key: np.concatenate(parts) for key, parts in pieces.items() if parts}

    def of_rows(self, key: Key, slots: np.ndarray) -> np.ndarray:
        """Returns a stored column of rows, ``[n, ...]``, by their slots, int64 ``[n]``, n > 0."""
        rows = self._rows.select(slots)
        return _plain(self.layout.leaves(rows, torch.Size([len(rows)]))[key])


def _plain(values: Tensor) -> np.ndarray:
    """Returns numbers as an array, and numbers of a dtype that NumPy lacks as float32."""
    lacks = values.dtype is torch.bfloat16 or (values.is_floating_point() and values.element_size() == 1)
    return (values.float() if lacks else values).numpy()


_LEAST_SIDE = 5  # Pixels; smaller arrays are not images.
_MOST_PIXELS = 160  # A side has at most this number; a page shows 84.
_MOST_CHANNELS = 10  # MinAtar's observations have up to 10 planes.
# Colors of planes of flags, one for each kind of object.
_PLANES = np.array(
    [
        *((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0)),
        *((86, 180, 233), (240, 228, 66), (160, 160, 160), (120, 60, 160), (255, 255, 255)),
    ],
    dtype=np.float32,
)


class RowImages(NamedTuple):
    """Images of rows: a column of the rows, or the last frame of each observation if frames are stored once."""

    packed: PackedColumns
    key: Key
    frames: StoredRows | None = None
    frame_shape: tuple[int, ...] = ()
    column: int = 0  # Number among the columns whose frames are stored once.

    def of_rows(self, slots: np.ndarray) -> list[np.ndarray]:
        """Returns the images of rows by their slots, uint8 ``[H, W, 3]`` each, scaled down to at most 160 pixels."""
        if not len(slots):
            return []
        values = self.packed.of_rows(self.key, slots)
        if self.frames is not None:
            numbers = values.reshape(len(values), -1, values.shape[-1])[:, self.column]
            numbers = numbers[:, numbers.shape[1] // 2 - 1].astype(np.int64)  # the observation's frames come first
            values = self.frames.select(numbers).numpy().reshape(-1, *self.frame_shape)
        return [_scaled_down(as_rgb(image)) for image in values]


def images_of(storage: Mapping[str, Any], packed: PackedColumns) -> dict[str, RowImages]:
    """Returns the images of stored rows by the name of their column, such as ``observation.front``."""
    found = {}
    for place, (key, frames, shape) in enumerate(frames_by_column(storage)):
        found[".".join(key)] = RowImages(packed, FRAMES, StoredRows(frames), tuple(shape), place)
    for key, column in packed.layout.columns.items():
        if key[0] != "next" and key != FRAMES and _holds_images(*column):
            found[".".join(key)] = RowImages(packed, key)
    return found


def _holds_images(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Returns whether rows of a column are images: bytes or flags, or planes of floats with few channels."""
    if len(shape) not in (2, 3, 4):
        return False
    height, width, _ = _sides(shape)
    is_large = min(height, width) >= _LEAST_SIDE
    return is_large and (dtype in (torch.uint8, torch.bool) or (len(shape) == 3 and height == width))


def _sides(shape: Sequence[int]) -> tuple[int, int, str]:
    """Returns height, width and the order of the axes: ``"HW"``, ``"HWC"``, ``"CHW"``, ``"KHW"`` or ``"KHWC"``."""
    if len(shape) == 2:
        return shape[0], shape[1], "HW"
    if len(shape) == 4:
        return shape[1], shape[2], "KHWC"
    if shape[2] <= _MOST_CHANNELS and min(shape[:2]) >= _LEAST_SIDE:
        return shape[0], shape[1], "HWC"
    return shape[1], shape[2], "CHW" if shape[0] in (1, 3) else "KHW"


def as_rgb(image: np.ndarray) -> np.ndarray:
    """Returns an image as uint8 ``[H, W, 3]``.

    Args:
        image: ``[H, W]``, ``[H, W, C]``, ``[C, H, W]`` with 1 or 3 channels, or a stack of frames ``[K, H, W]`` or
            ``[K, H, W, C]``, of which the last is taken. Bytes are intensities. Other numbers are scaled to the largest
            of the image. Other channels than 1 and 3, or 4 of bytes, are planes of flags, each in its own color.
    """
    *_, order = _sides(image.shape)
    if order[0] == "K":
        image = image[-1]
        order = order[1:]
    if order == "CHW":
        image = np.moveaxis(image, 0, -1)
    if image.ndim == 2:
        image = image[..., None]
    is_bytes = image.dtype == np.uint8
    if not is_bytes:
        scaled = np.nan_to_num(image.astype(np.float32)).clip(0)
        image = scaled * (255.0 / max(float(scaled.max()), 1e-12))
    channels = image.shape[2]
    if channels == 1:
        image = image.repeat(3, 2)
    elif channels != 3 and not (is_bytes and channels == 4):
        largest = image.argmax(2)
        image = _PLANES[largest % len(_PLANES)] * (image.max(2)[..., None] / 255.0)
    return np.ascontiguousarray(image[..., :3].astype(np.uint8))


def _scaled_down(image: np.ndarray) -> np.ndarray:
    factor = -(-max(image.shape[:2]) // _MOST_PIXELS)
    if factor == 1:
        return image
    sums: np.ndarray = image.astype(np.float32)
    for axis in (0, 1):  # the last square of a line may be smaller
        starts = np.arange(0, image.shape[axis], factor)
        widths = np.diff(starts, append=image.shape[axis]).astype(np.float32)
        sums = np.add.reduceat(sums, starts, axis) / (widths[:, None, None] if axis == 0 else widths[:, None])
    return sums.round().astype(np.uint8)


def png_of(image: np.ndarray) -> bytes:
    """Returns uint8 ``[H, W, 3]`` as a PNG file.

    Example:
        >>> png_of(np.zeros((2, 2, 3), np.uint8))[:8]
        b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, _ = image.shape
    lines = np.concatenate((np.zeros((height, 1), np.uint8), image.reshape(height, -1)), axis=1)  # filter 0 of each
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR" + header, b"IDAT" + zlib.compress(lines.tobytes(), 9), b"IEND")
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
