# SPDX-License-Identifier: Apache-2.0
"""Images of stored rows as arrays of red, green and blue, and any array as a PNG file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_replay.report.reading import PackedColumns, StoredRows
from lightning_replay.storage.row_layout import Key

_FRAMES: Key = ("frames_of_stacks",)  # see lightning_replay.storage.frames.stack_columns
_LEAST_SIDE = 5  # pixels; smaller arrays are no images
_MOST_PIXELS = 160  # of a side; a page shows 84
_MOST_CHANNELS = 10  # of planes such as MinAtar's
# of planes of flags, one for each kind of object
_PLANES = np.array(
    [
        *((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0)),
        *((86, 180, 233), (240, 228, 66), (160, 160, 160), (120, 60, 160), (255, 255, 255)),
    ],
    dtype=np.float32,
)


class RowImages(NamedTuple):
    """Images of rows: a column of the rows, or the last frame of each observation where frames are stored once."""

    packed: PackedColumns
    key: Key
    frames: StoredRows | None
    frame_shape: tuple[int, ...]

    def of_rows(self, slots: np.ndarray) -> list[np.ndarray]:
        """Returns the images of rows, uint8 ``[H, W, 3]`` each, by their slots, int64 ``[n]``.

        Larger ones than 160 pixels are scaled down by a whole number, to the means of squares.
        """
        if not len(slots):
            return []
        values = self.packed.of_rows(self.key, slots)
        if self.frames is not None:
            numbers = values[:, values.shape[1] // 2 - 1].astype(np.int64)  # the observation's frames come first
            values = self.frames.select(numbers).numpy().reshape(-1, *self.frame_shape)
        return [_scaled_down(as_rgb(image)) for image in values]


def images_of(storage: Mapping[str, Any], packed: PackedColumns) -> RowImages | None:
    """Returns the images of stored rows; ``None`` if no column holds images."""
    if storage.get("frames") is not None and _FRAMES in packed.layout.columns:
        shape = tuple(storage["frame_shape"])
        return RowImages(packed, _FRAMES, StoredRows(storage["frames"]), shape)
    for key, (dtype, shape) in packed.layout.columns.items():
        if key[0] != "next" and _holds_images(dtype, tuple(shape)):
            return RowImages(packed, key, None, tuple(shape))
    return None


def _holds_images(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Returns whether rows of a column are images: bytes or flags, or planes of floats with few channels."""
    if len(shape) not in (2, 3, 4):
        return False
    height, width, _ = _sides(shape)
    is_large = min(height, width) >= _LEAST_SIDE
    return is_large and (dtype in (torch.uint8, torch.bool) or (len(shape) == 3 and height == width))


def _sides(shape: tuple[int, ...]) -> tuple[int, int, str]:
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
            ``[K, H, W, C]``, of which the last is taken. Bytes are intensities; other numbers are scaled to the largest
            of the image. Other channels than 1 and 3, or 4 of bytes, are planes of flags, each in a
            colour of its own.
    """
    *_, order = _sides(image.shape)
    if order[0] == "K":
        image, order = image[-1], order[1:]
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
    for axis in (0, 1):
        starts = np.arange(0, image.shape[axis], factor)
        widths = np.diff(starts, append=image.shape[axis]).astype(np.float32)
        sums = np.add.reduceat(sums, starts, axis) / np.expand_dims(widths, [one for one in range(3) if one != axis])
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
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
