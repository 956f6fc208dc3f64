# SPDX-License-Identifier: Apache-2.0
"""A directory that holds one save: replaced as a whole, checked as a whole, read as a whole.

A save is a folder of data files and a manifest, JSON that names the folder and has a checksum. A new save is written
beside the old one, synced to the disk, and the manifest is swapped last: after a crash, ``kill -9`` or a power loss the
directory holds the old save or the new one. Writers of one directory take turns by a file lock; readers need none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_replay.saving.serialization import MALFORMED, DamagedFileError, sync

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["DATA_FOLDER", "LOCK_FILE", "NewSave", "exclusive", "read_manifest", "read_save", "replaced_save"]

LOCK_FILE = ".lock"
DATA_FOLDER = "data"  # how the names of the folders of data begin
_ATTEMPTS = 5  # of a reader beside a writer; then it takes its turn among the writers

T = TypeVar("T")


@dataclass
class NewSave:
    """A save in the making.

    Attributes:
        data: an empty folder for its files.
        manifest: what the manifest will hold, beside its checksum; ``id`` and ``data`` are there.
        bytes_of_manifest: set once it is written.
    """

    data: Path
    manifest: dict[str, Any]
    bytes_of_manifest: int = 0


@contextmanager
def replaced_save(directory: Path, manifest_name: str, *, folder: str = DATA_FOLDER) -> Iterator[NewSave]:
    """Context manager in whose body a save is written that replaces the one in ``directory`` at the end.

    Waits while another process or thread saves there. What saves that were killed left behind is removed. An exception
    in the body leaves the directory as it was.

    Args:
        directory: created when missing.
        manifest_name: its file; one directory may hold saves of several manifests with other folders.
        folder: how the names of the data folders begin.
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
            sync(directory)  # the manifest must not name a folder that a power loss takes away
            text = json.dumps(save.manifest | {"checksum": checksum_of(save.manifest)}, indent=1)
            _replace(directory / manifest_name, text)
        except BaseException:
            if _folder_named_in(directory / manifest_name, folder) != name:  # an interrupt may come after the swap
                shutil.rmtree(data, ignore_errors=True)
            raise
        save.bytes_of_manifest = len(text.encode())
        if is_alone:
            _remove_remains(directory, Path(manifest_name).stem, folder, name)
        elif before is not None:  # other folders may be of saves in the making
            shutil.rmtree(directory / before, ignore_errors=True)


def read_manifest(file: Path, newest: int, *, checked_from: int = 1) -> dict[str, Any]:
    """Reads a manifest.

    Args:
        file: of the manifest.
        newest: version that can be read.
        checked_from: the first version that has a checksum.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it is unreadable or changed since it was written.
        ValueError: it was written by a newer version of this library.
    """
    try:
        manifest = json.loads(file.read_text())
        version = manifest["version"]
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(f"format version {version!r}")
        # Of whatever version it claims to be, also of a later one: a manifest with a checksum has to match it.
        if "checksum" in manifest or checked_from <= version <= newest:
            if manifest.get("checksum") != checksum_of(manifest):
                raise ValueError("its checksum differs")
            _ = manifest["id"]
    except FileNotFoundError:
        raise
    except (OSError, *MALFORMED) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); load an earlier save") from error
    if version > newest:
        raise ValueError(
            f"{file} has format version {version}; this lightning-replay reads versions up to {newest}. "
            "Install a newer lightning-replay"
        )
    return manifest


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """Returns the hash of what a manifest holds, its checksum left out; of its values, not of their layout."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def read_save(directory: Path, manifest: Callable[[], dict[str, Any]], read: Callable[[dict[str, Any], Path], T]) -> T:
    """Reads a save that may be replaced meanwhile: the result is that of one save.

    Args:
        directory: of the save.
        manifest: reads the manifest.
        read: from the manifest and the data folder to the result; raises ``DamagedFileError``.
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
    """Context manager that holds the lock of a directory; yields whether there is one, which some file systems lack.

    It excludes other threads and processes, this one included: do not nest it.
    """
    handle = None
    if fcntl is not None:
        handle = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        _held.add(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            _let_go(handle)
            handle = None
    try:
        yield handle is not None
    finally:
        if handle is not None:
            # Unlocked, not just closed: a process that is being forked may hold the file open as well.
            fcntl.flock(handle, fcntl.LOCK_UN)
            _let_go(handle)


_held: set[int] = set()


def _let_go(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _let_all_go() -> None:
    """In a forked process: the lock is the parent's, and must not outlive it because the file is open here too."""
    for handle in list(_held):
        _let_go(handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_all_go)


def _folder_named_in(file: Path, folder: str) -> str | None:
    """Returns the data folder of the save that is there; ``None`` where it cannot be read, or is none of a save's."""
    try:
        name = Path(json.loads(file.read_text())["data"]).name
    except (OSError, *MALFORMED):
        return None
    return name if name.startswith(f"{folder}-") else None


def _replace(file: Path, text: str) -> None:
    """Writes ``file`` so that a reader, also after a power loss, finds either the old text or the new."""
    temporary = file.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
    sync(file.parent)


def _remove_remains(directory: Path, stem: str, folder: str, name: str) -> None:
    """Removes the data of earlier saves, and what saves that were killed left behind; all but the folder ``name``."""
    for stale in directory.glob(f"{folder}-*"):
        if stale.name != name:
            shutil.rmtree(stale, ignore_errors=True)
    for unfinished in directory.glob(f"{stem}.*.tmp"):
        unfinished.unlink(missing_ok=True)
