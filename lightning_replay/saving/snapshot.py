# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a tensor that is written to while a save reads it, and which of its rows changed since the last one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_SHIFT = 6  # writes are noted for blocks of 64 rows
# The best of 64 KiB to 4 MiB: neighboring rows share a piece, and each row written at random copies one.
PIECE_BYTES = 256 << 10


class Snapshots:
    """The open snapshots of one tensor, and which of its rows change. Writers call :meth:`keep`.

    Each snapshot has a number, and each block of rows that of the next snapshot when it was last written. What a part
    of the tensor was found to be in a snapshot is its result. It holds until one of its blocks is written, wherever a
    save went, whether it was completed, and whoever else saved since. Methods are called with ``lock`` held.

    Example:
        >>> tensor, snapshots = torch.zeros(1000), Snapshots()
        >>> snapshots.take(tensor).keep_result(0, 2000, "found")
        >>> snapshots.take(tensor).unchanged(0, 2000), snapshots.take(tensor).unchanged(2000, 2000)
        ('found', None)
        >>> snapshots.keep(np.array([17])); snapshots.take(tensor).unchanged(0, 2000) is None
        True
    """

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()
        self._open: list[Snapshot] = []
        self._next = 1  # the number of the next snapshot
        self._written = np.zeros(0, dtype=np.int64)  # Number of the first snapshot with the rows of each block.
        self._all_written = 0  # The same number for every block, if the written rows are not known.
        # By the first byte of a part its length, its result, and the number of the snapshot that this is of.
        self.results: dict[int, tuple[int, Any, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(self, tensor: Tensor) -> Snapshot:
        """Returns a snapshot of a contiguous tensor on any device. :meth:`close` it once it is read."""
        with self.lock:
            snapshot = Snapshot(tensor, self, self._next)
            self._next += 1
            self._open.append(snapshot)
            return snapshot

    def close(self, snapshot: Snapshot) -> None:
        """Ends a snapshot: writes copy nothing for it any more."""
        with self.lock:
            self._open.remove(snapshot)

    def keep(self, slots: slice | np.ndarray | Tensor) -> None:
        """Copies the rows in these slots for every open snapshot, before they are written: ``int64 [n]`` or a slice."""
        if isinstance(slots, Tensor):
            slots = slots.numpy()
        if isinstance(slots, slice):
            blocks: Any = slice(slots.start >> BLOCK_SHIFT, (slots.stop - 1 >> BLOCK_SHIFT) + 1)
            if blocks.stop > len(self._written):
                self._grow(blocks.stop)
            self._written[blocks] = self._next
        elif len(slots):
            blocks = slots >> BLOCK_SHIFT
            try:
                self._written[blocks] = self._next
            except IndexError:  # rarely; to look for the highest block first takes longer than all else
                self._grow(int(blocks.max()) + 1)
                self._written[blocks] = self._next
        for snapshot in self._open:
            snapshot.keep(slots)

    def keep_no_result(self) -> None:
        """Discards all results. Call it before rows may have been written without :meth:`keep`."""
        with self.lock:
            self._all_written = self._next

    def last_write(self, first: int, stop: int) -> int:
        """Returns the number of the first snapshot after the last write to rows ``first`` to below ``stop``."""
        blocks = self._written[first >> BLOCK_SHIFT : (stop - 1 >> BLOCK_SHIFT) + 1]
        return int(max(self._all_written, blocks.max(initial=0)))

    def _grow(self, blocks: int) -> None:
        grown = np.zeros(max(blocks, 2 * len(self._written)), dtype=np.int64)
        grown[: len(self._written)] = self._written
        self._written = grown


class Snapshot:
    """The content of a tensor at the moment this is built, read once, in any order, while the tensor is written.

    Writers call :meth:`keep` before a change: pieces that were not read yet are copied. So a reader holds the lock for
    one piece at a time, and only changed pieces need memory.
    """

    def __init__(self, tensor: Tensor, owner: Snapshots, number: int) -> None:
        self.dtype: torch.dtype = tensor.dtype
        self.shape: torch.Size = tensor.shape
        self._bytes = tensor.view(-1).view(torch.uint8)
        self.nbytes: int = self._bytes.numel()
        self._row_bytes = tensor[0].nbytes if len(tensor) else 0
        self._owner = owner
        self._number = number
        self._is_read = np.zeros(-(-self.nbytes // PIECE_BYTES), dtype=np.bool_)
        self._kept: dict[int, Tensor] = {}

    def keep(self, slots: slice | np.ndarray) -> None:
        """Copies the pieces of these rows that were not read yet."""
        for piece in self._pieces_of(slots):
            if not self._is_read[piece] and piece not in self._kept:
                start = piece * PIECE_BYTES
                self._kept[piece] = self._bytes[start : start + PIECE_BYTES].to("cpu", copy=True)

    def _pieces_of(self, slots: slice | np.ndarray) -> list[int]:
        if not self.nbytes:
            return []
        if isinstance(slots, slice):
            first = slots.start * self._row_bytes
            last = min(slots.stop * self._row_bytes, self.nbytes) - 1
            return list(range(first // PIECE_BYTES, last // PIECE_BYTES + 1))
        # Slots above the snapshot's are ignored. A row lies in one piece or in several.
        first = slots[slots < self.shape[0]].astype(np.int64) * self._row_bytes
        last = (first + self._row_bytes - 1) // PIECE_BYTES
        first = first // PIECE_BYTES
        widest = int((last - first).max(initial=0))
        return np.unique(np.minimum(first[:, None] + np.arange(widest + 1), last[:, None])).tolist()

    def read(self, start: int, target: Tensor) -> None:
        """Copies the content from byte ``start`` on into ``target``, uint8 ``[n]`` on the CPU."""
        position = start
        stop = start + target.numel()
        while position < stop:
            piece, offset = divmod(position, PIECE_BYTES)
            count = min(PIECE_BYTES - offset, stop - position)
            with self._owner.lock:
                part = target[position - start : position - start + count]
                kept = self._kept.get(piece)
                part.copy_(self._bytes[position : position + count] if kept is None else kept[offset : offset + count])
                if count == min(PIECE_BYTES, self.nbytes - piece * PIECE_BYTES):
                    self._is_read[piece] = True
                    self._kept.pop(piece, None)
            position += count

    def unchanged(self, start: int, count: int) -> Any | None:
        """Returns what :meth:`keep_result` kept of these bytes, or ``None`` if they may have changed since."""
        rows = start // self._row_bytes, -(-(start + count) // self._row_bytes)
        with self._owner.lock:
            length, result, number = self._owner.results.get(start, (0, None, 0))
            # The last write came before both snapshots, so that they hold the same.
            is_kept = self._owner.last_write(*rows) <= min(self._number, number)
        return result if is_kept and length == count else None

    def skip(self, start: int, count: int) -> None:
        """Counts these bytes as read: writers copy them no more."""
        stop = start + count
        with self._owner.lock:
            pieces = slice(-(-start // PIECE_BYTES), None if stop == self.nbytes else stop // PIECE_BYTES)
            self._is_read[pieces] = True
            for piece in range(*pieces.indices(len(self._is_read))):
                self._kept.pop(piece, None)

    def keep_result(self, start: int, count: int, result: object) -> None:
        """Keeps what the bytes ``[start, start + count)`` of this snapshot were found to be, for later snapshots."""
        with self._owner.lock:
            if self._number > self._owner.results.get(start, (0, None, 0))[2]:  # not over that of a newer snapshot
                self._owner.results[start] = count, result, self._number

    def tensor(self) -> Tensor:
        """Returns a copy of the whole snapshot."""
        target = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.read(0, target)
        return target.view(self.dtype).view(self.shape)
