# SPDX-License-Identifier: Apache-2.0
"""Frames kept once each by counted references, found again by hash and then by every byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_replay.free_memory import allocate_rows
from lightning_replay.saving.snapshot import Snapshots
from lightning_replay.storage import frame_kernels as loops

_WORDS = ((8, torch.int64, np.uint64), (4, torch.int32, np.uint32), (2, torch.int16, np.uint16))


class Found(NamedTuple):
    """Frames of two stacks ``[N, k, ...]`` each, as they were found in a pool."""

    frames: np.ndarray  # int32 [N, 2 k], the place in the pool, or -1 - number for a new frame
    sources: np.ndarray  #: int64 ``[new]``, the first position of each new frame in the flattened stacks.
    hashes: np.ndarray  # int64 [new]


FrameIndex = tuple[np.ndarray, np.ndarray, np.ndarray]  # hashes, heads and following, as in the compiled loops


class TorchSearch:
    """Searches a pool, uint8 ``[F, bytes]``, on any device: hashes and comparisons by torch, chains by the CPU."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._dtype = next((dtype for size, dtype, _ in _WORDS if pool.shape[1] % size == 0), torch.uint8)
        words = pool.shape[1] // self._dtype.itemsize
        generator = torch.Generator().manual_seed(words)
        factors = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator, dtype=torch.int64, device="cpu") | 1
        self._factors = factors.to(pool.device)

    def hash_each(self, frames: Tensor) -> np.ndarray:
        """Returns hashes, int64 ``[M]``, of frames, uint8 ``[M, bytes]``."""
        words = frames.contiguous().view(self._dtype).to(torch.int64)
        mixed = ((words ^ (words >> 29)) * self._factors).sum(1)
        return (mixed ^ (mixed >> 32)).cpu().numpy()

    def find(self, first: Tensor, second: Tensor, index: FrameIndex) -> Found:
        """Looks up the frames of two stacks, uint8 ``[N, k, ...]``."""
        given = self._flat(first, second)
        keys = self.hash_each(given).tolist()
        pairs: list[tuple[int, int]] = []

        def presumed(own: int, other: int) -> bool:
            pairs.append((own, other))
            return True

        # Equal hashes nearly always mean equal frames: all are compared at once, and one by one only if one was not.
        frames, sources = _matched(keys, index, presumed)
        own, other = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2).to(given.device).unbind(1)
        is_stored = (other > 0).unsqueeze(1)
        known = torch.where(is_stored, self._pool[other.clamp(min=0)], given[(-1 - other).clamp(min=0)])
        if not torch.equal(given[own], known):
            frames, sources = _matched(
                keys, index, lambda own, at: torch.equal(given[own], self._pool[at] if at > 0 else given[-1 - at])
            )
        hashes = np.array([keys[place] for place in sources], dtype=np.int64)
        return Found(frames.reshape(len(first), -1), np.array(sources, dtype=np.int64), hashes)

    def store(self, frames: np.ndarray, found: Found, first: Tensor, second: Tensor) -> None:
        """Copies the new frames of two stacks into the pool at ``frames``, int32 ``[new]``."""
        at, sources = (torch.from_numpy(part).to(self._pool.device, torch.int64) for part in (frames, found.sources))
        self._pool[at] = self._flat(first, second)[sources]

    def _flat(self, first: Tensor, second: Tensor) -> Tensor:
        given = torch.cat([stack.flatten(2) for stack in (first, second)], 1)
        return given.flatten(0, 1).to(self._pool.device)

    def gather(self, frames: Tensor, rows: Tensor) -> Tensor:
        """Returns the two stacks, uint8 ``[2 * N * k * bytes]``, of ``rows``, int64 ``[N]``, of int32 ``[M, 2 k]``."""
        stacks_first = frames.index_select(0, rows.to(frames.device)).unflatten(1, (2, -1)).transpose(0, 1)
        return self._pool.index_select(0, stacks_first.reshape(-1)).flatten()


def _matched(keys: list[int], index: FrameIndex, is_equal: Callable[[int, int], bool]) -> tuple[np.ndarray, list[int]]:
    # Returns frames and sources of Found. is_equal(own, other) compares a given frame with another one. If other is
    # above 0, it is a place in the pool. If it is negative, -1 - other is the position of an earlier given frame.
    hashes, heads, following = index
    frames = np.empty(len(keys), dtype=np.int32)
    sources: list[int] = []
    numbers: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        at = int(heads[key & (heads.size - 1)])
        while at and not (int(hashes[at]) == key and is_equal(place, at)):
            at = int(following[at])
        if not at:
            new = numbers.setdefault(key, [])
            at = next((-1 - number for number in new if is_equal(place, -1 - sources[number])), 0)
            if not at:
                new.append(len(sources))
                sources.append(place)
                at = -len(sources)
        frames[place] = at
    return frames, sources


class NumbaSearch:
    """Searches a pool, uint8 ``[F, bytes]``, on the CPU with compiled loops."""

    def __init__(self, pool: Tensor) -> None:
        self._dtype = next((dtype for size, _, dtype in _WORDS if pool.shape[1] % size == 0), np.uint8)
        self._pool = self._words(pool)
        self._frame_bytes = pool.shape[1]

    def _words(self, frames: Tensor) -> np.ndarray:
        flat = frames.cpu() if frames.ndim == 2 else frames.cpu().reshape(*frames.shape[:2], -1)
        words = np.ascontiguousarray(flat.numpy()).view(self._dtype)
        return words if words.flags.aligned else words.copy()

    def hash_each(self, frames: Tensor) -> np.ndarray:
        return loops.hash_each(self._words(frames))

    def find(self, first: Tensor, second: Tensor, index: FrameIndex) -> Found:
        return Found(*loops.find(self._words(first), self._words(second), self._pool, *index))

    def store(self, frames: np.ndarray, found: Found, first: Tensor, second: Tensor) -> None:
        loops.store(frames, found.sources, self._words(first), self._words(second), self._pool)

    def gather(self, frames: Tensor, rows: Tensor) -> Tensor:
        stacks = torch.empty(rows.shape[0] * frames.shape[1] * self._frame_bytes, dtype=torch.uint8, device="cpu")
        loops.gather(rows.numpy(), frames.numpy(), self._pool, stacks.numpy().view(self._dtype))
        return stacks


class FramePool:
    """Frames by number, no two alike, each kept while something refers to it.

    Frames are recognized by their bytes alone, across trajectories as well: a hash finds candidates, of which every
    byte is compared. Frame 0 is none. Its bytes are 0. Memory for ``capacity`` frames of ``shape``, uint8, and
    ``beside`` bytes for others must be free, see :func:`~lightning_replay.free_memory.allocate_rows`.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        capacity: int,
        shape: torch.Size,
        device: str | torch.device = "cpu",
        memmap: str | None = None,
        beside: int = 0,
    ) -> None:
        self.capacity = capacity
        self.shape = shape
        self.frame_bytes: int = shape.numel()
        count = capacity + 1
        breakdown = f"{count:,} frames of {self.frame_bytes:,} bytes, {beside:,} bytes of rows and other frames"
        num_words, device = -(-count * self.frame_bytes // 8), torch.device(device)
        words = allocate_rows(num_words, 1, device, memmap, breakdown, as_written=True, beside=beside)
        self.frames: Tensor = words.view(-1).view(torch.uint8)[: count * self.frame_bytes].view(count, self.frame_bytes)
        self.frames[0] = 0
        self.snapshots: Snapshots = Snapshots()
        self._written = 1  # frames up to the highest that was ever held. Memory is taken as they are written
        self.references: np.ndarray = np.zeros(count, dtype=np.int32)
        # Frames by a hash of their bytes: chains in buckets, 20 bytes a frame or a little more.
        heads = np.zeros(1 << max(count - 1, 1).bit_length(), dtype=np.int32)
        self._index: FrameIndex = (np.zeros(count, dtype=np.int64), heads, np.zeros(count, dtype=np.int32))
        self._search = (NumbaSearch if self.frames.device.type == "cpu" else TorchSearch)(self.frames)
        self._free = np.arange(capacity, 0, -1, dtype=np.int32)  # a stack: frames used before are used again first
        self.num_free: int = capacity

    @property
    def num_stored(self) -> int:
        """Frames that something refers to, all different."""
        return self.capacity - self.num_free

    @property
    def num_used(self) -> int:
        """Frames up to the highest that is held, frame 0 included, which a save has to hold."""
        held = np.flatnonzero(self.references)
        return int(held[-1]) + 1 if len(held) else 1

    @property
    def bytes_of_frames(self) -> int:
        """Bytes of frames, on the CPU only of frames written so far."""
        frames = self._written if self.frames.device.type == "cpu" else len(self.frames)
        return -(-frames * self.frame_bytes // 8) * 8

    @property
    def nbytes(self) -> int:
        """Bytes of frames, references, free list and index. Of frames on the CPU, only frames written so far count."""
        return self.bytes_of_frames + sum(array.nbytes for array in (self.references, self._free, *self._index))

    def find(self, first: Tensor, second: Tensor) -> Found:
        """Returns which frames of two stacks, uint8 ``[N, k, *shape]`` each, are held already."""
        return self._search.find(first, second, self._index)

    def missing(self, found: Found, given_up: np.ndarray) -> int:
        """Returns how many frames lack for :meth:`replace` with the same arguments, or 0 if they fit."""
        lacking = len(found.sources) - self.num_free
        if lacking > 0:
            # Counted as if the rows were replaced, and back.
            held, left = found.frames.ravel(), given_up.ravel()
            loops.count(held, 1, self.references)
            lacking -= loops.count(left, -1, self.references)
            loops.count(left, 1, self.references)
            loops.count(held, -1, self.references)
        return max(lacking, 0)

    def check_room(self, found: Found, given_up: np.ndarray) -> None:
        """Raises ``RuntimeError`` if too few frames are free for :meth:`replace` with these arguments."""
        lacking = self.missing(found, given_up)
        if lacking:
            raise RuntimeError(
                f"{lacking} more frames are needed than the {self.capacity:,} the pool has room for; nothing was "
                "written. Release rows first, or raise frame_capacity"
            )

    def replace(self, found: Found, first: Tensor, second: Tensor, given_up: np.ndarray) -> np.ndarray:
        """Stores two stacks ``[N, k, *shape]`` and returns their frames, int32 ``[N, 2 k]``.

        ``found`` is of :meth:`find`, with nothing changed since. The frames ``given_up``, int32, lose a reference each.
        Too few free ones are a ``RuntimeError``, and nothing has changed.
        """
        self.check_room(found, given_up)
        count = len(found.sources)
        # Counted before others are released: a frame that new rows share with leaving ones stays.
        loops.count(found.frames.ravel(), 1, self.references)
        self.release(given_up)
        if not count:
            return found.frames
        self.num_free -= count
        new = self._free[self.num_free : self.num_free + count][::-1].copy()
        with self.snapshots.lock:
            self.snapshots.keep(new)
        self._search.store(new, found, first, second)
        self._written = max(self._written, int(new.max()) + 1)
        loops.enter(new, found.hashes, *self._index)
        is_new = found.frames < 0
        frames = np.where(is_new, new[np.where(is_new, -1 - found.frames, 0)], found.frames)
        loops.count(frames[is_new], 1, self.references)
        return frames

    def release(self, frames: np.ndarray) -> None:
        """Removes one reference to each of ``frames``, int32 of any shape. 0 is none."""
        self.num_free = loops.let_go(frames.ravel(), self.references, self._free, self.num_free, *self._index)

    def gather_stacks(self, frames: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Returns both stacks, uint8 ``[N, k, *shape]``, of ``rows``, int64 ``[N]``, of frames, int32 ``[M, 2 k]``."""
        return self._search.gather(frames, rows).view(2, rows.shape[0], frames.shape[1] // 2, *self.shape).unbind()

    def clear(self) -> None:
        self.references.fill(0)
        self._index[1].fill(0)
        self._free[:] = np.arange(self.capacity, 0, -1, dtype=np.int32)
        self.num_free = self.capacity

    def restore(self, frames: Tensor, referred: np.ndarray) -> None:
        """Restores frames, uint8 ``[num_used, bytes]``, and the references to them, int32 ``[M]``. 0 is none."""
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
            loops.enter(part, hashes, *self._index)
