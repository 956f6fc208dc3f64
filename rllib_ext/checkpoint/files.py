# SPDX-License-Identifier: Apache-2.0
"""Files of RLlib's checkpoints on any file system of pyarrow: this library's folders, fingerprints of the others.

RLlib overwrites the files of an earlier checkpoint one by one, and this library writes its folders after them. A save
cut short in between leaves files of two checkpoints, which fingerprints reveal.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pyarrow import fs

LOCK_FILE = ".lock"  # of lightning_replay.saving, which is imported where a buffer is
_OWN_FOLDERS = ("levels", "replay_buffer")
_BLOCK_BYTES = 1 << 20


def _located(path: str | Path | None, filesystem: fs.FileSystem | None) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a checkpoint and the path on it; local where RLlib chose the path."""
    if filesystem is None and path is not None:
        filesystem, path = fs.FileSystem.from_uri(str(path))
    return filesystem or fs.LocalFileSystem(), str(path)


@contextmanager
def folder_to_write(
    path: str | Path | None, filesystem: fs.FileSystem | None, saved: str, name: str
) -> Iterator[tuple[Path, bool]]:
    """Opens a local folder whose files are copied into a checkpoint that RLlib has just saved, unless it is there.

    Args:
        path, filesystem: of the checkpoint, as given by the user.
        saved: where RLlib saved it, as it returned.
        name: of the folder.

    Yields:
        The folder, and whether it stays where it is.
    """
    filesystem, _ = _located(path, filesystem)
    folder = Path(saved) / name
    if isinstance(filesystem, fs.LocalFileSystem):
        yield folder, True
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch), False
        _copy(Path(scratch), folder.as_posix(), filesystem)


def _copy(source: Path, target: str, filesystem: fs.FileSystem) -> None:
    """Copies a save to another file system: data, then the manifest that names them; deletes earlier data last."""
    parts = sorted(source.iterdir(), key=Path.is_file)
    filesystem.create_dir(target)
    for part in parts:
        if part.name == LOCK_FILE:
            continue
        if part.is_dir():
            filesystem.create_dir(f"{target}/{part.name}")  # copy_files makes folders inside it alone
        fs.copy_files(str(part), f"{target}/{part.name}", destination_filesystem=filesystem)
    for info in filesystem.get_file_info(fs.FileSelector(target)):
        if info.type == fs.FileType.Directory and info.base_name not in {part.name for part in parts}:
            filesystem.delete_dir(info.path)


@contextmanager
def folder_to_read(path: str | Path, filesystem: fs.FileSystem | None, name: str) -> Iterator[Path]:
    """Opens a folder of a checkpoint, copied if it is not local; it may not exist."""
    filesystem, location = _located(path, filesystem)
    folder = Path(location) / name
    if isinstance(filesystem, fs.LocalFileSystem):
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / name
        if filesystem.get_file_info(folder.as_posix()).type != fs.FileType.NotFound:
            copy.mkdir()
            fs.copy_files(folder.as_posix(), str(copy), source_filesystem=filesystem)
        yield copy


def fingerprints_of(path: str | Path | None, filesystem: fs.FileSystem | None, saved: str) -> dict[str, Any]:
    """Returns size and hash of each file that RLlib has just saved, by its path in the checkpoint.

    Arguments are those of :func:`folder_to_write`.
    """
    filesystem, _ = _located(path, filesystem)
    return {name: _record(filesystem, file) for name, file in _files(filesystem, saved).items()}


def check_fingerprints(
    path: str | Path, filesystem: fs.FileSystem | None, recorded: Mapping[str, Any] | None, instead: str
) -> None:
    """Compares RLlib's files in a checkpoint with their fingerprints.

    Args:
        path, filesystem: of the checkpoint, as given by the user.
        recorded: by :func:`fingerprints_of`; ``None`` in checkpoints of earlier versions, which hold none.
        instead: option that restores the algorithm alone, for the error.

    Raises:
        DamagedFileError: a file is missing or another one.
    """
    from lightning_replay.saving import DamagedFileError

    filesystem, location = _located(path, filesystem)
    present = _files(filesystem, location)
    for name, record in (recorded or {}).items():
        if name not in present or _record(filesystem, present[name]) != record:
            raise DamagedFileError(
                f"{path} holds files of two checkpoints: {name} is not the one that was saved with the rest, because a "
                f"save into this folder was cut short or the file is damaged. Nothing was restored. Restore an earlier "
                f"checkpoint; {instead}"
            )


def _files(filesystem: fs.FileSystem, location: str) -> dict[str, str]:
    """Returns the paths of RLlib's files by their relative paths. Tune's own begin with a dot."""
    found = {}
    for info in filesystem.get_file_info(fs.FileSelector(location, recursive=True)):
        relative = PurePosixPath(info.path).relative_to(location)
        is_own = relative.parts[0] in _OWN_FOLDERS
        if info.type == fs.FileType.File and not is_own and not any(part.startswith(".") for part in relative.parts):
            found[relative.as_posix()] = info.path
    return dict(sorted(found.items()))


def _record(filesystem: fs.FileSystem, file: str) -> dict[str, Any]:
    digest, num_bytes = hashlib.blake2b(digest_size=20), 0
    with filesystem.open_input_stream(file) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return {"bytes": num_bytes, "blake2b": digest.hexdigest()}
