# SPDX-License-Identifier: Apache-2.0
"""Shards on disk: a folder that each shard writes, a state beside them, and a manifest that names all, written last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_replay.saving import DamagedFileError, read_state, write_state
from lightning_replay.saving.directory import replaced_save
from lightning_replay.saving.replays import SHARDS_VERSION
from lightning_replay.sharded.actors import CallOfAll, ShardActors, ShardLostError
from lightning_replay.sharded.folders import Folder
from lightning_replay.sharded.served_folders import folders_of_shards

logger: logging.Logger = logging.getLogger(__name__)

_FORMAT = "lightning-replay-shards"
_DATA = "shards"


class FileNames(NamedTuple):
    """Names in a save of shards."""

    manifest: str  # of all
    of_shard: str  # the manifest in the folder of each shard
    state: str  # the folder of what is saved beside the shards


def write_shards(
    shards: ShardActors,
    folder: Folder,
    names: FileNames,
    state: Callable[[], Mapping[str, Any]],
    fields: Mapping[str, Any],
    earlier: Sequence[Folder | None],
    *arguments: Any,
) -> list[Folder]:
    """Lets every shard write into a folder of its own, then writes the state and the manifest.

    After an error, or when this process is killed, ``folder`` holds the save before; what the next save finds of this
    one it removes.

    Args:
        shards, folder, names: what to write, and where to.
        state: returns what is saved beside the shards, once they were sent the call: tensors and plain values.
        fields: of the manifest, beside those of every save.
        earlier: the folder of each shard in a save whose unchanged files are linked.
        arguments: further ones of the shards' ``save``.

    Returns:
        The shards' folders.

    Raises:
        RuntimeError: a shard was lost meanwhile.
        TimeoutError: a shard has not finished within ``save_timeout_s``; it is named.
        ValueError: this process does not find what shards have written.
    """
    count = len(shards)
    with folder.to_write() as local, replaced_save(local, names.manifest, folder=_DATA) as save:
        data, own = folder / save.data.name, names_of_shards(save.data.name, count)
        seen = folders_of_shards(shards, folder, save.data.name)
        parts = [one / name for one, name in zip(seen, own, strict=True)]
        try:
            limit_s = shards.options.save_timeout_s
            sent = shards.send_all("save", lambda shard: (parts[shard], earlier[shard], *arguments), limit_s=limit_s)
            # Other processes may fill it and draw from it until all have written: each shard saves what it has now.
            saved_beside = state()
            sizes = shards.values_of(sent)
            _check_written(folder, [f"{name}/{names.of_shard}" for name in own])
        except BaseException as error:
            data.remove()
            if isinstance(error, ShardLostError | TimeoutError):
                kind = RuntimeError if isinstance(error, ShardLostError) else TimeoutError
                raise kind(
                    f"{error}; this was while the shards saved into {folder}. No checkpoint was made, and the replay "
                    "saved there before is unchanged. Save again, or raise save_timeout_s"
                ) from error
            raise
        write_state(save.data / names.state, saved_beside)
        total = sum(size for size, _ in sizes)
        save.manifest |= {"format": _FORMAT, "version": SHARDS_VERSION, "num_shards": count, "bytes": total, **fields}
    logger.info("%d shards saved: %s bytes, %s of them written", count, f"{total:,}", f"{sum(n for _, n in sizes):,}")
    return parts


def stage_shards(
    shards: ShardActors, folder: Folder, data: str, names: Sequence[str], *fields: Any
) -> tuple[CallOfAll, list[Folder] | None]:
    """Lets every shard read a save without using it yet; of other shards than there are, episodes are dealt out anew.

    Args:
        shards, folder: which read, and the save.
        data: the folder of its data in it.
        names: of the shards' folders in it; a single one without a name is ``folder`` itself.
        fields: further arguments of the shards' ``stage``.

    Returns:
        The answered call; and the folder of each shard, ``None`` where the save is of another number.
    """
    seen = folders_of_shards(shards, folder, data)
    parts = [[one / name if name else one for name in names] for one in seen]
    sent = shards.send_all("stage", lambda shard: (parts[shard], *fields), limit_s=shards.options.save_timeout_s)
    shards.values_of(sent)
    return sent, [part[shard] for shard, part in enumerate(parts)] if len(names) == len(parts) else None


def names_of_shards(data: str, count: int) -> list[str]:
    return [f"{data}/shard-{shard}" for shard in range(count)]


def read_shards_state(folder: Folder, data: str, names: FileNames) -> dict[str, Any]:
    with (folder / data / names.state).to_read() as local:
        try:
            return read_state(local)
        except FileNotFoundError as error:
            raise DamagedFileError(f"{error}; nothing was restored. Restore an earlier checkpoint") from error


def earlier_shards(previous: Path | None, count: int, read: Callable[[Folder], Sequence[str]]) -> list[Folder | None]:
    """Returns the folders of an earlier save by shard, ``None`` where there is none of as many shards.

    ``read`` returns the names of the shards' folders in a save.
    """
    if previous is not None:
        folder = Folder.at(previous)
        try:
            names = read(folder)
        except (DamagedFileError, OSError, ValueError):
            return [None] * count
        if len(names) == count:
            return [folder / name for name in names]
    return [None] * count


def _check_written(folder: Folder, files: list[str]) -> None:
    # Refuses file systems of which each node, or each process, has one of its own.
    infos = folder.filesystem.get_file_info([(folder / file).path for file in files])
    unseen = [shard for shard, info in enumerate(infos) if not info.is_file]
    if unseen:
        raise ValueError(
            f"shards {unseen} have written into {folder}, and the driver does not find it there; no checkpoint was "
            "made. Give a path, a URI or a file system that is the same from every node"
        )
