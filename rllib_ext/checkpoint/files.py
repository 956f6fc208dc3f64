# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of RLlib's files in a checkpoint on any file system of pyarrow.

RLlib overwrites the files of an earlier checkpoint one by one, and this library writes its folders after them. A save
cut short in between leaves files of two checkpoints, which fingerprints reveal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from pyarrow import fs

from lightning_replay.sharded.folders import Folder

_OWN_FOLDERS = ("levels", "replay_buffer")
_BLOCK_BYTES = 1 << 20


def fingerprints_of(checkpoint: Folder) -> dict[str, Any]:
    """Returns size and hash of each file that RLlib has just saved, by its path in the checkpoint."""
    return {name: _record(checkpoint.filesystem, file) for name, file in _files(checkpoint).items()}


def check_fingerprints(checkpoint: Folder, recorded: Mapping[str, Any] | None, instead: str) -> None:
    """Compares RLlib's files in a checkpoint with their fingerprints.

    Args:
        checkpoint: that RLlib has saved.
        recorded: by :func:`fingerprints_of`; ``None`` of a buffer written without an algorithm.
        instead: option that restores the algorithm alone, for the error.

    Raises:
        DamagedFileError: a file is missing or another one.
    """
    from lightning_replay.saving import DamagedFileError

    present = _files(checkpoint)
    for name, record in (recorded or {}).items():
        if name not in present or _record(checkpoint.filesystem, present[name]) != record:
            raise DamagedFileError(
                f"{checkpoint} holds files of two checkpoints: {name} is not the one that was saved with the rest, "
                f"because a save into this folder was cut short or the file is damaged. Nothing was restored. Restore "
                f"an earlier checkpoint; {instead}"
            )


def _files(checkpoint: Folder) -> dict[str, str]:
    """Returns the paths of RLlib's files by their relative paths. Tune's own begin with a dot."""
    found = {}
    for info in checkpoint.filesystem.get_file_info(fs.FileSelector(checkpoint.path, recursive=True)):
        relative = PurePosixPath(info.path.strip("/")).relative_to(checkpoint.path.strip("/"))
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
