# SPDX-License-Identifier: Apache-2.0
"""Saves on disk as the tests look at them and forge them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_replay.saving.directory import LOCK_FILE, checksum_of


def forge(file: Path, **changes: Any) -> None:
    """Changes a manifest and makes its checksum fit, as whoever writes a file by hand can."""
    manifest = {key: value for key, value in json.loads(file.read_text()).items() if key != "checksum"} | changes
    file.write_text(json.dumps(manifest | {"checksum": checksum_of(manifest)}))


def files_of(folder: Path) -> list[Path]:
    """All files of a save but its lock."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)


def names_in(folder: Path) -> list[str]:
    """What lies in a folder but its lock, without the random part of names."""
    return sorted(path.name.split("-")[0] for path in folder.iterdir() if path.name != LOCK_FILE)
