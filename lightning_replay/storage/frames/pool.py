# SPDX-License-Identifier: Apache-2.0
"""Frames kept once each, by counted references."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_replay.memory import allocate_rows
from lightning_replay.saving.snapshot import Snapshots
from lightning_replay.storage.frames import numba_kernels as loops
from lightning_replay.storage.frames.frame_index import Found, FrameIndex, search_for


class FramePool:
    """Frames by number, no two alike, each kept while something refers to it.

    Frames are recognised by their bytes alone, across trajectories as well: a hash finds candidates, of which every
    byte is compared. Frame 0 is none; its bytes are 0.

    Args:
        capacity: most frames.
        shape: of a frame, uint8.
        device: where they are kept.
        memmap: a directory for a scratch file that holds them.

    Raises:
        MemoryError: they do not fit.

    Example:
        >>> pool = FramePool(3, torch.Size([2, 2]))
        >>> stack = torch.tensor([5, 5, 6], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 2, 2)
        >>> pool.replace(pool.find(stack, stack.flip(1)), stack, stack.flip(1), np.zeros((1, 6), dtype=np.int32))
        array([[1, 1, 2, 2, 1, 1]], dtype=int32)
        >>> pool.num_held, pool.references
        (2, array([0, 4, 2, 0], dtype=int32))
    """

    @torch.inference_mode(False)
    def __init__(
        self, capacity: int, shape: torch.Size, device: str | torch.device = "cpu", memmap: str | None = None
    ) -> None:
        self.capacity = capacity
        self.shape = shape
        self.frame_bytes: int = shape.numel()
        count = capacity + 1
        breakdown = f"{count:,} frames of {self.frame_bytes:,} bytes"
        words = allocate_rows(
            -(-count * self.frame_bytes // 8), 1, torch.device(device), memmap, breakdown, as_written=True
        )
        self.frames: Tensor = words.view(-1).view(torch.uint8)[: count * self.frame_bytes].view(count, self.frame_bytes)
        self.frames[0] = 0
        self.snapshots: Snapshots = Snapshots()
        self._written = 1  # frames up to the highest that was ever held; memory is taken as they are written
        self.references: np.ndarray = np.zeros(count, dtype=np.int32)
        self._index = FrameIndex(count)
        self._search = search_for(self.frames)
        self._free = np.arange(capacity, 0, -1, dtype=np.int32)  # a stack: frames used before are used again first
        self.num_free: int = capacity

    @property
    def num_held(self) -> int:
        """Frames that something refers to, all different."""
        return self.capacity - self.num_free

    @property
    def num_used(self) -> int:
        """Frames up to the highest that is held, frame 0 included, which a save has to hold."""
        held = np.flatnonzero(self.references)
        return int(held[-1]) + 1 if len(held) else 1

    @property
    def nbytes(self) -> int:
        """Bytes of frames, references, free list and index; of frames on the CPU those written so far."""
        return self._bytes_of(self._written if self.frames.device.type == "cpu" else len(self.frames))

    @property
    def most_nbytes(self) -> int:
        """:attr:`nbytes` of a full pool."""
        return self._bytes_of(len(self.frames))

    def _bytes_of(self, frames: int) -> int:
        kept_beside = self.references.nbytes + self._free.nbytes + self._index.nbytes
        return -(-frames * self.frame_bytes // 8) * 8 + kept_beside

    def find(self, first: Tensor, second: Tensor) -> Found:
        """Returns which frames of two stacks, uint8 ``[N, k, *shape]`` each, are held already."""
        return self._search.find(first, second, self._index)

    def missing(self, found: Found, given_up: np.ndarray) -> int:
        """Returns how many frames lack for :meth:`replace` with the same arguments; 0 if they fit."""
        lacking = len(found.sources) - self.num_free
        if lacking > 0:
            lacking -= loops.count_freed(found.frames.ravel(), given_up.ravel(), self.references)
        return max(lacking, 0)

    def replace(self, found: Found, first: Tensor, second: Tensor, given_up: np.ndarray) -> np.ndarray:
        """Stores two stacks ``[N, k, *shape]`` in place of rows that referred to ``given_up``.

        Args:
            found: of :meth:`find`, with nothing changed since.
            given_up: int32, frames of rows that are overwritten, which lose a reference each; 0 is none.

        Returns:
            Their frames, int32 ``[N, 2 k]``; too few free ones are a ``RuntimeError``, and nothing has changed.
        """
        lacking = self.missing(found, given_up)
        if lacking:
            raise RuntimeError(
                f"{lacking} more frames are needed than the {self.capacity:,} the pool has room for; nothing was "
                "written. Release rows first, or raise frame_capacity"
            )
        count = len(found.sources)
        loops.hold(found.frames.ravel(), self.references)
        self.release(given_up)
        if not count:
            return found.frames
        self.num_free -= count
        new = self._free[self.num_free : self.num_free + count][::-1].copy()
        with self.snapshots.lock:
            self.snapshots.keep(new)
        self._search.store(new, found, first, second)
        self._written = max(self._written, int(new.max()) + 1)
        loops.enter(new, found.hashes, *self._index.arrays)
        is_new = found.frames < 0
        frames = np.where(is_new, new[np.where(is_new, -1 - found.frames, 0)], found.frames)
        loops.hold(frames[is_new], self.references)
        return frames

    def release(self, frames: np.ndarray) -> None:
        """Removes one reference to each of ``frames``, int32 of any shape; 0 is none."""
        self.num_free = loops.let_go(frames.ravel(), self.references, self._free, self.num_free, *self._index.arrays)

    def gather(self, frames: Tensor) -> Tensor:
        """Returns the frames of int32 ``[...]``, on the device, uint8 ``[..., *shape]``; one gather."""
        drawn = self.frames.index_select(0, frames.reshape(-1))
        return drawn.view(*frames.shape, *self.shape)

    def gather_stacks(self, frames: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Returns both stacks, uint8 ``[N, k, *shape]``, of ``rows``, int64 ``[N]``, of frames, int32 ``[M, 2 k]``."""
        return self._search.gather(frames, rows).view(2, rows.shape[0], frames.shape[1] // 2, *self.shape).unbind()

    def clear(self) -> None:
        self.references.fill(0)
        self._index.clear()
        self._free[:] = np.arange(self.capacity, 0, -1, dtype=np.int32)
        self.num_free = self.capacity

    def restore(self, frames: Tensor, referred: np.ndarray) -> None:
        """Restores frames that were saved.

        Args:
            frames: uint8 ``[num_used, bytes]``.
            referred: int32 ``[M]``, one for every reference; 0 is none.
        """
        self.clear()
        with self.snapshots.lock:
            self.snapshots.keep(slice(0, self._written))
            self.snapshots.keep_no_result()  # of frames above these, too
        self.frames[: len(frames)] = frames.to(self.frames.device)
        self._written = max(self._written, len(frames))
        self.references += np.bincount(referred, minlength=len(self.references)).astype(np.int32)
        self.references[0] = 0
        held = np.flatnonzero(self.references).astype(np.int32)
        free = np.flatnonzero(self.references[1:] == 0)[::-1].astype(np.int32) + 1
        self._free[: len(free)] = free
        self.num_free = len(free)
        for part in np.array_split(held, max(1, len(held) // 4096)):
            at = torch.from_numpy(part).to(self.frames.device)
            hashes = self._search.hash_each(self.frames.index_select(0, at))
            loops.enter(part, hashes, *self._index.arrays)
