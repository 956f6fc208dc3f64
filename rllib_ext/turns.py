# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints of an algorithm in one folder, written in turns: whenever a save is killed, one of them is whole.

RLlib writes a checkpoint file by file. A save writes over the older checkpoint. Last, it replaces a small file that
counts the saves, and so names the newer checkpoint.
"""

from __future__ import annotations

from typing import Any

from lightning_replay.saving import read_state, write_state
from lightning_replay.saving.folders import Folder

PLACES = ("first", "second")
COUNT = "newest"


def newest_in(folder: Folder) -> Folder:
    """Returns the newest whole checkpoint, or the folder itself if it holds none, as after RLlib's own save there."""
    saves = _count(folder)
    return folder / PLACES[saves % 2] if saves else folder


def save_in_turns(algorithm: Any, folder: Folder) -> Folder:
    """Saves an algorithm over the older checkpoint, and returns the checkpoint's folder."""
    saves = _count(folder) + 1
    place = folder / PLACES[saves % 2]
    algorithm.save_to_path(place.path, filesystem=place.filesystem)
    with (folder / COUNT).to_write() as local:
        write_state(local, {"saves": saves})
    return place


def _count(folder: Folder) -> int:
    with (folder / COUNT).to_read() as local:
        return int(read_state(local)["saves"]) if local.exists() else 0
