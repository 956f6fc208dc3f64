# SPDX-License-Identifier: Apache-2.0
"""Folders of this library in RLlib's checkpoints, which may lie on any file system of pyarrow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs

LOCK_FILE = ".lock"  # of lightning_replay.saving, which is imported where a buffer is

__all__ = ["folder_to_read", "folder_to_write"]


@contextmanager
def folder_to_write(
    path: str | Path | None, filesystem: fs.FileSystem | None, saved: str, name: str
) -> Iterator[tuple[Path, bool]]:
    """A local folder for what belongs into a checkpoint that RLlib has just saved; it is copied there if need be.

    Args:
        path: the user gave for the checkpoint, a directory or a URI.
        filesystem: of ``path``; absent, the URI says.
        saved: where RLlib saved it, as it says itself.
        name: of the folder.

    Yields:
        The folder, and whether it stays where it is.
    """
    if path is not None and filesystem is None:
        filesystem, _ = fs.FileSystem.from_uri(str(path))
    folder = Path(saved) / name
    if filesystem is None or isinstance(filesystem, fs.LocalFileSystem):
        yield folder, True
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch), False
        _copy(Path(scratch), folder.as_posix(), filesystem)


def _copy(source: Path, target: str, filesystem: fs.FileSystem) -> None:
    """Copies a save to another file system: its data first, then the manifest that names it; earlier data goes last."""
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
    """A folder of a checkpoint, copied from where it lies if need be; it may not exist.

    Args:
        path: of the checkpoint, a directory or a URI.
        filesystem: of ``path``; absent, the URI says.
        name: of the folder.
    """
    location = str(path)
    if filesystem is None:
        filesystem, location = fs.FileSystem.from_uri(location)
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
