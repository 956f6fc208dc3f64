# SPDX-License-Identifier: Apache-2.0
"""Snapshots of arrays that are written to while a save reads them, and which pages have changed since the last one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


# the best of 64 KiB to 4 MiB: neighbouring rows share a piece, and each row written at random copies one
PIECE_BYTES = 256 << 10


class Snapshot:
    """The content of a tensor at the moment this is built, read once, in any order, while the tensor is written.

    Writers call :meth:`keep` before a change: pieces that were not read yet are copied. So a reader holds the lock for
    one piece at a time, and only changed pieces need memory.

    Args:
        tensor: contiguous, on any device.
        lock: held by writers from :meth:`keep` to the end of their write, and here for the copy of a piece.
        changes: of the tensor.
    """

    def __init__(self, tensor: Tensor, lock: threading.RLock, changes: Changes) -> None:
        self.dtype: torch.dtype = tensor.dtype
        self.shape: torch.Size = tensor.shape
        self._bytes = tensor.view(-1).view(torch.uint8)
        self._row_bytes = tensor[0].nbytes if len(tensor) else 0
        self._lock = lock
        self._changes, self._moment = changes, changes.next_moment()
        self._is_read = np.zeros(-(-self.nbytes // PIECE_BYTES), dtype=np.bool_)
        self._kept: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def keep(self, slots: slice | np.ndarray) -> None:
        """Copies the rows in slots that are changed next, a slice or int64 ``[n]``; others are ignored."""
        for piece in self._pieces_of(slots):
            if not self._is_read[piece] and piece not in self._kept:
                start = piece * PIECE_BYTES
                self._kept[piece] = self._bytes[start : start + PIECE_BYTES].to("cpu", copy=True)

    def _pieces_of(self, slots: slice | np.ndarray) -> list[int]:
        if not self.nbytes:
            return []
        if isinstance(slots, slice):
            first, last = slots.start * self._row_bytes, min(slots.stop * self._row_bytes, self.nbytes) - 1
            return list(range(first // PIECE_BYTES, last // PIECE_BYTES + 1))
        first = slots[slots < self.shape[0]].astype(np.int64) * self._row_bytes
        last = (first + self._row_bytes - 1) // PIECE_BYTES
        first = first // PIECE_BYTES
        widest = int((last - first).max(initial=0))
        return np.unique(np.minimum(first[:, None] + np.arange(widest + 1), last[:, None])).tolist()

    def read(self, start: int, target: Tensor) -> None:
        """Copies the content from byte ``start`` on into ``target``, uint8 ``[n]`` on the CPU."""
        position, stop = start, start + target.numel()
        while position < stop:
            piece, offset = divmod(position, PIECE_BYTES)
            count = min(PIECE_BYTES - offset, stop - position)
            with self._lock:
                part = target[position - start : position - start + count]
                kept = self._kept.get(piece)
                part.copy_(self._bytes[position : position + count] if kept is None else kept[offset : offset + count])
                if count == min(PIECE_BYTES, self.nbytes - piece * PIECE_BYTES):
                    self._is_read[piece] = True
                    self._kept.pop(piece, None)
            position += count

    def unchanged(self, start: int, count: int) -> Any | None:
        """Returns what :meth:`keep_result` kept of these bytes; ``None`` if they may have changed since."""
        with self._lock:
            length, result = self._changes.result(start, self._moment, *self._rows_of(start, count)) or (0, None)
        return result if length == count else None

    def skip(self, start: int, count: int) -> None:
        """Counts these bytes as read: writers copy them no more."""
        stop = start + count
        with self._lock:
            pieces = slice(-(-start // PIECE_BYTES), None if stop == self.nbytes else stop // PIECE_BYTES)
            self._is_read[pieces] = True
            for piece in range(*pieces.indices(len(self._is_read))):
                self._kept.pop(piece, None)

    def keep_result(self, start: int, count: int, result: Any) -> None:
        """Keeps what the bytes ``[start, start + count)`` of this snapshot were found to be, for later snapshots."""
        with self._lock:
            self._changes.keep_result(start, (count, result), self._moment)

    def _rows_of(self, start: int, count: int) -> tuple[int, int]:
        return start // self._row_bytes, -(-(start + count) // self._row_bytes)

    def tensor(self) -> Tensor:
        target = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.read(0, target)
        return target.view(self.dtype).view(self.shape)


class Snapshots:
    """The open snapshots of one tensor, and which of its rows change; writers call :meth:`keep`."""

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()
        self._open: list[Snapshot] = []
        self._changes = Changes()

    def __bool__(self) -> bool:
        return bool(self._open)

    def take(self, tensor: Tensor) -> Snapshot:
        """Returns a snapshot of a tensor; :meth:`close` it once it is read."""
        with self.lock:
            snapshot = Snapshot(tensor, self.lock, self._changes)
            self._open.append(snapshot)
            return snapshot

    def close(self, snapshot: Snapshot) -> None:
        """Ends a snapshot: writers copy nothing for it any more."""
        with self.lock:
            self._open.remove(snapshot)

    def keep(self, slots: slice | np.ndarray | Tensor) -> None:
        """Copies the rows in these slots for every open snapshot; call it with the lock held, before a write."""
        if isinstance(slots, Tensor):
            if not slots.is_cpu and not self._open:
                self._changes.write_any()  # which rows these are would wait for the device
                return
            slots = slots.cpu().numpy()
        self._changes.write(slots)
        for snapshot in self._open:
            snapshot.keep(slots)

    def keep_no_result(self) -> None:
        """Discards what saves found of any rows; before rows may have been written without :meth:`keep`."""
        with self.lock:
            self._changes.write_any()
