# SPDX-License-Identifier: Apache-2.0
"""Saves on disk as the tests look at them and forge them."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import torch

import lightning_replay
from lightning_replay import recipes
from lightning_replay.replay import Replay
from lightning_replay.saving.directory import checksum_of
from lightning_replay.saving.files import LOCK_FILE
from lightning_replay.saving.spec import PUBLIC
from tests.transitions import numbered_steps


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


def stored(recipe=recipes.uniform, **options) -> Replay:
    """200 rows; the next one goes to slot 10."""
    replay = recipe(capacity=200, batch_size=8, **options)
    replay.extend(numbered_steps(0, 210))
    return replay


def draws(replay: Replay, count: int = 5) -> list[torch.Tensor]:
    batches = [replay.sample() for _ in range(count)]
    return [batch[key] for batch in batches for key in ("index", "observation", ("next", "reward"))]


def flip_a_byte(file) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def truncate(file) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def lengthen(file) -> None:
    file.write_bytes(file.read_bytes() + b"0")


def remove(file) -> None:
    file.unlink()


def recorded_classes() -> list[type]:
    """The rebuildable classes of this library, wherever they are defined."""
    for module in pkgutil.walk_packages(lightning_replay.__path__, "lightning_replay."):
        if module.name.startswith(tuple(PUBLIC[1:])):
            importlib.import_module(module.name)
    found, classes = {object}, [object]
    while classes:
        new = {cls for cls in type.__subclasses__(classes.pop()) if cls is not type} - found
        found |= new
        classes += new
    own = [
        cls
        for cls in found
        if str(getattr(cls, "__module__", None)).startswith("lightning_replay.") and "_record" in vars(cls)
    ]
    return sorted(own, key=lambda cls: cls.__name__)
