# SPDX-License-Identifier: Apache-2.0
"""The files of a saved replay buffer, read without building one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_replay.saving.directory import read_manifest
from lightning_replay.saving.files import MALFORMED, DamagedFileError
from lightning_replay.saving.states import STATE_MANIFEST

FORMAT = "lightning-replay"
FORMAT_VERSION = 3
MANIFEST = "replay.json"
SHARDS_VERSION = 1
MANIFEST_OF_SHARDS = "replay_shards.json"  # in place of the other, of a replay divided over several processes


def replay_manifest(directory: Path) -> dict[str, Any]:
    """Returns the checked manifest of a saved buffer.

    Raises:
        FileNotFoundError: no saved buffer there.
        DamagedFileError: the manifest is unreadable or changed.
        ValueError: saved by a newer version of this library.
    """
    file = directory / MANIFEST
    if not file.exists():
        is_of_levels = (directory / STATE_MANIFEST).exists()
        hint = ". A level buffer is there: levels.load(path) of one built alike reads it" if is_of_levels else ""
        if (directory / MANIFEST_OF_SHARDS).exists():
            hint = ". A sharded replay is there: ShardedReplay(...).load(path) of one built alike reads it"
        raise FileNotFoundError(f"no saved replay buffer in {directory}: {MANIFEST} is missing{hint}")
    manifest = read_manifest(file, FORMAT_VERSION)
    try:
        _ = manifest["built_by"], manifest["length"], Path(manifest["data"])
        _ = [record["bytes"] for record in manifest["files"].values()]
    except MALFORMED as error:
        raise DamagedFileError(f"{file} is damaged ({error}); load an earlier save") from error
    return manifest
