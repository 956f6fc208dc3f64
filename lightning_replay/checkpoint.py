# SPDX-License-Identifier: Apache-2.0
"""Replay buffers saved to a directory and loaded again, without code in the files."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any

from lightning_replay.recorded import build, describe
from lightning_replay.replay import Replay
from lightning_replay.state_files import TENSORS_FILE, VALUES_FILE, DamagedFileError, read_state, write_state

FORMAT_VERSION = 1
MANIFEST = "replay.json"


def save_replay(replay: Replay, path: str | Path) -> None:
    """Saves a replay buffer: rows, priorities, generators, counters and how it was built.

    The directory holds a manifest and the data it names. New data is written beside the old and the manifest is
    swapped last, so a save that is cut short (a crash, ``kill -9``) leaves the previous one loadable.

    Args:
        replay: the buffer; it is not changed.
        path: a directory, created when missing; an earlier save in it is replaced.

    Example:
        >>> import tempfile
        >>> from lightning_replay import load_replay, recipes, save_replay
        >>> replay = recipes.uniform(capacity=100, batch_size=4)
        >>> save_replay(replay, tempfile.mkdtemp() + "/buffer")
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / f"data-{uuid.uuid4().hex[:12]}"
    write_state(data, replay.state_dict())
    manifest = {
        "format": "lightning-replay",
        "version": FORMAT_VERSION,
        "built_by": describe(replay),
        "length": len(replay),
        "data": data.name,
        "files": {name: _fingerprint(data / name) for name in (TENSORS_FILE, VALUES_FILE)},
    }
    _replace_file(directory / MANIFEST, json.dumps(manifest, indent=1))
    for stale in directory.glob("data-*"):
        if stale.name != data.name:
            shutil.rmtree(stale, ignore_errors=True)


def load_replay(path: str | Path) -> Replay:
    """Builds the saved buffer anew and restores it: the next draws are those the saved one would have made.

    Raises:
        FileNotFoundError: no saved buffer there.
        DamagedFileError: a file is missing, truncated or changed.
        ValueError: saved by a newer version of this library.
        NotRebuildableError: an option was neither a plain value nor an import path; build the buffer and call
            ``replay.load(path)``.
    """
    manifest = _read_manifest(Path(path))
    replay = build(manifest["built_by"])
    if not isinstance(replay, Replay):
        raise DamagedFileError(f"{Path(path) / MANIFEST} describes a {type(replay).__name__}, not a replay buffer")
    replay.load_state_dict(_read_data(Path(path), manifest))
    return replay


def load_into(replay: Replay, path: str | Path) -> None:
    """Restores a saved buffer into ``replay``, which must have been built with the same options."""
    manifest = _read_manifest(Path(path))
    replay.load_state_dict(_read_data(Path(path), manifest))


def _read_manifest(directory: Path) -> dict[str, Any]:
    file = directory / MANIFEST
    if not file.exists():
        raise FileNotFoundError(f"no saved replay buffer in {directory}: {MANIFEST} is missing")
    try:
        manifest = json.loads(file.read_text())
        version = int(manifest["version"])
        if version <= FORMAT_VERSION:
            _ = manifest["built_by"], manifest["data"], manifest["files"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); load an earlier save") from error
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {version}; this lightning-replay reads versions up to {FORMAT_VERSION}. "
            "Install a newer lightning-replay"
        )
    return manifest


def _read_data(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    data = directory / Path(manifest["data"]).name
    for name, expected in manifest["files"].items():
        file = data / Path(name).name
        if not file.exists() or _fingerprint(file) != expected:
            raise DamagedFileError(
                f"{file} is missing, truncated or changed since it was saved; nothing was loaded. Load an earlier save"
            )
    return read_state(data)


def _fingerprint(file: Path) -> dict[str, int]:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}


def _replace_file(file: Path, text: str) -> None:
    """Writes ``file`` so that a reader finds either the old text or the new, never a part."""
    temporary = file.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
