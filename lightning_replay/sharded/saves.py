# SPDX-License-Identifier: Apache-2.0
"""Saves and loads shards: each shard writes a folder, and the manifest is written last."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_replay.saving import DamagedFileError, read_state, write_state
from lightning_replay.saving.directory import data_of, names_of_shards, read_manifest, replaced_save
from lightning_replay.saving.folders import Folder
from lightning_replay.saving.states import MANIFEST as MANIFEST_OF_REPLAY
from lightning_replay.saving.states import MANIFEST_OF_SHARDS, SHARDS_VERSION, replay_manifest
from lightning_replay.sharded.actors import Losses, ShardActors, ShardLostError
from lightning_replay.sharded.rows import Layout

logger: logging.Logger = logging.getLogger(__name__)
#: Bytes of a file that are in memory at once, for each shard.
PIECE_BYTES = 64 << 20
_PIECE_TIMEOUT_S = 300.0
_FORMAT = "lightning-replay-shards"
_DATA = "shards"


class FileNames(NamedTuple):
    """Names in a save of shards."""

    manifest: str  #: Manifest of all shards.
    replaced: str  #: Manifest of a replay without shards, which a save of shards replaces.
    of_shard: str  #: Manifest in the folder of each shard.
    state: str  #: Folder of the state that is saved beside the shards.


NAMES = FileNames(MANIFEST_OF_SHARDS, MANIFEST_OF_REPLAY, MANIFEST_OF_REPLAY, "draws")


def write_shards(
    shards: ShardActors,
    folder: Folder,
    names: FileNames,
    state: Callable[[], Mapping[str, Any]],
    fields: Mapping[str, Any],
    previous: Path | None,
    *arguments: Any,
) -> None:
    """Lets every shard write into its own folder, and then writes the ``state`` of that moment and the manifest.

    After an error, or if this process is killed, ``folder`` still holds the earlier save. The next save removes the
    remains. Unchanged files of ``previous``, a save of as many shards, are linked. Errors are the errors of
    :meth:`ShardedReplay.save <lightning_replay.sharded.replay.ShardedReplay.save>`.
    """
    # The save must contain the rows of every shard.
    shards.start_lost()
    count = len(shards)
    earlier = _folders_in(previous, names)
    if len(earlier) != count:
        earlier = [None] * count
    # The manifest is written when the block ends. Until then the folder holds the earlier save.
    with (
        folder.to_write() as local,
        replaced_save(local, names.manifest, folder=_DATA, replaces=names.replaced) as save,
    ):
        data = folder / save.data.name
        own = [f"{save.data.name}/shard-{shard}" for shard in range(count)]
        seen = folders_of_shards(shards, folder, save.data.name)
        parts = [root / name for root, name in zip(seen, own, strict=True)]
        try:
            limit_s = shards.options.save_timeout_s
            sent = shards.send_all("save", lambda shard: (parts[shard], earlier[shard], *arguments), limit_s=limit_s)
            # Other processes may go on to store and draw, because each shard saves its present rows.
            saved_beside = state()
            sizes = shards.values_of(sent)
            files = folder.filesystem.get_file_info([(folder / name / names.of_shard).path for name in own])
            if unseen := [shard for shard, file in enumerate(files) if not file.is_file]:
                # Each node, or each process, has its own file system.
                raise ValueError(
                    f"shards {unseen} have written into {folder}, and the driver does not find it there; no checkpoint "
                    "was made. Give a path, a URI or a file system that is the same from every node"
                )
        except BaseException as error:
            # All shards have finished, or the error names the shards that have not.
            data.remove()
            if isinstance(error, ShardLostError | TimeoutError):
                kind: type[Exception] = TimeoutError
                if isinstance(error, ShardLostError):
                    kind = RuntimeError
                raise kind(
                    f"{error}; this was while the shards saved into {folder}. No checkpoint was made, and the replay "
                    "saved there before is unchanged. Save again, or raise save_timeout_s"
                ) from error
            raise
        write_state(save.data / names.state, saved_beside)
        total = sum(size for size, _ in sizes)
        save.manifest |= {"format": _FORMAT, "version": SHARDS_VERSION, "num_shards": count, "bytes": total, **fields}
    logger.info("%d shards saved: %s bytes, %s of them written", count, f"{total:,}", f"{sum(n for _, n in sizes):,}")
    shards.last_save = parts


def _folders_in(previous: Path | None, names: FileNames) -> Sequence[Folder | None]:
    # A missing or damaged save has no folders to link to.
    if previous is not None:
        with suppress(DamagedFileError, OSError, ValueError):
            manifest = read_manifest(previous / names.manifest, SHARDS_VERSION)
            data = Folder.at(data_of(previous, manifest))
            return [data / name for name in names_of_shards(manifest, data.names(only_folders=True))]
    return []


def load_shards(
    shards: ShardActors, folder: Folder, saved: SavedShards, *fields: Any
) -> Callable[[Callable[[list[Any]], None]], None]:
    """Lets every shard read a save (with ``fields`` of its ``stage``) without using it yet.

    Returns a function that lets all shards use the save. Its argument is a function that restores the state beside the
    shards, and receives the answers of the shards.
    """
    shards.start_lost()
    seen = folders_of_shards(shards, folder, saved.data)
    parts = [[root / name if name else root for name in saved.shards] for root in seen]
    sent = shards.send_all("stage", lambda shard: (parts[shard], *fields), limit_s=shards.options.save_timeout_s)
    values = shards.values_of(sent)

    def use(restore: Callable[[list[Any]], None]) -> None:
        shards.last_save = None
        if len(saved.shards) == len(parts):
            shards.last_save = [part[shard] for shard, part in enumerate(parts)]
        shards.take_over(sent, functools.partial(restore, values))

    return use


def folders_of_shards(shards: ShardActors, folder: Folder, data: str) -> list[Folder]:
    """Returns a save's folder as each shard reaches it: directly, or through an actor on this node."""
    if folder.local is None:
        return [folder] * len(shards)
    # The folder's name is unique, because another node may have a folder at the same path.
    sees = shards.values_of(shards.send_all("sees", lambda shard: ((folder / data).path,)))
    if all(sees):
        return [folder] * len(shards)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    server = ray.remote(num_cpus=0)(FolderServer).options(scheduling_strategy=here).remote()
    served = ServedFolder(fs.LocalFileSystem(), folder.path, server)
    return [folder if seen else served for seen in sees]


class FolderServer:
    """A Ray actor that reads and writes files of its node."""

    def files(self, folder: str) -> list[tuple[str, int]] | None:
        """Returns relative paths and sizes in bytes of all files, or ``None`` without the folder."""
        root = Path(folder)
        if not root.is_dir():
            return None
        found = sorted(file for file in root.rglob("*") if file.is_file())
        return [(file.relative_to(root).as_posix(), file.stat().st_size) for file in found]

    def read(self, file: str, start: int, count: int) -> bytes:
        """Returns ``count`` bytes of a file from ``start`` on."""
        with Path(file).open("rb") as stream:
            stream.seek(start)
            return stream.read(count)

    def append(self, file: str, piece: bytes) -> None:
        """Appends bytes to a file, and waits until they are on the disk."""
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open("ab") as stream:
            stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())


@dataclasses.dataclass(frozen=True)
class ServedFolder(Folder):
    """A folder of another node."""

    server: Any  #: Handle of a :class:`FolderServer` on that node.

    @property
    def local(self) -> None:
        """``None``: this node has no path to the folder."""
        return None

    def exists(self) -> bool:
        """Returns whether the folder exists on its node."""
        return _answer(self.server.files.remote(self.path)) is not None

    def _upload(self, source: Path, parts: list[Path]) -> None:
        for file in sorted(source.rglob("*")):
            if not file.is_file():
                continue
            target = f"{self.path}/{file.relative_to(source).as_posix()}"
            with file.open("rb") as stream:
                _answer(self.server.append.remote(target, stream.read(PIECE_BYTES)))
                while piece := stream.read(PIECE_BYTES):
                    _answer(self.server.append.remote(target, piece))

    def _download(self, target: Path, deep: bool) -> None:
        for name, num_bytes in _answer(self.server.files.remote(self.path)):
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as stream:
                for start in range(0, num_bytes, PIECE_BYTES):
                    stream.write(_answer(self.server.read.remote(f"{self.path}/{name}", start, PIECE_BYTES)))


def _answer(reference: ray.ObjectRef[Any]) -> Any:
    # The server's process may hang.
    return ray.get(reference, timeout=_PIECE_TIMEOUT_S)


class SavedShards(NamedTuple):
    """A save of shards, or of a replay without shards."""

    manifest: Mapping[str, Any]
    data: str  #: Folder of the data.
    shards: list[str]  #: Folders of the shards; ``[""]`` for a replay without shards.
    state: dict[str, Any] | None  #: State that is saved beside the shards.

    @classmethod
    def read(cls, folder: Folder, names: FileNames, read: Callable[[Path], Mapping[str, Any]]) -> SavedShards:
        """Reads the manifest with ``read``, and the state, if the save has shards."""
        with folder.to_read(deep=False) as local:
            manifest = read(local)
            data = data_of(local, manifest).name
        if "num_shards" not in manifest:
            return cls(manifest, data, [""], None)
        shards = names_of_shards(manifest, (folder / data).names(only_folders=True))
        with (folder / data / names.state).to_read() as local:
            try:
                state = read_state(local)
            except FileNotFoundError as error:
                raise DamagedFileError(f"{error}; nothing was restored. Restore an earlier checkpoint") from error
        return cls(manifest, data, [f"{data}/{shard}" for shard in shards], state)


def manifest_of(directory: Path) -> Mapping[str, Any]:
    """Reads the manifest of a save, with or without shards."""
    if (directory / MANIFEST_OF_SHARDS).exists():
        return read_manifest(directory / MANIFEST_OF_SHARDS, SHARDS_VERSION)
    return replay_manifest(directory)


def first_state(staged: Sequence[tuple[int, Layout | None]]) -> dict[str, Any]:
    """Returns a state for rows that were saved without one."""
    # One process has given the rows, and no draws are owed for them.
    rows = sum(count for count, _ in staged)
    return {
        "draws": {},
        "limiter": {"inserted": rows, "sampled": 0, "filled": rows, "balance": 0.0},
        "losses": Losses().state(),
        "counts": [1, 0, rows],
        "layout": next((layout for _, layout in staged if layout is not None), None),
    }
