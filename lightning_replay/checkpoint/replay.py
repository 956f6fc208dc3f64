# SPDX-License-Identifier: Apache-2.0
"""Replay buffers saved to a directory and restored from it, without code in the files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning_replay.checkpoint.state import frozen_state
from lightning_replay.parts import BufferHooks
from lightning_replay.saving.chunks import CHUNK_SUFFIX, Fingerprint
from lightning_replay.saving.directory import read_manifest, read_save, replaced_save
from lightning_replay.saving.replays import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_OF_SHARDS,
    SHARDS_VERSION,
    replay_manifest,
)
from lightning_replay.saving.serialization import DamagedFileError
from lightning_replay.saving.spec import describe
from lightning_replay.saving.state import SavedSize, chunks_of, open_data, write_data

logger: logging.Logger = logging.getLogger(__name__)

__all__ = ["SavedSize", "read_replay", "save_id", "save_replay", "verify_replay"]


def save_replay(replay: Any, path: str | Path, *, previous: str | Path | None = None) -> SavedSize:
    """Saves a replay buffer at one moment: rows, priorities, generators, counters and the options it was built with.

    Other threads wait only while the small parts of the state are copied (priorities, links, lists). Later writes
    first copy the rows that they overwrite, in pieces of 256 KiB, unless these are saved already. The directory is
    replaced as a whole, see :mod:`lightning_replay.saving.directory`: a save that is interrupted (a crash, ``kill -9``,
    a power loss) leaves the previous one loadable.

    Parts of the rows whose content an earlier save holds are hard-linked instead of written. Every save is complete,
    and removing another never affects it; but damage of the disk in a shared file affects all saves that share it,
    which loading and :func:`verify_replay` detect.

    Args:
        replay: the buffer; it is not changed.
        path: a directory, created when missing; files of an earlier save in it are shared, then it is replaced.
        previous: directory of another save to share files with; if it cannot be used (missing, damaged, of another
            buffer, on another file system), everything is written.

    Returns:
        bytes of the save, and those written now.

    Raises:
        TypeError: something other than a replay buffer, such as a level buffer.

    Example:
        >>> import tempfile
        >>> from lightning_replay import load_replay, recipes, save_replay
        >>> replay = recipes.uniform(capacity=100, batch_size=4)
        >>> size = save_replay(replay, tempfile.mkdtemp() + "/buffer")
    """
    if not isinstance(replay, BufferHooks):
        raise TypeError(
            f"replay is a {type(replay).__name__}; save_replay saves replay buffers. A level buffer saves and loads "
            "itself: levels.save(path), levels.load(path)"
        )
    directory = Path(path)
    with replaced_save(directory, MANIFEST, folder="data") as save:
        earlier = _chunks_in(directory) if (directory / MANIFEST).exists() else {}
        if previous is not None:
            earlier |= _chunks_in(Path(previous))
        with frozen_state(replay) as state:
            save.manifest |= {"format": FORMAT, "version": FORMAT_VERSION}
            save.manifest |= {"built_by": describe(replay), "length": state["length"]}
            size = write_data(save, state, earlier)
    has_chunks = any(name.endswith(CHUNK_SUFFIX) for name in save.manifest["files"])
    if previous is not None and has_chunks and size.written == size.total:
        logger.info("no file of %s could be shared; everything was written to %s", previous, directory)
    return SavedSize(size.total + save.bytes_of_manifest, size.written + save.bytes_of_manifest)


def verify_replay(path: str | Path) -> dict[str, Any]:
    """Reads and checks a saved buffer without building one.

    Returns:
        ``built_by``: class and options of the buffer, as plain values; ``length``: transitions.

    Raises:
        FileNotFoundError: no saved buffer there.
        DamagedFileError: a file is missing, truncated or changed.
        ValueError: saved by a newer version of this library.
    """

    def check(manifest: dict[str, Any], data: Path) -> dict[str, Any]:
        open_data(manifest, data).check()
        return {key: manifest[key] for key in ("built_by", "length")}

    return read_save(Path(path), lambda: replay_manifest(Path(path)), check)


def save_id(path: str | Path) -> str:
    """Returns the unique id of a save, also of a sharded replay; raises as :func:`verify_replay`."""
    of_shards = Path(path) / MANIFEST_OF_SHARDS
    manifest = read_manifest(of_shards, SHARDS_VERSION) if of_shards.exists() else replay_manifest(Path(path))
    return str(manifest["id"])


def read_replay(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return read_save(
        directory,
        lambda: replay_manifest(directory),
        lambda manifest, data: (manifest, open_data(manifest, data).read()),
    )


def _chunks_in(directory: Path) -> dict[Fingerprint, Path]:
    """Returns the chunk files of an earlier save; none if it cannot be used."""
    try:
        manifest = replay_manifest(directory)
    except (OSError, ValueError, DamagedFileError) as error:
        logger.info("%s is not used as an earlier save: %s", directory, error)
        return {}
    return chunks_of(manifest, directory / Path(manifest["data"]).name)
