# SPDX-License-Identifier: Apache-2.0
"""Files that survive a power loss, and the errors of those that did not."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import uuid
from pathlib import Path

#: Errors of code that reads values of an unexpected shape.
MALFORMED = (
    *(AttributeError, IndexError, KeyError, OverflowError, RecursionError, RuntimeError, StopIteration, TypeError),
    ValueError,
)


class DamagedFileError(RuntimeError):
    """A saved file is missing, truncated or does not hold what was written."""


def check_regular(file: Path) -> None:
    """Raises ``OSError`` if what would be read is no file: reading a pipe waits for ever, and a device has no end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file} is no regular file")


def check_writable(option: str, folder: str | Path) -> None:
    """Raises ``OSError`` where no file can be created in the folder of an option, or where it will be created."""
    path = Path(folder).absolute()
    try:
        # Nothing is created: other processes may try the same place.
        with tempfile.TemporaryFile(dir=next(one for one in (path, *path.parents) if one.exists())):
            pass
    except OSError as error:
        raise OSError(f"{option} is {str(folder)!r}, where nothing can be written ({error}); give another") from error


def replace_file(file: Path, content: bytes | memoryview) -> None:
    """Writes a file under another name, waits until it is on the disk, and renames it to ``file``."""
    temporary = file.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
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
