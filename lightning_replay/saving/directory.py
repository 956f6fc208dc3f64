# SPDX-License-Identifier: Apache-2.0
"""A directory that holds one save, which is replaced, checked and read as a whole.

A save is a folder of data files and a manifest, JSON that names the folder and has a checksum. A new save is written
beside the old one, synced to the disk, and the manifest is replaced last: after a crash, ``kill -9`` or a power loss
the directory holds the old save or the new one. A file lock excludes other writers; readers need none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_replay.options import MissingExtraError, missing_extra
from lightning_replay.saving.files import MALFORMED, DamagedFileError, check_regular, replace_file, sync

if TYPE_CHECKING:
    from lightning_replay.saving.folders import Folder

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
_ATTEMPTS = 5  # of a reader while another writes; then it takes the lock

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
        yield Path(path)
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
    except ImportError as error:  # of fsspec, from that of the protocol's package
        raise MissingExtraError(f"{url} needs {getattr(error.__cause__, 'name', 'a package')}: {error}") from error
    except ValueError as error:
        raise ValueError(
            f"{url} cannot be used: {error}. Give a folder, or a URL of fsspec, such as s3://bucket/folder (package "
            "s3fs), gs:// (gcsfs) or abfs:// (adlfs)"
        ) from error


@contextmanager
def replaced_save(directory: Path, manifest_name: str, *, folder: str) -> Iterator[NewSave]:
    """Context manager for writing a save in its body; at the end it replaces the one in ``directory``.

    Waits while another process or thread saves there, and removes leftovers of killed saves. An exception in the body
    leaves the directory as it was. A directory may hold several manifests, with data folders of different prefixes.
    """
    new = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for place in new:
        sync(place.parent)
    with exclusive(directory) as is_alone:
        before = _folder_named_in(directory / manifest_name, folder)
        name = f"{folder}-{uuid.uuid4().hex[:12]}"
        data = directory / name
        data.mkdir()
        save = NewSave(data, {"id": uuid.uuid4().hex, "data": name})
        try:
            yield save
            sync(data)
            sync(directory)  # the manifest must not name a folder that a power loss removes
            text = json.dumps(save.manifest | {"checksum": checksum_of(save.manifest)}, indent=1).encode()
            replace_file(directory / manifest_name, text)
            sync(directory)
        except BaseException:
            if _folder_named_in(directory / manifest_name, folder) != name:  # an interrupt may come after the swap
                shutil.rmtree(data, ignore_errors=True)
            raise
        save.bytes_of_manifest = len(text)
        if is_alone:
            _remove_remains(directory, Path(manifest_name).stem, folder, name)
        elif before is not None:  # without a lock, other folders may belong to saves that are being written
            shutil.rmtree(directory / before, ignore_errors=True)


def read_manifest(file: Path, version: int) -> dict[str, Any]:
    """Reads a manifest of a format version; errors as :func:`~lightning_replay.saving.read_state`."""
    try:
        check_regular(file)
        manifest = json.loads(file.read_text())
        if manifest["checksum"] != checksum_of(manifest):
            raise ValueError("its checksum differs")
        found, _ = manifest["version"], manifest["id"]
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
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def read_save(directory: Path, manifest: Callable[[], dict[str, Any]], read: Callable[[dict[str, Any], Path], T]) -> T:
    """Reads a save that others may replace meanwhile; the result is of one save.

    ``manifest`` reads the manifest, ``read`` makes the result of it and of the data folder.
    """
    for _ in range(_ATTEMPTS):
        found = manifest()
        try:
            return read(found, _data_of(directory, found))
        except DamagedFileError:
            if manifest() == found:
                raise
    with exclusive(directory):
        found = manifest()
        return read(found, _data_of(directory, found))


def _data_of(directory: Path, manifest: Mapping[str, Any]) -> Path:
    name = manifest.get("data")
    if not isinstance(name, str) or not Path(name).name.strip("."):
        raise DamagedFileError(f"the manifest in {directory} names no folder of data; load an earlier save")
    return directory / Path(name).name


@contextmanager
def exclusive(directory: Path) -> Iterator[bool]:
    """Context manager that holds the lock of a directory against other threads and processes; cannot be nested.

    Yields whether the file system supports locks.
    """
    handle = None
    if fcntl is not None:
        handle = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
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


def _folder_named_in(file: Path, folder: str) -> str | None:
    # None for an unreadable manifest, and for a folder of the user's.
    try:
        name = Path(json.loads(file.read_text())["data"]).name
    except (OSError, *MALFORMED):
        return None
    return name if _is_of_a_save(name, folder) else None


def _is_of_a_save(name: str, folder: str) -> bool:
    return re.fullmatch(rf"{folder}-[0-9a-f]{{12}}", name) is not None


def _remove_remains(directory: Path, stem: str, folder: str, name: str) -> None:
    for stale in directory.glob(f"{folder}-*"):
        if stale.name != name and _is_of_a_save(stale.name, folder):
            shutil.rmtree(stale, ignore_errors=True)
    for unfinished in directory.glob(f"{stem}.*.tmp"):
        unfinished.unlink(missing_ok=True)
