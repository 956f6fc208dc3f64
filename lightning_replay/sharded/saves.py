# SPDX-License-Identifier: Apache-2.0
"""A sharded replay on disk: a folder that each shard writes, and a manifest that names them, written last."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lightning_replay.saving import DamagedFileError, read_state, write_state
from lightning_replay.saving.directory import read_manifest, replaced_save
from lightning_replay.saving.replays import MANIFEST as MANIFEST_OF_REPLAY
from lightning_replay.saving.replays import MANIFEST_OF_SHARDS as MANIFEST
from lightning_replay.saving.replays import SHARDS_VERSION
from lightning_replay.saving.serialization import MALFORMED
from lightning_replay.sharded.actors import ShardActors

_FORMAT = "lightning-replay-shards"
_STATE = "draws"


class Saved(NamedTuple):
    """What is saved beside the shards.

    Attributes:
        recipe: its name.
        num_shards: S.
        state: of draws and counts: tensors and plain values.
    """

    recipe: str
    num_shards: int
    state: dict[str, Any]


def write_shards(shards: ShardActors, folder: Path, saved: Saved, previous: Path | None) -> list[str]:
    """Writes every shard into a folder of its own, then the manifest; returns the shards' folders.

    Args:
        shards: of :class:`~lightning_replay.sharded.shard.ReplayShard`.
        folder: replaced as a whole.
        saved: what is written beside them.
        previous: the folder of an earlier save, whose unchanged files are linked.

    Raises:
        ValueError: a shard is on a node that does not see the folder.
    """
    earlier = _earlier(previous, len(shards))
    with replaced_save(folder, MANIFEST, folder="shards") as save:
        paths = [save.data / f"shard-{shard}" for shard in range(len(shards))]
        shards.call("save", lambda shard: (str(paths[shard]), earlier[shard]))
        unseen = [shard for shard, path in enumerate(paths) if not (path / MANIFEST_OF_REPLAY).is_file()]
        if unseen:
            raise ValueError(
                f"shards {unseen} have written into {folder} on their own nodes, and this node does not see it; "
                "nothing was saved. Give a path on storage that every node has, such as a network file system"
            )
        write_state(save.data / _STATE, saved.state)
        save.manifest |= {"format": _FORMAT, "version": SHARDS_VERSION}
        save.manifest |= {"recipe": saved.recipe, "num_shards": saved.num_shards}
    return [str(path) for path in paths]


def read_shards(folder: Path) -> tuple[Saved, list[str]]:
    """Returns what was saved beside the shards, and their folders.

    Raises:
        FileNotFoundError: no sharded replay was saved there.
        DamagedFileError: a file is missing or damaged.
        ValueError: a newer format.
    """
    if not (folder / MANIFEST).exists():
        hint = ". A replay without shards is there" if (folder / MANIFEST_OF_REPLAY).exists() else ""
        raise FileNotFoundError(f"no sharded replay was saved in {folder}: {MANIFEST} is missing{hint}")
    manifest = read_manifest(folder / MANIFEST, SHARDS_VERSION)
    try:
        data, num_shards, recipe = folder / Path(manifest["data"]).name, manifest["num_shards"], manifest["recipe"]
        paths = [str(data / f"shard-{shard}") for shard in range(num_shards)]
    except MALFORMED as error:
        raise DamagedFileError(f"{folder / MANIFEST} is damaged ({error}); load an earlier save") from error
    return Saved(recipe, num_shards, read_state(data / _STATE)), paths


def _earlier(previous: Path | None, count: int) -> list[str | None]:
    """Returns the folders of an earlier save by shard, ``None`` where there is none of as many shards."""
    if previous is not None:
        try:
            saved, folders = read_shards(previous)
        except (OSError, ValueError, DamagedFileError):
            return [None] * count
        if saved.num_shards == count:
            return [*folders]
    return [None] * count
