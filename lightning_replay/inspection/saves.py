# SPDX-License-Identifier: Apache-2.0
"""Saved buffers at a path: a replay, levels, and buffers in checkpoints of Lightning and RLlib."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from lightning_replay.inspection.contents import LevelContents, ReplayContents, contents_of, levels_of
from lightning_replay.options import checked_local_path
from lightning_replay.saving.directory import data_of, names_of_shards, read_manifest, read_save
from lightning_replay.saving.files import MALFORMED, DamagedFileError
from lightning_replay.saving.states import (
    MANIFEST,
    STATE_MANIFEST,
    STATE_VERSION,
    join_state,
    open_data,
    read_state,
    replay_manifest,
)

# Manifests of RLlib checkpoints, see rllib_ext.checkpoints and rllib_ext.sharded.checkpoint.
_MODULES_MANIFEST = "buffer.json"
_SHARDS_MANIFEST = "shards.json"
_VERSIONS = {_MODULES_MANIFEST: 2, _SHARDS_MANIFEST: 1}
_CHECKPOINT_FOLDERS = ("replay_buffer", "levels")
_COUNT = "newest"  # Count of the saves of python -m rllib_ext, see rllib_ext.turns.
_TURNS = ("first", "second")

Contents = ReplayContents | LevelContents


class SavedBuffer(NamedTuple):
    """A buffer that was read from a save. ``name`` is empty for the only one at a path. ``size`` is in bytes."""

    name: str
    path: Path
    contents: Contents
    size: int


def read_buffers(path: str | Path) -> Iterator[SavedBuffer]:
    """Yields what the buffers saved at a path hold, one after the other. No code is run and no buffer is built.

    Of rows only the columns that are needed are kept, and chunk files are read piece by piece. What is read is checked.

    Args:
        path: a directory of ``save_replay``, of ``LevelBuffer.save``, or of a sharded replay, an RLlib checkpoint or
            its folder ``replay_buffer``, a Lightning checkpoint file or the folder of a replay beside it.

    Raises:
        FileNotFoundError: The path holds no save.
        DamagedFileError: A file is missing, truncated, or changed, or holds the state of another object.
        ValueError: The save has another format, for example of a newer version of this library.
    """
    for name, place in _places(checked_local_path("path", path)):
        is_replay = (place / MANIFEST).exists()
        manifest = (
            partial(replay_manifest, place)
            if is_replay
            else partial(read_manifest, place / STATE_MANIFEST, STATE_VERSION)
        )
        sides, size = read_save(place, manifest, partial(_read, is_replay))
        for side, contents in sides.items():
            yield SavedBuffer(f"{name}, {side}" if name and side else name or side, place, contents, size)


def _read(is_replay: bool, manifest: dict[str, Any], data: Path) -> tuple[dict[str, Contents], int]:
    """Returns what a save holds, by side of a mixed replay (of others under ``""``), and the bytes of its files."""
    saved = open_data(manifest, data)
    state = join_state(saved.values, {**saved.tensors, **saved.chunked})  # type: ignore[dict-item]
    try:
        contents: dict[str, Contents]
        if not is_replay:  # an RLlib checkpoint has the levels beside other entries
            contents = {"": levels_of(state.get("levels", state))}
        elif "offline" in state:
            built_by = manifest["built_by"]["arguments"]
            contents = {side: contents_of(state[side], built_by[side]) for side in ("online", "offline")}
        else:
            contents = {"": contents_of(state, manifest["built_by"])}
    except DamagedFileError:
        raise
    except MALFORMED as error:  # the state of something else
        what = "a replay buffer" if is_replay else "a level buffer"
        raise DamagedFileError(
            f"{data.parent} does not hold the state of {what} as this version reads it ({error!r}); give another save"
        ) from error
    return contents, sum(int(one["bytes"]) for one in manifest["files"].values())


def _places(path: Path) -> list[tuple[str, Path]]:
    """Returns names and directories of the buffers at a path."""
    if path.is_file() and path.suffix == ".ckpt":
        return _beside(path)
    if (path / MANIFEST).exists() or (path / STATE_MANIFEST).exists():
        return [("", path)]
    if (path / _SHARDS_MANIFEST).exists():
        data, manifest = _data_of(path / _SHARDS_MANIFEST)
        folders = names_of_shards(manifest, (one.name for one in data.iterdir() if one.is_dir()))
        shards = [(folder.replace("-", " "), data / folder) for folder in folders]
        found = ((name, inner, place) for name, shard in shards for inner, place in _places(shard))
        return [(f"{name}, {inner}" if inner else name, place) for name, inner, place in found]
    if (path / _MODULES_MANIFEST).exists():
        data, _ = _data_of(path / _MODULES_MANIFEST)
        modules = sorted(data.glob("module-*"))  # names of modules may have characters that files must not have
        names = [unquote(module.name.removeprefix("module-")) for module in modules]
        return [("" if len(modules) == 1 else f"module {name}", one) for name, one in zip(names, modules, strict=True)]
    if (path / _COUNT).is_dir():
        return _places(path / _TURNS[int(read_state(path / _COUNT)["saves"]) % 2])
    inside = [path / name for name in _CHECKPOINT_FOLDERS if (path / name).is_dir()]
    if inside:
        return [found for folder in inside for found in _places(folder)]
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give the directory of a saved buffer")
    near = sorted(one.name for one in path.glob("*") if one.suffix in (".replay", ".ckpt"))
    hint = f". There are {', '.join(near)}: give one of them" if near else ""
    raise FileNotFoundError(
        f"no saved buffer in {path}; give the directory of save_replay or LevelBuffer.save, an RLlib checkpoint, or a "
        f"Lightning checkpoint with its replay beside it{hint}"
    )


def _beside(checkpoint: Path) -> list[tuple[str, Path]]:
    """Returns the replays beside a Lightning checkpoint, see :mod:`lightning_replay.lit.checkpoint_files`."""
    pattern = re.compile(rf"{re.escape(checkpoint.stem)}\.\d+(?:-\d+)?\.replay")
    found = sorted(one for one in checkpoint.parent.iterdir() if pattern.fullmatch(one.name))
    if not found:
        raise FileNotFoundError(
            f"no replay is beside {checkpoint}: there is no folder {checkpoint.stem}.UPDATES.replay. Levels are inside "
            "the checkpoint file; save them with levels.save(path)"
        )
    return [("" if len(found) == 1 else one.name, one) for one in found]


def _data_of(file: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the folder that a manifest of several buffers names, and the manifest."""
    manifest = read_manifest(file, _VERSIONS[file.name])
    folder = data_of(file.parent, manifest)
    if not folder.is_dir():
        raise DamagedFileError(f"{file} names the folder {folder.name}, which is missing; give an earlier save")
    return folder, manifest
