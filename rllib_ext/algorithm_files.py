# SPDX-License-Identifier: Apache-2.0
"""What belongs together in a checkpoint: RLlib's files by their content, and what this library saved beside them.

RLlib overwrites the files of an earlier checkpoint one by one, and what this library saves comes after them. A save
that is cut short in between leaves files of two checkpoints, which a restore must not take for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pyarrow import fs

__all__ = ["check_algorithm_files", "fingerprints_of"]

_OWN_FOLDERS = ("levels", "replay_buffer")
_BLOCK_BYTES = 1 << 20


def fingerprints_of(path: str | Path | None, filesystem: fs.FileSystem | None, saved: str) -> dict[str, Any]:
    """Returns size and hash of every file that RLlib has just saved, by its path in the checkpoint.

    Args:
        path: the user gave for the checkpoint, a directory or a URI.
        filesystem: of ``path``; absent, the URI names it.
        saved: where RLlib saved it, as it returned.
    """
    if filesystem is None:
        filesystem = fs.LocalFileSystem() if path is None else fs.FileSystem.from_uri(str(path))[0]
    return {name: _record(filesystem, file) for name, file in _files(filesystem, saved).items()}


def check_algorithm_files(
    path: str | Path, filesystem: fs.FileSystem | None, recorded: Mapping[str, Any] | None, instead: str
) -> None:
    """Compares RLlib's files in a checkpoint with those that were there when this library saved its part.

    Args:
        path: of the checkpoint, a directory or a URI.
        filesystem: of ``path``; absent, the URI names it.
        recorded: by :func:`fingerprints_of`; ``None`` in checkpoints of earlier versions, which hold none.
        instead: what restores the algorithm alone, for the error.

    Raises:
        DamagedFileError: a file is missing or another one.
    """
    from lightning_replay.saving import DamagedFileError

    location = str(path)
    if filesystem is None:
        filesystem, location = fs.FileSystem.from_uri(location)
    present = _files(filesystem, location)
    for name, record in (recorded or {}).items():
        if name not in present or _record(filesystem, present[name]) != record:
            raise DamagedFileError(
                f"{path} holds files of two checkpoints: {name} is not the one that was saved with the rest, because a "
                f"save into this folder was cut short or the file is damaged. Nothing was restored. Restore an earlier "
                f"checkpoint; {instead}"
            )


def _files(filesystem: fs.FileSystem, location: str) -> dict[str, str]:
    """Returns RLlib's files: relative path to path. Tune's own begin with a dot."""
    found = filesystem.get_file_info(fs.FileSelector(location, recursive=True))
    names = {
        PurePosixPath(info.path).relative_to(location).as_posix(): info.path
        for info in found
        if info.type == fs.FileType.File
    }
    return {
        name: path
        for name, path in sorted(names.items())
        if name.split("/")[0] not in _OWN_FOLDERS and not any(part.startswith(".") for part in name.split("/"))
    }


def _record(filesystem: fs.FileSystem, file: str) -> dict[str, Any]:
    digest, num_bytes = hashlib.blake2b(digest_size=20), 0
    with filesystem.open_input_stream(file) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return {"bytes": num_bytes, "blake2b": digest.hexdigest()}
