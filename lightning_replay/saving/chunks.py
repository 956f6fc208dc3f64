# SPDX-License-Identifier: Apache-2.0
"""Large tensors as files of a fixed size, so that a save shares those an earlier one already holds."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import stat
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_replay.memory import allocate_rows, free_bytes
from lightning_replay.saving.serialization import DamagedFileError
from lightning_replay.saving.snapshot import Snapshot

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
CHUNK_SUFFIX = ".chunk"
_BLOCK_BYTES = 1 << 20  # read and hashed at a time
_THREADS = min(4, os.cpu_count() or 1)

#: A file, what :func:`check_file` expects of it, and where its content goes.
_Reading = tuple[Path, Mapping[str, Any], memoryview | None]


class Fingerprint(NamedTuple):
    """What the content of a file is recognised by."""

    num_bytes: int
    blake2b: str

    def record(self) -> dict[str, Any]:
        """Returns the fingerprint as :func:`check_file` takes it."""
        return {"bytes": self.num_bytes, "blake2b": self.blake2b}


class Chunk(NamedTuple):
    """A chunk file of a save; ``linked`` when an earlier save holds the same file."""

    name: str
    fingerprint: Fingerprint
    linked: bool


class ChunkedTensor(NamedTuple):
    """A tensor that lies in chunk files, and what is expected of each of them."""

    dtype: torch.dtype
    shape: torch.Size
    files: list[tuple[Path, Mapping[str, Any]]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize  # torch.Size.numel would wrap around


def write_chunks(
    directory: Path, tensors: Mapping[str, Tensor | Snapshot], earlier: Mapping[Fingerprint, Path]
) -> tuple[dict[str, Any], list[Chunk]]:
    """Writes tensors as chunk files, or links files that hold the same; waits until each is on the disk.

    Args:
        directory: a new one.
        tensors: on any device. Each chunk is copied before it is hashed and written, so that its file is what its hash
            belongs to, whatever others write meanwhile.
        earlier: chunk files that may be linked; they are never written to.

    Returns:
        plain values from which :func:`locate_chunks` finds the tensors again, and the files.
    """
    records: dict[str, Any] = {}
    chunks: list[Chunk] = []
    stored: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in tensors.items():
            files = []
            source = tensor if isinstance(tensor, Snapshot) else tensor.contiguous().view(-1).view(torch.uint8)
            for start in range(0, tensor.nbytes, CHUNK_BYTES):
                files.append(f"{len(chunks) + len(stored):06d}{CHUNK_SUFFIX}")
                count = min(CHUNK_BYTES, tensor.nbytes - start)
                stored.append(pool.submit(_store, source, start, count, directory / files[-1], earlier))
                if len(stored) > _THREADS:  # a few chunks are in memory at a time
                    chunks.append(stored.popleft().result())
            dtype = str(tensor.dtype).removeprefix("torch.")
            records[name] = {"dtype": dtype, "shape": list(tensor.shape), "files": files}
        chunks += [future.result() for future in stored]
    return records, chunks


def locate_chunks(
    directory: Path, records: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> dict[str, ChunkedTensor]:
    """Returns the tensors of which :func:`write_chunks` returned the records; reads no content and takes no memory.

    Args:
        directory: of the chunk files.
        files: what is expected of each file, by its name.

    Raises:
        DamagedFileError: the files do not make up the tensors, or are missing or of another size.
    """
    located = {}
    for name, record in records.items():
        try:
            dtype, shape = getattr(torch, record["dtype"]), torch.Size(record["shape"])
            if not isinstance(dtype, torch.dtype) or any(length < 0 for length in shape):
                raise TypeError(f"{record['dtype']} {list(shape)} is no tensor")
            tensor = ChunkedTensor(
                dtype, shape, [(directory / Path(file).name, files[file]) for file in record["files"]]
            )
            missing = tensor.num_bytes - sum(expected["bytes"] for _, expected in tensor.files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(f"the chunks of {name} in {directory} are not known: {error!r}") from error
        if missing:
            raise DamagedFileError(f"the chunks of {name} in {directory} lack {missing:,} bytes; load an earlier save")
        for file, expected in tensor.files:
            _check_size(file, expected["bytes"])
        located[name] = tensor
    return located


def read_chunks(tensors: Mapping[str, ChunkedTensor], scratch: Path) -> dict[str, Tensor]:
    """Reads tensors from their chunk files, each chunk straight into its place, and checks the content.

    Args:
        scratch: directory for a nameless scratch file, used where memory does not hold the tensors twice: whoever
            takes them over needs as much again.

    Raises:
        DamagedFileError: a file is missing, truncated or changed.
        MemoryError: there is no room for the tensors.
    """
    free = free_bytes(torch.device("cpu"))
    needed = sum(tensor.num_bytes for tensor in tensors.values())
    directory = None if free is None or 2 * needed <= free else scratch
    places = {name: _allocate(tensor.num_bytes, directory) for name, tensor in tensors.items()}
    _check_all(reading for name, tensor in tensors.items() for reading in _readings(tensor, places[name]))
    return {name: places[name].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}


def check_chunks(tensors: Mapping[str, ChunkedTensor]) -> None:
    """Raises what :func:`read_chunks` would for damaged files, and keeps nothing in memory."""
    _check_all((file, expected, None) for tensor in tensors.values() for file, expected in tensor.files)


def check_file(file: Path, expected: Mapping[str, Any], target: memoryview | None = None) -> None:
    """Reads a file and refuses it when it is not the one that was written.

    Args:
        expected: ``bytes`` and ``blake2b``, as :meth:`Fingerprint.record` gives them; ``crc32`` in the place of
            ``blake2b`` in saves of the first format.
        target: where the content goes, as long as the file is expected to be.

    Raises:
        DamagedFileError: the file is missing, of another size, or its content changed.
    """
    kind, hash_of = ("crc32", _crc32) if "crc32" in expected else ("blake2b", _blake2b)
    found: dict[str, Any] = {}
    try:
        found["bytes"] = file.stat().st_size
        if found["bytes"] == expected.get("bytes"):
            found[kind] = hash_of(_blocks(file, target))
    except OSError as error:
        raise _damaged(file, f"cannot be read ({error})") from error
    if found != expected:
        raise _damaged(file, "is truncated or changed since it was saved")


def fingerprint(file: Path) -> Fingerprint:
    """Returns the fingerprint of a file on disk."""
    return Fingerprint(file.stat().st_size, _blake2b(_blocks(file)))


def is_regular(file: Path, num_bytes: Any) -> bool:
    """Whether ``file`` is there, is no symbolic link, which would not last, and has the size it should have."""
    try:
        status = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == num_bytes


def _store(source: Tensor | Snapshot, start: int, count: int, file: Path, earlier: Mapping[Fingerprint, Path]) -> Chunk:
    content = torch.empty(count, dtype=torch.uint8)
    if isinstance(source, Snapshot):
        source.read(start, content)
    else:
        content.copy_(source[start : start + count])
    data = content.numpy().data
    identity = Fingerprint(count, _blake2b([data]))
    shared = earlier.get(identity)
    if shared is not None and _link(shared, file):
        return Chunk(file.name, identity, linked=True)
    # Written under another name: should a link be there after all, its file belongs to the earlier save as well.
    temporary = file.with_suffix(".tmp")
    with temporary.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
    return Chunk(file.name, identity, linked=False)


def _link(source: Path, file: Path) -> bool:
    try:
        os.link(source, file)
    except OSError as error:  # another file system, one without links, or the earlier save was just removed
        logger.debug("%s is written, not linked: %s", file, error)
        return False
    return True


def _allocate(num_bytes: int, directory: Path | None) -> Tensor:
    """Returns uint8 ``[num_bytes]``, in memory or, with a ``directory`` that can be written to, in a scratch file."""
    words, cpu, purpose = -(-num_bytes // 8), torch.device("cpu"), "to read the saved buffer"
    try:
        room = allocate_rows(words, 1, cpu, directory, purpose)
    except OSError:
        room = allocate_rows(words, 1, cpu, None, purpose)
    return room.view(-1).view(torch.uint8)[:num_bytes]


def _readings(tensor: ChunkedTensor, place: Tensor) -> Iterator[_Reading]:
    memory, start = place.numpy().data, 0
    for file, expected in tensor.files:
        stop = start + expected["bytes"]
        yield file, expected, memory[start:stop]
        start = stop


def _check_all(readings: Iterable[_Reading]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda reading: check_file(*reading), readings):
            pass  # leaving early cancels what is not yet read


def _blocks(file: Path, target: memoryview | None = None) -> Iterator[memoryview]:
    """Yields the content block by block: views of ``target`` where there is one, else of memory that is used again."""
    scratch = memoryview(bytearray(_BLOCK_BYTES)) if target is None else target[:0]
    position = 0
    with file.open("rb", buffering=0) as stream:
        while True:
            room = scratch if target is None else target[position : position + _BLOCK_BYTES]
            count = stream.readinto(room)
            if not count:
                return
            yield room[:count]
            position += count


def _blake2b(blocks: Iterable[memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _crc32(blocks: Iterable[memoryview]) -> int:
    checksum = 0
    for block in blocks:
        checksum = zlib.crc32(block, checksum)
    return checksum


def _check_size(file: Path, num_bytes: int) -> None:
    try:
        found = file.stat().st_size
    except OSError as error:
        raise _damaged(file, f"cannot be read ({error})") from error
    if found != num_bytes:
        raise _damaged(file, "is truncated or changed since it was saved")


def _damaged(file: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"{file} {what}; nothing was loaded. Load an earlier save")
