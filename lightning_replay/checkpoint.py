# SPDX-License-Identifier: Apache-2.0
"""Replay buffers saved to a directory and loaded again, without code in the files."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_replay.chunk_files import (
    CHUNK_SUFFIX,
    Chunk,
    ChunkedTensor,
    Fingerprint,
    check_chunks,
    check_file,
    fingerprint,
    is_regular,
    locate_chunks,
    read_chunks,
    write_chunks,
)
from lightning_replay.recorded import build, describe
from lightning_replay.replay import Replay
from lightning_replay.state_files import (
    TENSORS_FILE,
    VALUES_FILE,
    DamagedFileError,
    join_state,
    read_halves,
    split_state,
    write_halves,
)

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2  # version 1 kept every tensor in one file
MANIFEST = "replay.json"
LARGE_BYTES = 1 << 20  # tensors from here on are kept in chunk files


class SavedSize(NamedTuple):
    """Bytes of all files of a save, and of those written by it; the others it shares with an earlier save."""

    total: int
    written: int


def save_replay(replay: Replay, path: str | Path, *, previous: str | Path | None = None) -> SavedSize:
    """Saves a replay buffer: rows, priorities, generators, counters and how it was built.

    The directory holds a manifest and the data it names. New data is written beside the old and the manifest is
    swapped last, so a save that is cut short (a crash, ``kill -9``) leaves the previous one loadable.

    Stretches of the rows that an earlier save holds are hard-linked from it instead of written; a hash of the content
    tells which. Every save is complete on its own, and removing another never harms it. But a shared file that the
    disk damages is damaged in all the saves that share it; loading and :func:`verify_replay` find that.

    Args:
        replay: the buffer; it is not changed.
        path: a directory, created when missing; an earlier save in it is shared from, then replaced.
        previous: directory of another save to share files with. Where it is of no use (missing, damaged, of another
            buffer, on another file system) everything is written.

    Returns:
        bytes of the save, and those written now.

    Raises:
        TypeError: something else than a replay buffer, such as a level buffer.

    Example:
        >>> import tempfile
        >>> from lightning_replay import load_replay, recipes, save_replay
        >>> replay = recipes.uniform(capacity=100, batch_size=4)
        >>> size = save_replay(replay, tempfile.mkdtemp() + "/buffer")
    """
    if not isinstance(replay, Replay):
        raise TypeError(
            f"replay is a {type(replay).__name__}; save_replay saves replay buffers. A level buffer saves and loads "
            "itself: levels.save(path), levels.load(path)"
        )
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    earlier = _chunks_of(directory) if (directory / MANIFEST).exists() else {}
    if previous is not None:
        earlier |= _chunks_of(Path(previous))
    data = directory / f"data-{uuid.uuid4().hex[:12]}"
    data.mkdir()
    try:
        files, chunks = _write_data(data, replay.state_dict(), earlier)
    except BaseException:
        shutil.rmtree(data, ignore_errors=True)
        raise
    manifest = {
        "format": "lightning-replay",
        "version": FORMAT_VERSION,
        "built_by": describe(replay),
        "length": len(replay),
        "data": data.name,
        "files": files,
    }
    text = json.dumps(manifest, indent=1)
    replace_file(directory / MANIFEST, text)
    _remove_remains(directory, data)
    if previous is not None and chunks and not any(chunk.linked for chunk in chunks):
        logger.info("no file of %s could be shared; everything was written to %s", previous, directory)
    total = len(text.encode()) + sum(record["bytes"] for record in files.values())
    return SavedSize(total, total - sum(chunk.fingerprint.num_bytes for chunk in chunks if chunk.linked))


def load_replay(path: str | Path) -> Replay:
    """Builds the saved buffer anew and restores it: the next draws are those the saved one would have made.

    Raises:
        FileNotFoundError: no saved buffer there.
        DamagedFileError: a file is missing, truncated or changed.
        ValueError: saved by a newer version of this library.
        NotRebuildableError: an option was neither a plain value nor an import path; build the buffer and call
            ``replay.load(path)``.
    """
    directory = Path(path)
    saved = _open(directory)
    replay = build(saved.manifest["built_by"])
    if not isinstance(replay, Replay):
        raise DamagedFileError(f"{directory / MANIFEST} describes a {type(replay).__name__}, not a replay buffer")
    replay.load_state_dict(saved.state(directory))
    return replay


def load_into(replay: Replay, path: str | Path) -> None:
    """Restores a saved buffer into ``replay``, which must have been built with the same options."""
    directory = Path(path)
    replay.load_state_dict(_open(directory).state(directory))


def verify_replay(path: str | Path) -> dict[str, Any]:
    """Reads a saved buffer and raises what loading it would raise, without building or changing a buffer.

    Returns:
        ``built_by``: how the buffer was built, as plain values; ``length``: transitions.

    Raises:
        FileNotFoundError: no saved buffer there.
        DamagedFileError: a file is missing, truncated or changed.
        ValueError: saved by a newer version of this library.
    """
    saved = _open(Path(path))
    check_chunks(saved.chunked)
    return {key: saved.manifest[key] for key in ("built_by", "length")}


class _Saved(NamedTuple):
    """A save whose manifest and small files are read and sound; its chunks are still to be read."""

    manifest: dict[str, Any]
    values: Any
    tensors: dict[str, Tensor]
    chunked: dict[str, ChunkedTensor]

    def state(self, directory: Path) -> dict[str, Any]:
        return join_state(self.values, self.tensors | read_chunks(self.chunked, scratch=directory))


def _open(directory: Path) -> _Saved:
    manifest = _read_manifest(directory)
    data, files = _data_of(directory, manifest), manifest["files"]
    for name in dict.fromkeys((TENSORS_FILE, VALUES_FILE, *files)):
        if not name.endswith(CHUNK_SUFFIX):
            check_file(data / Path(name).name, files.get(name, {}))
    values, tensors = read_halves(data)
    if manifest["version"] == 1:
        return _Saved(manifest, values, tensors, {})
    try:
        state, records = values["state"], dict(values["chunked"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"{data / VALUES_FILE} holds no saved state ({error!r}); load an earlier save"
        ) from error
    return _Saved(manifest, state, tensors, locate_chunks(data, records, files))


def _write_data(
    data: Path, state: Mapping[str, Any], earlier: Mapping[Fingerprint, Path]
) -> tuple[dict[str, dict[str, Any]], list[Chunk]]:
    """Writes the files of a save; returns what is expected of each from now on, and the chunks among them."""
    values, tensors = split_state(state)
    large = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= LARGE_BYTES}
    records, chunks = write_chunks(data, large, earlier)
    small = {name: tensor for name, tensor in tensors.items() if name not in large}
    write_halves(data, {"state": values, "chunked": records}, small)
    files = {name: fingerprint(data / name).record() for name in (TENSORS_FILE, VALUES_FILE)}
    return files | {chunk.name: chunk.fingerprint.record() for chunk in chunks}, chunks


def _chunks_of(directory: Path) -> dict[Fingerprint, Path]:
    """The chunk files of an earlier save that have the size they should have; none where it cannot be used."""
    try:
        manifest = _read_manifest(directory)
    except (OSError, ValueError, DamagedFileError) as error:
        logger.info("%s is not used as an earlier save: %s", directory, error)
        return {}
    if manifest["version"] != FORMAT_VERSION:
        logger.info("%s is not used as an earlier save: format version %d", directory, manifest["version"])
        return {}
    data = _data_of(directory, manifest)
    chunks = {}
    for name, record in manifest["files"].items():
        file = data / Path(name).name
        if not is_regular(file, record.get("bytes")):
            logger.info("%s is missing or damaged in an earlier save", file)
        elif name.endswith(CHUNK_SUFFIX):
            chunks[Fingerprint(record["bytes"], str(record.get("blake2b")))] = file
    return chunks


def _data_of(directory: Path, manifest: Mapping[str, Any]) -> Path:
    return directory / Path(manifest["data"]).name


def _remove_remains(directory: Path, data: Path) -> None:
    """Removes the data of earlier saves, and what saves that were cut short left behind."""
    for stale in directory.glob("data-*"):
        if stale != data:
            shutil.rmtree(stale, ignore_errors=True)
    for stale in directory.glob(f"{Path(MANIFEST).stem}.*.tmp"):
        stale.unlink(missing_ok=True)


def _read_manifest(directory: Path) -> dict[str, Any]:
    file = directory / MANIFEST
    if not file.exists():
        is_of_levels = (directory / VALUES_FILE).exists()
        hint = ". A level buffer is there: levels.load(path) of one built alike reads it" if is_of_levels else ""
        raise FileNotFoundError(f"no saved replay buffer in {directory}: {MANIFEST} is missing{hint}")
    try:
        manifest = json.loads(file.read_text())
        version = manifest["version"] = int(manifest["version"])
        if version < 1:
            raise ValueError(f"format version {version}")
        if version <= FORMAT_VERSION:
            _ = manifest["built_by"], manifest["length"], Path(manifest["data"])
            _ = [record["bytes"] for record in manifest["files"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); load an earlier save") from error
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {version}; this lightning-replay reads versions up to {FORMAT_VERSION}. "
            "Install a newer lightning-replay"
        )
    return manifest


def replace_file(file: Path, text: str) -> None:
    """Writes ``file`` so that a reader finds either the old text or the new, never a part."""
    temporary = file.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
