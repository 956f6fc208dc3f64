# SPDX-License-Identifier: Apache-2.0
"""Folders of saves on any file system of pyarrow or fsspec, written and read through local ones."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from pyarrow import fs

from lightning_replay.options import LOCAL_OR_URL, check_kind, checked_local_path
from lightning_replay.saving.files import (
    DATA_FOLDERS,
    LOCK_FILE,
    MAX_MANIFEST_BYTES,
    DamagedFileError,
    data_named_in,
    is_saved,
    remove_saved,
)


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder on a file system of pyarrow. It may not exist, and can be sent to other processes.

    Example:
        >>> (Folder.at("/checkpoints/first") / "replay_buffer").local.as_posix()
        '/checkpoints/first/replay_buffer'
    """

    filesystem: fs.FileSystem
    path: str
    url: str | None = dataclasses.field(default=None, kw_only=True)  #: URL that was given, for messages.

    @classmethod
    def at(cls, path: str | Path | None, filesystem: fs.FileSystem | None = None) -> Folder:
        """Returns the folder at a path or URI of a checkpoint of RLlib."""
        if filesystem is None and path is not None:
            filesystem, path = fs.FileSystem.from_uri(str(path))
        return cls(filesystem or fs.LocalFileSystem(), Path(str(path)).as_posix())

    @classmethod
    def of_user(cls, path: str | Path, filesystem: fs.FileSystem | None = None) -> Folder:
        """Returns the folder at a path or URI of a user. A relative path is relative to this process."""
        check_kind("filesystem", filesystem, fs.FileSystem | None, "a file system of pyarrow, or None")
        if filesystem is None and "://" not in str(path):
            path = os.path.abspath(checked_local_path("path", path, LOCAL_OR_URL))
        return cls.at(str(path), filesystem)

    @classmethod
    def at_url(cls, url: str) -> Folder:
        """Returns the folder at a URL of fsspec, such as ``s3://bucket/folder`` of a Lightning checkpoint."""
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
        """Returns whether the folder exists."""
        return bool(self.filesystem.get_file_info(self.path).type == fs.FileType.Directory)

    def names(self, *, only_folders: bool = False) -> list[str]:
        """Returns the names in this folder, none if it does not exist. On other file systems a link is no folder."""
        kinds = (fs.FileType.Directory,) if only_folders else tuple(fs.FileType)
        return [info.base_name for info in self._entries() if info.type in kinds]

    def remove(self) -> None:
        """Removes a folder that this process has created."""
        with suppress(OSError):
            self.filesystem.delete_dir(self.path)

    def remove_saved(self) -> None:
        """Removes the files of a save, and on another file system only from a folder that holds no other file."""
        if self.local is not None:
            remove_saved(self.local)
            return
        if all(is_saved(info.base_name) for info in self._entries(deep=True) if info.type != fs.FileType.Directory):
            self.remove()

    @contextmanager
    def to_write(self) -> Iterator[Path]:
        """Context manager for writing a save: yields this folder, or a local one that is copied at the end.

        The local one holds the manifests that are here. Data are copied before the manifest that names them. The data
        of manifests that are replaced or removed are removed last.
        """
        if self.local is not None:
            yield self.local
            return
        with tempfile.TemporaryDirectory() as scratch, self._named(Path(scratch)):
            local = Path(scratch)
            if self.exists():
                self._download(local, deep=False)
            before = {file: file.read_bytes() for file in local.iterdir()}
            replaced = {file: data_named_in(file, DATA_FOLDERS[file.name]) for file in before}
            yield local
            # A lock excludes nobody on another file system.
            for lock in list(local.rglob(LOCK_FILE)):
                lock.unlink()
            kept = [file for file, content in before.items() if file.exists() and file.read_bytes() == content]
            self._upload(local, [part for part in local.iterdir() if part not in kept])
            # Last: until here the save before is whole.
            for file in before.keys() - kept:
                if not file.exists():
                    self.filesystem.delete_file(f"{self.path}/{file.name}")
                if replaced[file] in self.names(only_folders=True):
                    (self / str(replaced[file])).remove_saved()

    @contextmanager
    def to_read(self, *, deep: bool = True) -> Iterator[Path]:
        """Context manager for reading: yields this folder, or a local copy. The copy does not exist if this folder does
        not.

        A copy holds the manifests, and if it is ``deep`` the data that they name. Errors have the name of this folder
        in place of the copy's.
        """
        if self.local is not None:
            yield self.local
            return
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / PurePosixPath(self.path).name
            if self.exists():
                copy.mkdir()
                self._download(copy, deep)
            with self._named(copy):
                yield copy

    @contextmanager
    def _named(self, copy: Path) -> Iterator[None]:
        kinds = (DamagedFileError, FileExistsError, FileNotFoundError, ValueError)
        try:
            yield
        except kinds as error:
            # A subclass may be built from other arguments than a message.
            if type(error) not in kinds or str(copy) not in str(error):
                raise
            raise type(error)(str(error).replace(str(copy), str(self))) from error

    def _upload(self, source: Path, parts: list[Path]) -> None:
        self.filesystem.create_dir(self.path)
        try:
            for part in sorted(parts, key=Path.is_file):  # folders of data before the manifest that names them
                target = self / part.name
                if part.is_dir():
                    self.filesystem.create_dir(target.path)  # copy_files makes folders inside it alone
                fs.copy_files(str(part), target.path, destination_filesystem=self.filesystem)
        except BaseException:
            with suppress(OSError), self.to_read(deep=False) as there:
                # The upload of a manifest may have ended before the error.
                named = [data_named_in(there / manifest, folder) for manifest, folder in DATA_FOLDERS.items()]
                for part in parts:
                    if part.is_dir() and part.name not in named:
                        (self / part.name).remove()
            raise

    def _download(self, target: Path, deep: bool) -> None:
        for info in self._entries():
            if info.base_name not in DATA_FOLDERS:
                continue
            if info.type == fs.FileType.File and (info.size is None or 0 < info.size <= MAX_MANIFEST_BYTES):
                fs.copy_files(info.path, str(target / info.base_name), source_filesystem=self.filesystem)
            else:
                # A link, a folder, a pipe, or too large: an empty file in its place is never loaded or replaced.
                (target / info.base_name).touch()
        for manifest, folder in DATA_FOLDERS.items() if deep else ():
            data = data_named_in(target / manifest, folder)
            if data is not None and (self / data).exists():
                (self / data)._check_names()
                (target / data).mkdir()
                fs.copy_files((self / data).path, str(target / data), source_filesystem=self.filesystem)

    def _check_names(self) -> None:
        # Names on an object store are any text.
        if any(".." in info.path.removeprefix(self.path).split("/") for info in self._entries(deep=True)):
            raise DamagedFileError(f"{self} holds a name that leads out of it; give another save")

    def _entries(self, *, deep: bool = False) -> list[Any]:
        return list(self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True, recursive=deep)))
