# SPDX-License-Identifier: Apache-2.0
"""Folders of saves on any file system of pyarrow or fsspec, written and read through local ones."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from pyarrow import fs

from lightning_replay.options import check_kind

LOCK_FILE = ".lock"  # of lightning_replay.saving, which is imported where a buffer is
# What a save consists of; all else in the folder is left alone.
_MANIFESTS = ("replay.json", "replay_shards.json", "state.json", "buffer.json", "shards.json")
_DATA = re.compile(r".+-[0-9a-f]{12}")


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder on a file system of pyarrow; it may not exist, and can be sent to other processes.

    Example:
        >>> (Folder.at("/checkpoints/first") / "replay_buffer").local.as_posix()
        '/checkpoints/first/replay_buffer'
    """

    filesystem: fs.FileSystem
    path: str
    url: str | None = dataclasses.field(default=None, kw_only=True)  #: by which it was given, for messages

    @classmethod
    def at(cls, path: str | Path | None, filesystem: fs.FileSystem | None = None) -> Folder:
        """Returns the folder at a path or URI; local where RLlib chose the path."""
        if filesystem is None and path is not None:
            filesystem, path = fs.FileSystem.from_uri(str(path))
        return cls(filesystem or fs.LocalFileSystem(), Path(str(path)).as_posix())

    @classmethod
    def of_user(cls, path: str | Path, filesystem: fs.FileSystem | None = None) -> Folder:
        """Returns the folder at a path or URI that was given here, where a relative path is one of this process."""
        check_kind("filesystem", filesystem, fs.FileSystem | None, "a file system of pyarrow, or None")
        is_local = filesystem is None and "://" not in str(path)
        return cls.at(os.path.abspath(path) if is_local else str(path), filesystem)

    @classmethod
    def at_url(cls, url: str) -> Folder:
        """Returns the folder at a URL of fsspec, such as ``s3://bucket/folder``, as Lightning's paths are."""
        filesystem, path = fsspec.core.url_to_fs(url)
        return cls(fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path, url=url)

    @property
    def local(self) -> Path | None:  # None on another file system
        return Path(self.path) if isinstance(self.filesystem, fs.LocalFileSystem) else None

    def __truediv__(self, name: str) -> Folder:
        url = None if self.url is None else f"{self.url}/{name}"
        return dataclasses.replace(self, path=f"{self.path}/{name}", url=url)

    def __str__(self) -> str:
        if self.url is not None:
            return self.url
        return self.path if self.local is not None else f"{self.filesystem.type_name}:{self.path}"

    def exists(self) -> bool:
        return bool(self.filesystem.get_file_info(self.path).type == fs.FileType.Directory)

    def folders(self) -> list[str]:
        """Returns the names of the folders in this one; none where it does not exist."""
        return [info.base_name for info in self._entries() if info.type == fs.FileType.Directory]

    def remove(self) -> None:
        with suppress(OSError):
            self.filesystem.delete_dir(self.path)

    @contextmanager
    def to_write(self) -> Iterator[Path]:
        """Context manager for writing a save: yields this folder, or a local one that is copied at the end.

        Data are copied before the manifest that names them; earlier data and manifests are removed last.
        """
        if self.local is not None:
            yield self.local
            return
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
            for lock in list(Path(scratch).rglob(LOCK_FILE)):  # of this process; another file system locks nothing
                lock.unlink()
            self._upload(Path(scratch))

    @contextmanager
    def to_read(self, *, deep: bool = True) -> Iterator[Path]:
        """Context manager for reading: yields this folder, or a local copy; it does not exist where this does not.

        A copy that is not ``deep`` has the files alone. Errors have the name of this folder in place of the copy's.
        """
        from lightning_replay.saving import DamagedFileError

        if self.local is not None:
            yield self.local
            return
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / PurePosixPath(self.path).name
            if self.exists():
                copy.mkdir()
                self._download(copy, deep)
            try:
                yield copy
            except (DamagedFileError, FileNotFoundError, ValueError) as error:
                # A subclass may be built from other arguments than a message.
                if type(error) not in (DamagedFileError, FileNotFoundError, ValueError) or str(copy) not in str(error):
                    raise
                raise type(error)(str(error).replace(str(copy), str(self))) from error

    def _upload(self, source: Path) -> None:
        parts = sorted(source.iterdir(), key=Path.is_file)  # folders of data before the manifest that names them
        self.filesystem.create_dir(self.path)
        for part in parts:
            target = self / part.name
            if part.is_dir():
                self.filesystem.create_dir(target.path)  # copy_files makes folders inside it alone
            fs.copy_files(str(part), target.path, destination_filesystem=self.filesystem)
        kept = {part.name for part in parts}
        # Last: until here the save before is whole.
        for info in self._entries():
            if info.base_name in kept:
                continue
            if info.type == fs.FileType.Directory and _DATA.fullmatch(info.base_name):
                self.filesystem.delete_dir(info.path)
            elif info.base_name in _MANIFESTS:
                self.filesystem.delete_file(info.path)

    def _download(self, target: Path, deep: bool) -> None:
        if deep:
            fs.copy_files(self.path, str(target), source_filesystem=self.filesystem)
            return
        for info in self._entries():
            if info.type == fs.FileType.File:
                fs.copy_files(info.path, str(target / info.base_name), source_filesystem=self.filesystem)

    def _entries(self) -> list[Any]:
        return list(self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True)))
