# SPDX-License-Identifier: Apache-2.0
"""Files of saves: their names, which of them may be removed, writes that survive a power loss, and errors."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_replay.options import checked_local_path

LOCK_FILE = ".lock"
MAX_MANIFEST_BYTES = 128 << 20  # that of a save with a million chunk files is smaller
UNFINISHED = ".unfinished"  # ends the name of the mark of a save that may not be whole
#: Manifests, and what the name of the data folder begins with that each names.
DATA_FOLDERS = {
    "replay.json": "data",
    "replay_shards.json": "shards",
    "state.json": "state",
    "buffer.json": "rows",
    "shards.json": "shards",
}
_IS_SAVED = re.compile(  # the name of a file that this library writes into a save
    r"tensors\.safetensors|values\.json|\.lock|([a-z]+-[0-9a-f]{12}\.[a-z_]+)?\.unfinished"
    r"|\d{6}\.(chunk|[0-9a-f]{8}\.tmp)|(replay|replay_shards|state|buffer|shards)\.(json|[0-9a-f]{8}\.tmp)"
)
_FORMAT = b'"format": "lightning-replay'  # near the beginning of every manifest, also of a damaged one

#: Errors of code that reads values of an unexpected shape.
MALFORMED = (
    *(AttributeError, IndexError, KeyError, OverflowError, RecursionError, RuntimeError, StopIteration, TypeError),
    ValueError,
)


class DamagedFileError(RuntimeError):
    """A saved file is missing, truncated or does not hold what was written."""


def check_regular(file: Path) -> None:
    """Raises ``OSError`` if what would be read is no file: reading a pipe waits forever, and a device has no end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file} is no regular file")


def read_json(file: Path) -> Any:
    """Reads a small file that a stranger may have written. Raises ``OSError`` for a large one, else as ``json``."""
    check_regular(file)
    num_bytes = file.stat().st_size
    if num_bytes > MAX_MANIFEST_BYTES:
        raise OSError(f"{file} has {num_bytes:,} bytes, and at most {MAX_MANIFEST_BYTES:,} are read")
    return json.loads(file.read_text("utf-8"))


def touch(file: Path) -> None:
    """Creates an empty file unless something has its name. A link is not followed."""
    with suppress(FileExistsError):
        file.touch(exist_ok=False)


def check_writable(option: str, folder: str | Path) -> None:
    """Raises ``OSError`` if no file can be created in the folder of an option, or in the folder that will hold it.

    A URL is a ``ValueError``.
    """
    path = checked_local_path(option, folder).absolute()
    try:
        # Nothing is created: other processes may try the same place.
        with tempfile.TemporaryFile(dir=next(one for one in (path, *path.parents) if one.exists())):
            pass
    except OSError as error:
        raise OSError(f"{option} is {str(folder)!r}, where nothing can be written ({error}); give another") from error


def replace_file(file: Path, content: bytes | memoryview, folder: Path | None = None) -> None:
    """Writes a file under another name, waits until it is on the disk, and renames it to ``file``.

    Until then it is in ``folder``, by default that of the file.
    """
    temporary = (folder or file.parent) / f"{file.stem}.{uuid.uuid4().hex[:8]}.tmp"
    with temporary.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)


def sync(path: Path) -> None:
    """Waits until a file, or the file names in a directory, are on the disk and survive a power loss."""
    if os.name == "nt" and path.is_dir():  # Windows opens no directories
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no directory
            raise
    finally:
        os.close(handle)


def is_manifest(file: Path) -> bool:
    """Whether this library wrote the file, which may be damaged."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return _FORMAT in stream.read(4096)


def data_named_in(file: Path, folder: str) -> str | None:
    """Returns the name of the data folder in a manifest, or ``None`` if it is unreadable, or names any other place."""
    try:
        name = read_json(file)["data"]
    except (OSError, *MALFORMED):
        return None
    is_of_a_save = isinstance(name, str) and re.fullmatch(rf"{folder}-[0-9a-f]{{12}}", name)
    return name if is_of_a_save else None


def is_saved(name: str) -> bool:
    """Whether a file with this name, in a folder of data, is a save's."""
    return _IS_SAVED.fullmatch(name) is not None


def remove_saved(folder: Path) -> None:
    """Removes a save's files from a folder, and each folder that is then empty. No symbolic link is followed."""
    if folder.is_symlink():
        return
    for place, _, files in os.walk(folder, topdown=False):
        with suppress(OSError):
            for name in filter(is_saved, files):
                os.unlink(os.path.join(place, name))
            os.rmdir(place)
