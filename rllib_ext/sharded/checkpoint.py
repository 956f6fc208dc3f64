# SPDX-License-Identifier: Apache-2.0
"""A sharded replay in a checkpoint: a folder that each shard writes, and a manifest that names them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from rllib_ext.buffer.files import MANIFEST as BUFFER_MANIFEST
from rllib_ext.buffer.files import MANIFEST_OF_SHARDS as MANIFEST
from rllib_ext.buffer.files import SHARDS_VERSION, WarmUp, read_buffer_manifest, read_shards_manifest
from rllib_ext.checkpoint.algorithm import CheckFiles
from rllib_ext.checkpoint.folders import Folder
from rllib_ext.checkpoint.replay import ReplayPart
from rllib_ext.sharded.served import folders_of_shards

if TYPE_CHECKING:
    from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer

logger: logging.Logger = logging.getLogger(__name__)

SHARDS = "shards"
DRIVER = "driver"
FORMAT = "lightning-replay-shards"


class ShardedReplayPart(ReplayPart):
    """Saves and restores a sharded replay and the warm-up; each shard writes and reads its own folder.

    On another file system than the local one, each shard copies its files from and to a temporary folder of its node;
    rows do not pass through the driver. Of a local checkpoint, those of shards on nodes that do not see it pass through
    an actor on the driver's node.
    """

    @property
    def _replay(self) -> ShardedEpisodeReplayBuffer:
        return self._algorithm.local_replay_buffer

    def write(self, folder: Folder, state: WarmUp, files: Mapping[str, Any]) -> None:
        """Writes the shards."""
        _start_lost_shards(self._replay)
        previous = self._last_save if self._incremental and folder.local is not None else None
        self._replay.last_save = write_shards(self._replay, folder, state, files, previous)
        self._last_save = folder.local or self._last_save

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        """Lets the shards read a checkpoint beside what they hold; of another number of shards, or of none, too."""
        from lightning_replay.saving import DamagedFileError, read_state

        manifest, names = read_manifest_of_shards(folder)
        check_files(manifest["algorithm"])
        data, state = Path(manifest["data"]).name, None
        if "num_shards" in manifest:
            with (folder / data / DRIVER).to_read() as local:
                try:
                    state = read_state(local)
                except FileNotFoundError as error:
                    raise DamagedFileError(f"{error}; nothing was restored. Restore an earlier checkpoint") from error
        replay = self._replay
        _start_lost_shards(replay)
        spaces = self._algorithm.spaces or {}
        seen = folders_of_shards(replay.shards, folder, data)
        parts = [[one / name if name else one for name in names] for one in seen]
        draws = max(replay.shards.call("stage", lambda shard: (parts[shard], spaces)))
        own = [part[shard] for shard, part in enumerate(parts)] if len(names) == len(parts) else None
        return functools.partial(self._use, state, draws, own, WarmUp(**manifest["warm_up"]))

    def _use(self, state: dict[str, Any] | None, draws: int, own: list[Folder] | None, warm_up: WarmUp) -> None:
        self._replay.shards.call("take_over")
        self._replay.last_save = own  # rows of other shards belong to none of these
        if state is None:
            self._replay.resume_at(draws)
        else:
            self._replay.load_driver_state(state)
        self._go_on_from(warm_up)


def _start_lost_shards(replay: ShardedEpisodeReplayBuffer) -> None:
    """Starts shards again that were lost since the last draw, and waits for them."""
    for shard in range(len(replay.shards)):
        replay.shards.send(shard, "report")
    replay.shards.settle()
    replay.shards.wait_for_starts()


def write_shards(
    replay: ShardedEpisodeReplayBuffer,
    folder: Folder,
    warm_up: WarmUp,
    files: Mapping[str, Any],
    previous: Path | None = None,
) -> list[Folder]:
    """Lets every shard write into a folder of its own, then writes the driver's state and the manifest.

    After an error, or when the driver is killed, ``folder`` holds the save before; what the next save finds of this one
    it removes.

    Args:
        replay, folder, warm_up: to write, and where to.
        files: fingerprints of the checkpoint's other files.
        previous: the folder of an earlier save, whose unchanged files are linked.

    Returns:
        The shards' folders.

    Raises:
        RuntimeError: a shard was lost meanwhile.
        ValueError: the driver does not find what shards have written.
    """
    from lightning_replay.saving import write_state
    from lightning_replay.saving.directory import replaced_save

    count = len(replay.shards)
    earlier = earlier_shards(previous, count)
    with folder.to_write() as local, replaced_save(local, MANIFEST, folder=SHARDS) as save:
        data, names = folder / save.data.name, names_of_shards(save.data.name, count)
        seen = folders_of_shards(replay.shards, folder, save.data.name)
        parts = [one / name for one, name in zip(seen, names, strict=True)]
        try:
            sizes = replay.shards.call("save", lambda shard: (parts[shard], warm_up, earlier[shard]))
            _check_written(folder, names)
        except BaseException as error:
            data.remove()
            if isinstance(error, RayActorError):
                raise RuntimeError(
                    f"a shard was lost while it saved into {folder}; no checkpoint was made, and the replay saved "
                    "there before is unchanged. Save again: the next draw or save starts the shard again"
                ) from error
            raise
        write_state(save.data / DRIVER, replay.driver_state(), of=type(replay).__name__)
        total = sum(size for size, _ in sizes)
        save.manifest |= {
            "format": FORMAT,
            "version": SHARDS_VERSION,
            "num_shards": count,
            "warm_up": warm_up._asdict(),
            "bytes": total,
            "algorithm": files,
        }
    logger.info("%d shards saved: %s bytes, %s of them written", count, f"{total:,}", sum(new for _, new in sizes))
    if folder.local is not None:
        (folder.local / BUFFER_MANIFEST).unlink(missing_ok=True)  # of an earlier save here, which this one replaces
    return parts


def _check_written(folder: Folder, names: list[str]) -> None:
    """Refuses file systems of which each node, or each process, has one of its own."""
    infos = folder.filesystem.get_file_info([(folder / name / BUFFER_MANIFEST).path for name in names])
    unseen = [shard for shard, info in enumerate(infos) if not info.is_file]
    if unseen:
        raise ValueError(
            f"shards {unseen} have written into {folder}, and the driver does not find it there; no checkpoint was "
            "made. Give a path, a URI or a file system that is the same from every node"
        )


def names_of_shards(data: str, count: int) -> list[str]:
    """Returns the folders of shards in a save, by the name of the folder of its data."""
    return [f"{data}/shard-{shard}" for shard in range(count)]


def earlier_shards(previous: Path | None, count: int) -> list[Folder | None]:
    """Returns the folders of an earlier save by shard, ``None`` where there is none of as many shards."""
    from lightning_replay.saving import DamagedFileError

    if previous is None:
        return [None] * count
    folder = Folder.at(previous)
    try:
        _, names = read_manifest_of_shards(folder)
    except (DamagedFileError, FileNotFoundError, ValueError):
        return [None] * count
    return [folder / name for name in names] if len(names) == count else [None] * count


def read_manifest_of_shards(folder: Folder) -> tuple[dict[str, Any], list[str]]:
    """Returns the manifest of a save, and the names of the shards' folders.

    A save of a buffer without shards is one of a single shard, whose folder has no name: it is ``folder`` itself.

    Raises:
        DamagedFileError: the manifest is missing or damaged.
        ValueError: a newer format.
    """
    with folder.to_read(deep=False) as local:
        if not (local / MANIFEST).exists() and (local / BUFFER_MANIFEST).exists():
            return read_buffer_manifest(local), [""]
        manifest = read_shards_manifest(local)
    return manifest, names_of_shards(Path(manifest["data"]).name, manifest["num_shards"])
