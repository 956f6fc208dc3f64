# SPDX-License-Identifier: Apache-2.0
"""Saves of shards: a folder that each shard writes, a manifest written last, and restarts of lost shards from them."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_replay.saving import DamagedFileError, read_state, write_state
from lightning_replay.saving.directory import read_manifest, replaced_save
from lightning_replay.saving.files import MALFORMED
from lightning_replay.saving.states import MANIFEST as MANIFEST_OF_REPLAY
from lightning_replay.saving.states import MANIFEST_OF_SHARDS, SHARDS_VERSION, replay_manifest
from lightning_replay.sharded.actors import CallOfAll, Losses, ShardActors, ShardLostError
from lightning_replay.sharded.folders import Folder
from lightning_replay.sharded.rows import Layout

logger: logging.Logger = logging.getLogger(__name__)
PIECE_BYTES = 64 << 20  # in memory at once, of each shard
_PIECE_TIMEOUT_S = 300.0
_FORMAT = "lightning-replay-shards"
_DATA = "shards"


class FileNames(NamedTuple):
    """Names in a save of shards."""

    manifest: str  # of all
    of_shard: str  # the manifest in the folder of each shard
    state: str  # the folder of what is saved beside the shards


NAMES = FileNames(MANIFEST_OF_SHARDS, MANIFEST_OF_REPLAY, "draws")


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
    # The manifest is written on leaving: before, the folder holds the save that was there.
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
            data.remove()  # all shards have finished, or are named by the error
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


def _check_written(folder: Folder, files: list[str]) -> None:
    # Refuses file systems of which each node, or each process, has one of its own.
    infos = folder.filesystem.get_file_info([(folder / file).path for file in files])
    unseen = [shard for shard, info in enumerate(infos) if not info.is_file]
    if unseen:
        raise ValueError(
            f"shards {unseen} have written into {folder}, and the driver does not find it there; no checkpoint was "
            "made. Give a path, a URI or a file system that is the same from every node"
        )


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


def folders_of_shards(shards: ShardActors, folder: Folder, data: str) -> list[Folder]:
    """Returns a save's folder as each shard reaches it: itself, or where a shard does not see it, by an actor here."""
    if folder.local is None:
        return [folder] * len(shards)
    # By a name found nowhere else: another node may have a folder at the same path.
    sees = shards.call("sees", lambda shard: ((folder / data).path,))
    if all(sees):
        return [folder] * len(shards)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    server = ray.remote(num_cpus=0)(FolderServer).options(scheduling_strategy=here).remote()
    served = ServedFolder(fs.LocalFileSystem(), folder.path, server)
    return [folder if seen else served for seen in sees]


class FolderServer:
    """A Ray actor that reads and writes files of its node."""

    def files(self, folder: str) -> list[tuple[str, int]] | None:
        # Relative paths and sizes.
        root = Path(folder)
        if not root.is_dir():
            return None
        found = sorted(file for file in root.rglob("*") if file.is_file())
        return [(file.relative_to(root).as_posix(), file.stat().st_size) for file in found]

    def read(self, file: str, start: int, count: int) -> bytes:
        with Path(file).open("rb") as stream:
            stream.seek(start)
            return stream.read(count)

    def append(self, file: str, piece: bytes) -> None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open("ab") as stream:
            stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())


@dataclasses.dataclass(frozen=True)
class ServedFolder(Folder):
    """A folder of another node."""

    server: Any  #: handle of a :class:`FolderServer` on that node

    @property
    def local(self) -> None:
        return None

    def exists(self) -> bool:
        return _answer(self.server.files.remote(self.path)) is not None

    def _upload(self, source: Path) -> None:
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
    return ray.get(reference, timeout=_PIECE_TIMEOUT_S)  # as the server's process may hang


def names_of_shards(data: str, count: int) -> list[str]:
    return [f"{data}/shard-{shard}" for shard in range(count)]


class SavedReplay(NamedTuple):
    """A save of shards, or of a replay without, which has neither recipe, capacities nor state."""

    data: str  # the folder of its data
    shards: list[str]  # their folders in it; of a replay without shards one without a name, as it is the save itself
    recipe: str | None
    capacities: dict[str, int] | None  # of all shards together, by option
    state: dict[str, Any] | None  # saved beside the shards

    @classmethod
    def read(cls, folder: Folder) -> SavedReplay:
        with folder.to_read(deep=False) as local:
            if not (local / MANIFEST_OF_SHARDS).exists():
                if not (local / MANIFEST_OF_REPLAY).exists():
                    raise FileNotFoundError(
                        f"no replay was saved in {folder}: there is neither {MANIFEST_OF_SHARDS} nor "
                        f"{MANIFEST_OF_REPLAY}"
                    )
                return cls(Path(replay_manifest(local)["data"]).name, [""], None, None, None)
            manifest = read_manifest(local / MANIFEST_OF_SHARDS, SHARDS_VERSION)
        try:
            data, recipe, capacities = Path(manifest["data"]).name, manifest["recipe"], manifest["capacities"]
            shards = names_of_shards(data, manifest["num_shards"])
        except MALFORMED as error:
            raise DamagedFileError(
                f"{folder / MANIFEST_OF_SHARDS} is damaged ({error}); load an earlier save"
            ) from error
        return cls(data, shards, recipe, capacities, read_shards_state(folder, data, NAMES))

    def check(self, folder: Folder, recipe: str, capacities: Mapping[str, int]) -> None:
        if self.recipe is None:  # of a replay without shards: its rows are checked as they are stored
            return
        if self.recipe != recipe:
            raise ValueError(
                f"{folder} holds a sharded replay {self.recipe!r}, and this one is {recipe!r}. Build "
                f"ShardedReplay({self.recipe!r}, ...) to load it. Nothing was loaded"
            )
        if self.capacities != capacities:
            raise ValueError(
                f"{folder} holds a sharded replay of {self.capacities}, and this one is of {capacities}. Build one "
                "with those of the save to load it. Nothing was loaded"
            )


def read_shards_state(folder: Folder, data: str, names: FileNames) -> dict[str, Any]:
    with (folder / data / names.state).to_read() as local:
        try:
            return read_state(local)
        except FileNotFoundError as error:
            raise DamagedFileError(f"{error}; nothing was restored. Restore an earlier checkpoint") from error


def first_state(staged: CallOfAll) -> dict[str, Any]:
    """Returns a state for rows that were saved without one."""
    # One process has given the rows, and no draws are owed for them.
    rows = sum(count for count, _ in staged.values.values())
    layout: Layout | None = next((one for _, one in staged.values.values() if one is not None), None)
    return {
        "draws": {},
        "limiter": {"inserted": rows, "sampled": 0, "filled": rows, "balance": 0.0},
        "losses": Losses().state(),
        "counts": [1, 0, rows],
        "layout": layout,
    }
