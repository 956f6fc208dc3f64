# SPDX-License-Identifier: Apache-2.0
"""Search for frames of new stacks that are stored already: by hash, and then by every byte."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_replay.storage.frames import numba_kernels as loops

_WORDS = ((8, torch.int64, np.uint64), (4, torch.int32, np.uint32), (2, torch.int16, np.uint16))


class Found(NamedTuple):
    """Frames of two stacks ``[N, k, ...]`` each, as they were found in a pool.

    Attributes:
        frames: int32 ``[N, 2 k]``, the place in the pool, or ``-1 - number`` for a new frame.
        sources: int64 ``[new]``, where each new one comes first in it, flattened.
        hashes: int64 ``[new]``.
    """

    frames: np.ndarray
    sources: np.ndarray
    hashes: np.ndarray


class FrameIndex:
    """Frames of a pool by a hash of their bytes: chains in buckets, 20 bytes a frame or a little more.

    Args:
        count: frames of the pool; frame 0 is none.
    """

    def __init__(self, count: int) -> None:
        self.hashes: np.ndarray = np.zeros(count, dtype=np.int64)
        self.heads: np.ndarray = np.zeros(1 << max(count - 1, 1).bit_length(), dtype=np.int32)
        self.following: np.ndarray = np.zeros(count, dtype=np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.hashes, self.heads, self.following

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def chain(self, key: int) -> list[int]:
        """Returns the frames with this hash."""
        found, frame = [], int(self.heads[key & (self.heads.size - 1)])
        while frame:
            if int(self.hashes[frame]) == key:
                found.append(frame)
            frame = int(self.following[frame])
        return found

    def clear(self) -> None:
        self.heads.fill(0)


class TorchSearch:
    """Searches on any device: hashes and comparisons by torch, chains by the CPU.

    Args:
        pool: uint8 ``[F, bytes]``.
    """

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
        rows, depth = first.shape[:2]
        given = torch.cat([stack.reshape(rows, depth, -1) for stack in (first, second)], 1)
        given = given.reshape(rows * 2 * depth, -1).to(self._pool.device)
        keys = self.hash_each(given).tolist()
        # Equal hashes nearly always mean equal frames: all are compared at once, and one by one only if one was not.
        found, stored, own = self._match(given, keys, index, careful=False)
        stored_at, own_at = (
            torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2) for pairs in (stored, own)
        )
        stored_at, own_at = stored_at.to(given.device), own_at.to(given.device)
        if not (
            torch.equal(given[stored_at[:, 0]], self._pool[stored_at[:, 1]])
            and torch.equal(given[own_at[:, 0]], given[own_at[:, 1]])
        ):
            found, _, _ = self._match(given, keys, index, careful=True)
        return Found(found.frames.reshape(rows, 2 * depth), found.sources, found.hashes)

    def _match(
        self, given: Tensor, keys: list[int], index: FrameIndex, *, careful: bool
    ) -> tuple[Found, list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns also the pairs of given frames and equal ones in the pool, and of those given before."""
        frames = np.empty(len(keys), dtype=np.int32)
        sources: list[int] = []
        numbers: dict[int, list[int]] = {}
        stored: list[tuple[int, int]] = []
        own: list[tuple[int, int]] = []
        for place, key in enumerate(keys):
            at = next((at for at in index.chain(key) if not careful or torch.equal(given[place], self._pool[at])), 0)
            if at:
                frames[place] = at
                stored.append((place, at))
                continue
            same = (
                number
                for number in numbers.get(key, ())
                if not careful or torch.equal(given[place], given[sources[number]])
            )
            number = next(same, len(sources))
            if number == len(sources):
                sources.append(place)
                numbers.setdefault(key, []).append(number)
            else:
                own.append((place, sources[number]))
            frames[place] = -1 - number
        hashes = np.array([keys[place] for place in sources], dtype=np.int64)
        return Found(frames, np.array(sources, dtype=np.int64), hashes), stored, own

    def store(self, frames: np.ndarray, found: Found, first: Tensor, second: Tensor) -> None:
        """Copies the new frames of two stacks into the pool at ``frames``, int32 ``[new]``."""
        depth = first.shape[1]
        row, place = (torch.from_numpy(part).to(first.device) for part in np.divmod(found.sources, 2 * depth))
        is_first = (place < depth).view(-1, *[1] * (first.ndim - 2))
        new = torch.where(is_first, first[row, place % depth], second[row, place % depth])
        at = torch.from_numpy(frames).to(self._pool.device, torch.int64)
        self._pool[at] = new.reshape(len(frames), -1).to(self._pool.device)

    def gather(self, frames: Tensor, rows: Tensor) -> Tensor:
        """Returns the two stacks, uint8 ``[2 * N * k * bytes]``, of ``rows``, int64 ``[N]``, of int32 ``[M, 2 k]``."""
        stacks_first = frames.index_select(0, rows.to(frames.device)).unflatten(1, (2, -1)).transpose(0, 1)
        return self._pool.index_select(0, stacks_first.reshape(-1)).flatten()


class NumbaSearch:
    """Searches on the CPU with compiled loops.

    Args:
        pool: uint8 ``[F, bytes]``.
    """

    def __init__(self, pool: Tensor) -> None:
        self._dtype = next((dtype for size, _, dtype in _WORDS if pool.shape[1] % size == 0), np.uint8)
        self._pool = self._words(pool)
        self._frame_bytes = pool.shape[1]

    def _words(self, frames: Tensor) -> np.ndarray:
        """Returns uint8 ``[..., bytes]`` as the widest words that divide them."""
        words = np.ascontiguousarray(frames.numpy()).view(self._dtype)
        return words if words.flags.aligned else words.copy()

    def _stack_words(self, stack: Tensor) -> np.ndarray:
        return self._words(stack.cpu().reshape(*stack.shape[:2], -1))

    def hash_each(self, frames: Tensor) -> np.ndarray:
        """Returns hashes, int64 ``[M]``, of frames, uint8 ``[M, bytes]``."""
        return loops.hash_each(self._words(frames))

    def find(self, first: Tensor, second: Tensor, index: FrameIndex) -> Found:
        """Looks up the frames of two stacks, uint8 ``[N, k, ...]``."""
        return Found(*loops.find(self._stack_words(first), self._stack_words(second), self._pool, *index.arrays))

    def store(self, frames: np.ndarray, found: Found, first: Tensor, second: Tensor) -> None:
        """Copies the new frames of two stacks into the pool at ``frames``, int32 ``[new]``."""
        loops.store(frames, found.sources, self._stack_words(first), self._stack_words(second), self._pool)

    def gather(self, frames: Tensor, rows: Tensor) -> Tensor:
        """Returns the two stacks, uint8 ``[2 * N * k * bytes]``, of ``rows``, int64 ``[N]``, of int32 ``[M, 2 k]``."""
        stacks = torch.empty(rows.shape[0] * frames.shape[1] * self._frame_bytes, dtype=torch.uint8, device="cpu")
        loops.gather(rows.numpy(), frames.numpy(), self._pool, stacks.numpy().view(self._dtype))
        return stacks


def search_for(pool: Tensor) -> TorchSearch | NumbaSearch:
    return NumbaSearch(pool) if pool.device.type == "cpu" else TorchSearch(pool)
