# SPDX-License-Identifier: Apache-2.0
"""A sharded replay in a checkpoint: a folder that each shard writes, and a manifest that names them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_ext.buffer.files import MANIFEST as BUFFER_MANIFEST
from rllib_ext.buffer.files import MANIFEST_OF_SHARDS as MANIFEST
from rllib_ext.buffer.files import SHARDS_VERSION, WarmUp, read_buffer_manifest, read_shards_manifest
from rllib_ext.checkpoint.algorithm import CheckFiles
from rllib_ext.checkpoint.replay import ReplayPart

if TYPE_CHECKING:
    from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer

logger = logging.getLogger(__name__)

SHARDS = "shards"
DRIVER = "driver"
FORMAT = "lightning-replay-shards"


class ShardedReplayPart(ReplayPart):
    """Saves and restores a sharded replay and the warm-up; each shard writes and reads its own folder.

    The checkpoint must lie where every node that has a shard sees it, at the same path.
    """

    @property
    def _replay(self) -> ShardedEpisodeReplayBuffer:
        return self._algorithm.local_replay_buffer

    def write(self, folder: Path, state: WarmUp, files: Mapping[str, Any], *, stays: bool) -> None:
        """Writes the shards."""
        previous = self._last_save if self._incremental and stays else None
        written = write_shards(self._replay, folder, state, files, previous)
        if stays:
            self._last_save, self._replay.last_save = folder, written

    def read(self, folder: Path, check_files: CheckFiles) -> Callable[[], None]:
        """Lets the shards read a checkpoint beside what they hold; of another number of shards, or of none, too."""
        from lightning_replay.saving import read_state

        manifest, shards, data = read_manifest_of_shards(folder)
        check_files(manifest["algorithm"])
        replay = self._replay
        spaces = self._algorithm.spaces or {}
        paths = [str(path) for path in shards]
        draws = max(replay.shards.call("stage", lambda shard: (paths, spaces)))
        state = None if data is None else read_state(data)
        use = functools.partial(self._use, state, draws, paths if len(paths) == len(replay.shards) else None)
        return functools.partial(use, WarmUp(**manifest["warm_up"]))

    def _use(self, state: dict[str, Any] | None, draws: int, paths: list[str] | None, warm_up: WarmUp) -> None:
        self._replay.shards.call("take_over")
        self._replay.last_save = paths  # rows of other shards belong to none of these
        if state is None:
            self._replay.resume_at(draws)
        else:
            self._replay.load_driver_state(state)
        self._go_on_from(warm_up)


def write_shards(
    replay: ShardedEpisodeReplayBuffer,
    folder: Path,
    warm_up: WarmUp,
    files: Mapping[str, Any],
    previous: Path | None = None,
) -> list[str]:
    """Writes every shard into a folder of its own, then the manifest; returns the shards' folders.

    Args:
        replay, folder, warm_up: to write, and where to.
        files: fingerprints of the checkpoint's other files.
        previous: the folder of an earlier save, whose unchanged files are linked.

    Raises:
        ValueError: a shard is on a node that does not see the folder.
    """
    from lightning_replay.saving import write_state
    from lightning_replay.saving.directory import replaced_save

    count = len(replay.shards)
    earlier = earlier_shards(previous, count)
    with replaced_save(folder, MANIFEST, folder=SHARDS) as save:
        paths = [save.data / f"shard-{shard}" for shard in range(count)]
        sizes = replay.shards.call("save", lambda shard: (str(paths[shard]), warm_up, earlier[shard]))
        unseen = [shard for shard, path in enumerate(paths) if not (path / BUFFER_MANIFEST).is_file()]
        if unseen:
            raise ValueError(
                f"shards {unseen} have written into {folder} on their own nodes, and this node does not see it; no "
                "checkpoint was made. Give a path on storage that every node has, such as a network file system"
            )
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
    (folder / BUFFER_MANIFEST).unlink(missing_ok=True)  # of an earlier save here, which this one replaces
    return [str(path) for path in paths]


def earlier_shards(previous: Path | None, count: int) -> list[str | None]:
    """Returns the folders of an earlier save by shard, ``None`` where there is none of as many shards."""
    from lightning_replay.saving import DamagedFileError

    if previous is None:
        return [None] * count
    try:
        _, shards, _ = read_manifest_of_shards(previous)
    except (DamagedFileError, FileNotFoundError, ValueError):
        return [None] * count
    return [str(path) for path in shards] if len(shards) == count else [None] * count


def read_manifest_of_shards(folder: Path) -> tuple[dict[str, Any], list[Path], Path | None]:
    """Returns the manifest of a save, the folders of its shards, and that of the driver's state.

    A save of a buffer without shards is one of a single shard, without a driver's state.

    Raises:
        DamagedFileError: the manifest, or a folder it names, is missing or damaged.
        ValueError: a newer format.
    """
    if not (folder / MANIFEST).exists() and (folder / BUFFER_MANIFEST).exists():
        return read_buffer_manifest(folder), [folder], None
    manifest = read_shards_manifest(folder)
    data = folder / Path(manifest["data"]).name
    return manifest, [data / f"shard-{shard}" for shard in range(manifest["num_shards"])], data / DRIVER
