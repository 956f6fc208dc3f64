# SPDX-License-Identifier: Apache-2.0
"""A directory that holds one save, which is replaced, checked and read as a whole.

A save is a folder of data files and a manifest, JSON that names the folder and has a checksum. A new save is written
beside the old one and synced to the disk, and the manifest is replaced last. After a crash, ``kill -9``, or a power
loss, the directory holds the old save or the new one. A file lock excludes other writers. Readers need none.

Other files in the directory are the user's. A save removes the data folder that the replaced manifest names, and the
data folders of killed saves. An empty file beside each of these folders marks it meanwhile. From a data folder, a save
removes only files that are named as a save names them.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_replay.options import LOCAL_OR_URL, MissingExtraError, checked_local_path, missing_extra
from lightning_replay.saving.files import (
    DATA_FOLDERS,
    LOCK_FILE,
    MALFORMED,
    UNFINISHED,
    DamagedFileError,
    data_named_in,
    is_manifest,
    read_json,
    remove_saved,
    replace_file,
    sync,
    touch,
)

if TYPE_CHECKING:
    from lightning_replay.saving.folders import Folder

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_ATTEMPTS = 5  # A reader tries so often while another process writes; then it takes the lock.

T = TypeVar("T")


@dataclass
class NewSave:
    """A save that is being written: an empty folder, and its manifest, which has ``id`` and ``data`` from the start."""

    data: Path
    manifest: dict[str, Any]
    bytes_of_manifest: int = 0


@contextmanager
def local_folder(path: str | Path, *, writes: bool = False, deep: bool = True) -> Iterator[Path]:
    """Context manager for a folder on this machine: that at the path, or of a URL of fsspec a copy.

    A copy that was written is uploaded at the end, data before the manifest that names them. One that is not ``deep``
    has the files of the folder alone.
    """
    if "://" not in str(path):
        yield checked_local_path("path", path, LOCAL_OR_URL)
        return
    folder = remote_folder(str(path))
    with folder.to_write() if writes else folder.to_read(deep=deep) as local:
        yield local


def remote_folder(url: str) -> Folder:
    """Returns the folder at a URL of fsspec."""
    try:
        from lightning_replay.saving.folders import Folder

        return Folder.at_url(url)
    except ModuleNotFoundError as error:
        raise missing_extra(f"{url}, on another file system,", str(error.name), "remote") from error
    except ImportError as error:  # fsspec raises it from the error of the protocol's package.
        raise MissingExtraError(f"{url} needs {getattr(error.__cause__, 'name', 'a package')}: {error}") from error
    except ValueError as error:
        raise ValueError(
            f"{url} cannot be used: {error}. Give a folder, or a URL of fsspec, such as s3://bucket/folder (package "
            "s3fs), gs:// (gcsfs) or abfs:// (adlfs)"
        ) from error


@contextmanager
def replaced_save(
    directory: Path, manifest_name: str, *, folder: str, replaces: str | None = None
) -> Iterator[NewSave]:
    """Context manager for writing a save in its body. At the end it replaces the one in ``directory``.

    Waits while another process or thread saves there, and removes leftovers of killed saves. An exception in the body
    leaves the directory as it was. A directory may hold several manifests, with data folders of different prefixes. The
    save of the manifest that the new save ``replaces`` is also removed.

    Raises:
        FileExistsError: a file of the user's has the name of the manifest. Nothing is written.
    """
    manifest = directory / manifest_name
    new = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for place in new:
        sync(place.parent)
    with exclusive(directory) as is_alone:
        if os.path.lexists(manifest) and not is_manifest(manifest):
            raise FileExistsError(
                f"{manifest} is no file of lightning-replay, and a save would replace it; nothing was written. Give a "
                "directory of its own"
            )
        before = data_named_in(manifest, folder)
        name = f"{folder}-{uuid.uuid4().hex[:12]}"
        data = directory / name
        ending = f".{manifest.stem}{UNFINISHED}"
        marks = [directory / f"{one}{ending}" for one in (name, before) if one is not None]
        for mark in marks:
            touch(mark)
        try:
            data.mkdir()
            save = NewSave(data, {"id": uuid.uuid4().hex, "data": name})
            yield save
            sync(data)
            sync(directory)  # the manifest must not name a folder that a power loss removes
            text = json.dumps(save.manifest | {"checksum": checksum_of(save.manifest)}, indent=1).encode()
            replace_file(manifest, text, data)
            sync(directory)
        except BaseException:
            _remove_marked(marks, data_named_in(manifest, folder))  # an interrupt may come after the swap
            raise
        save.bytes_of_manifest = len(text)
        # Without a lock, other marks may belong to saves that are being written.
        _remove_marked(directory.glob(f"{folder}-{'[0-9a-f]' * 12}{ending}") if is_alone else marks, name)
        if replaces is not None and is_manifest(directory / replaces):
            other = data_named_in(directory / replaces, DATA_FOLDERS[replaces])
            (directory / replaces).unlink()
            if other is not None:
                remove_saved(directory / other)


def read_manifest(file: Path, version: int) -> dict[str, Any]:
    """Reads a manifest of a format version, with errors as :func:`~lightning_replay.saving.read_state`."""
    try:
        manifest = read_json(file)
        if manifest["checksum"] != checksum_of(manifest):
            raise ValueError("its checksum differs")
        found = manifest["version"]
        _ = manifest["id"]
        if isinstance(found, bool) or not isinstance(found, int) or found < version:
            raise ValueError(f"format version {found!r}")
    except FileNotFoundError:
        raise
    except (OSError, *MALFORMED) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); load an earlier save") from error
    if found > version:
        raise ValueError(
            f"{file} has format version {found}; this lightning-replay reads version {version}. "
            "Install a newer lightning-replay"
        )
    return manifest


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """Returns the checksum of a manifest, which does not cover itself."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def read_save(directory: Path, manifest: Callable[[], dict[str, Any]], read: Callable[[dict[str, Any], Path], T]) -> T:
    """Reads a save that others may replace meanwhile. The result is of one save.

    ``manifest`` reads the manifest, ``read`` makes the result of it and of the data folder.
    """
    for _ in range(_ATTEMPTS):
        found = manifest()
        try:
            return read(found, data_of(directory, found))
        except DamagedFileError:
            if manifest() == found:
                raise
    with exclusive(directory):
        found = manifest()
        return read(found, data_of(directory, found))


def data_of(directory: Path, manifest: Mapping[str, Any]) -> Path:
    """Returns the data folder in ``directory`` that its manifest names, or raises ``DamagedFileError`` for any other
    place.
    """
    name = manifest.get("data")
    if not isinstance(name, str) or not name.strip(".") or Path(name).name != name:
        raise DamagedFileError(f"the manifest in {directory} names no folder of data; load an earlier save")
    return directory / name


def names_of_shards(manifest: Mapping[str, Any], folders: Iterable[str]) -> list[str]:
    """Returns the folders of shards that a manifest counts, or raises ``DamagedFileError`` if ``folders`` has fewer of
    them.
    """
    count = manifest.get("num_shards")
    there = {name for name in folders if name.startswith("shard-")}
    # Checked before names are made of it, which for a forged number would not end.
    if type(count) is not int or not 1 <= count <= len(there):
        raise DamagedFileError(
            f"a manifest names {count!r} shards, and {len(there)} folders of shards are there; load an earlier save"
        )
    return [f"shard-{shard}" for shard in range(count)]


@contextmanager
def exclusive(directory: Path) -> Iterator[bool]:
    """Context manager that holds the lock of a directory against other threads and processes. It cannot be nested.

    Yields whether the file system supports locks.
    """
    handle = None
    if fcntl is not None:
        # A link is refused: it could lead out of the directory, and create a file there.
        handle = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        _held.add(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except BaseException as error:
            _close(handle)
            handle = None
            if not isinstance(error, OSError):
                raise
    try:
        yield handle is not None
    finally:
        if handle is not None:
            # unlocked, not only closed: a process that is being forked may hold the file open as well
            fcntl.flock(handle, fcntl.LOCK_UN)
            _close(handle)


_held: set[int] = set()


def _close(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _close_all() -> None:
    # A child of a fork shares the parent's lock files, and a lock would outlive the parent.
    for handle in list(_held):
        _close(handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def _remove_marked(marks: Iterable[Path], kept: str | None) -> None:
    for mark in marks:
        data = mark.with_name(mark.name.partition(".")[0])
        if data.name != kept:
            remove_saved(data)
        with suppress(OSError):  # a folder of this name is no mark
            mark.unlink(missing_ok=True)
