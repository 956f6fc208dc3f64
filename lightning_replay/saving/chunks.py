# SPDX-License-Identifier: Apache-2.0
"""Large tensors as files of a fixed size, so that a save shares those an earlier one already holds."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import stat
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_replay.free_memory import allocate_rows, free_bytes
from lightning_replay.saving.files import DamagedFileError, check_regular, replace_file
from lightning_replay.saving.snapshot import Snapshot, Snapshots
from lightning_replay.saving.spec import DTYPES

logger: logging.Logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20  # Sizes up to 32 MiB are as fast for a whole save; a new row writes least with 4 MiB.
CHUNK_SUFFIX = ".chunk"
_THREADS = min(4, os.cpu_count() or 1)


class Fingerprint(NamedTuple):
    """Length and hash of the content of a file, as a manifest lists them."""

    bytes: int
    blake2b: str


class Chunk(NamedTuple):
    """A chunk file of a save, ``linked`` if an earlier save holds the same file."""

    name: str
    fingerprint: Fingerprint
    linked: bool


class ChunkedTensor(NamedTuple):
    """A tensor in chunk files, with the expected size and hash of each."""

    dtype: torch.dtype
    shape: torch.Size
    files: list[tuple[Path, Mapping[str, Any]]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize  # torch.Size.numel would wrap around


def write_chunks(
    directory: Path, tensors: Mapping[str, Tensor | Snapshot], earlier: Mapping[Fingerprint, Path]
) -> tuple[dict[str, Any], list[Chunk]]:
    """Writes tensors as chunk files into a new directory, or links the files of the same content in ``earlier``.

    Waits until each is on the disk. Returns plain values for :func:`locate_chunks`, and the files.
    """
    records: dict[str, Any] = {}
    chunks: list[Chunk] = []
    stored: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in tensors.items():
            files = []
            source = tensor if isinstance(tensor, Snapshot) else Snapshots().take(tensor.contiguous().view(-1))
            for start in range(0, tensor.nbytes, CHUNK_BYTES):
                files.append(f"{len(chunks) + len(stored):06d}{CHUNK_SUFFIX}")
                count = min(CHUNK_BYTES, tensor.nbytes - start)
                stored.append(pool.submit(_store, source, start, count, directory / files[-1], earlier))
                if len(stored) > _THREADS:  # only a few chunks are in memory at a time
                    chunks.append(stored.popleft().result())
            dtype = str(tensor.dtype).removeprefix("torch.")
            records[name] = {"dtype": dtype, "shape": list(tensor.shape), "files": files}
        chunks += [future.result() for future in stored]
    return records, chunks


def locate_chunks(
    directory: Path, records: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> dict[str, ChunkedTensor]:
    """Returns the tensors that :func:`write_chunks` recorded, their content not read. ``files`` are the fingerprints.

    Raises ``DamagedFileError`` if files are missing, have another size, or do not make up the tensors.
    """
    located = {}
    named: set[Path] = set()
    for name, record in records.items():
        try:
            shape = torch.Size(record["shape"])
            if any(length < 0 for length in shape):
                raise TypeError(f"{record['dtype']} {list(shape)} is no tensor")
            parts = [(directory / Path(file).name, files[file]) for file in record["files"]]
            tensor = ChunkedTensor(DTYPES[record["dtype"]], shape, parts)
            missing = tensor.num_bytes - sum(expected["bytes"] for _, expected in tensor.files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(f"the chunks of {name} in {directory} are not described: {error!r}") from error
        if missing:
            raise DamagedFileError(f"the chunks of {name} in {directory} lack {missing:,} bytes; load an earlier save")
        for file, expected in tensor.files:
            if file in named:  # a small save could fill the memory
                raise DamagedFileError(f"{file} is named twice by the save; load an earlier save")
            named.add(file)
            check_file(file, expected, reads=False)
        located[name] = tensor
    return located


def read_chunks(tensors: Mapping[str, ChunkedTensor], scratch: Path) -> dict[str, Tensor]:
    """Reads tensors from their chunk files, each chunk directly into its place, and checks the content.

    If memory does not hold the tensors twice, since the caller copies them, they lie in an unnamed file in the
    directory ``scratch``. Raises ``DamagedFileError``, or ``MemoryError`` if neither memory nor disk holds them.
    """
    free = free_bytes(torch.device("cpu"))
    needed = sum(tensor.num_bytes for tensor in tensors.values())
    directory = None if free is None or 2 * needed <= free else scratch
    places = {name: _allocate(tensor.num_bytes, directory) for name, tensor in tensors.items()}
    parts: list[tuple[Path, Mapping[str, Any], memoryview | None]] = []
    for name, tensor in tensors.items():
        memory = places[name].numpy().data
        start = 0
        for file, expected in tensor.files:
            parts.append((file, expected, memory[start : start + expected["bytes"]]))
            start += expected["bytes"]
    check_files(parts)
    return {name: places[name].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}


def check_files(parts: Iterable[tuple[Path, Mapping[str, Any], memoryview | None]]) -> None:
    """Checks files in threads, as :func:`check_file` checks each."""
    with ThreadPoolExecutor(_THREADS) as pool:
        # An error leaves the iteration, which cancels the files that are not read yet.
        deque(pool.map(lambda part: check_file(*part), parts), maxlen=0)


def check_file(
    file: Path, expected: Mapping[str, Any], target: memoryview | None = None, *, reads: bool = True
) -> None:
    """Raises ``DamagedFileError`` for a file that is not the one of its fingerprint. ``reads=False`` checks the size.

    ``target`` receives the content, of the expected length.
    """
    found: dict[str, Any] = {}
    try:
        check_regular(file)
        found["bytes"] = file.stat().st_size
        if reads and found["bytes"] == expected.get("bytes"):
            with file.open("rb") as stream:
                content = None if target is None else target[: stream.readinto(target)]
                digest = hashlib.file_digest(stream, _blake2b) if content is None else _blake2b(content)
            found["blake2b"] = digest.hexdigest()
    except OSError as error:
        raise DamagedFileError(f"{file} cannot be read ({error}); nothing was loaded. Load an earlier save") from error
    if found != (expected if reads else {"bytes": expected["bytes"]}):
        raise DamagedFileError(
            f"{file} is truncated or changed since it was saved; nothing was loaded. Load an earlier save"
        )


def fingerprint(file: Path) -> Fingerprint:
    """Returns the length and the hash of a file."""
    with file.open("rb") as stream:
        return Fingerprint(file.stat().st_size, hashlib.file_digest(stream, _blake2b).hexdigest())


def is_regular(file: Path, num_bytes: object) -> bool:
    """Whether ``file`` exists, is no symbolic link, which could change, and has the expected size."""
    try:
        status = file.lstat()
    except (OSError, ValueError):  # no path has the name, if it holds a NUL
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == num_bytes


def _store(source: Snapshot, start: int, count: int, file: Path, earlier: Mapping[Fingerprint, Path]) -> Chunk:
    unchanged: Fingerprint | None = source.unchanged(start, count)
    if unchanged is not None and unchanged in earlier and _link(earlier[unchanged], file):
        source.skip(start, count)
        return Chunk(file.name, unchanged, linked=True)
    # Copied before it is hashed and written: the hash is that of the file even if others write into the tensor.
    content = torch.empty(count, dtype=torch.uint8, device="cpu")
    source.read(start, content)
    data = content.numpy().data
    identity = Fingerprint(count, _blake2b(data).hexdigest())
    source.keep_result(start, count, identity)
    if identity in earlier and _link(earlier[identity], file):
        return Chunk(file.name, identity, linked=True)
    replace_file(file, data)  # never written in place: a link that exists after all belongs to the earlier save too
    return Chunk(file.name, identity, linked=False)


def _link(earlier: Path, file: Path) -> bool:
    try:
        os.link(earlier, file)
    except OSError as error:  # another file system, one without links, or the earlier save was removed meanwhile
        logger.debug("%s is written, not linked: %s", file, error)
        return False
    return True


def _allocate(num_bytes: int, directory: Path | None) -> Tensor:
    # The scratch file needs a directory that can be written to.
    words = -(-num_bytes // 8)
    cpu = torch.device("cpu")
    purpose = "to read the saved buffer"
    try:
        rows = allocate_rows(words, 1, cpu, directory, purpose)
    except OSError:
        rows = allocate_rows(words, 1, cpu, None, purpose)
    return rows.view(-1).view(torch.uint8)[:num_bytes]


def _blake2b(content: bytes | memoryview = b"") -> Any:
    return hashlib.blake2b(content, digest_size=20)
