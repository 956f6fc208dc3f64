# SPDX-License-Identifier: Apache-2.0
"""A folder of the driver's node for shards on nodes that do not see it: files pass through the object store."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_replay.sharded.actors import ShardActors
from lightning_replay.sharded.folders import Folder

PIECE_BYTES = 64 << 20  # in memory at once, of each shard
_PIECE_TIMEOUT_S = 300.0


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


def folders_of_shards(shards: ShardActors, folder: Folder, data: str) -> list[Folder]:
    """Returns a folder of a save as each shard reaches it; ``data`` is one in it whose name is found nowhere else.

    It is the folder itself, except where it is local and a shard on another node does not see it: that shard's files
    pass through an actor on this node.
    """
    if folder.local is None:
        return [folder] * len(shards)
    sees = shards.call("sees", lambda shard: ((folder / data).path,))
    if all(sees):
        return [folder] * len(shards)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    server = ray.remote(num_cpus=0)(FolderServer).options(scheduling_strategy=here).remote()
    served = ServedFolder(fs.LocalFileSystem(), folder.path, server)
    return [folder if seen else served for seen in sees]
