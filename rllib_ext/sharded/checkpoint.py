# SPDX-License-Identifier: Apache-2.0
"""A sharded replay in a checkpoint: a folder that each shard writes, and a manifest that names them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_replay.sharded import saves
from lightning_replay.sharded.folders import Folder
from rllib_ext.checkpoints import MANIFEST as BUFFER_MANIFEST
from rllib_ext.checkpoints import MANIFEST_OF_SHARDS as MANIFEST
from rllib_ext.checkpoints import CheckFiles, ReplayPart, WarmUp, read_buffer_manifest, read_shards_manifest

if TYPE_CHECKING:
    from lightning_replay.sharded.actors import CallOfAll
    from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer

NAMES = saves.FileNames(MANIFEST, BUFFER_MANIFEST, "driver")


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
        self._replay.shards.start_lost()
        previous = self._last_save if self._incremental and folder.local is not None else None
        self._replay.shards.last_save = write_shards(self._replay, folder, state, files, previous)
        self._last_save = folder.local or self._last_save

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        manifest, names = read_manifest_of_shards(folder)
        check_files(manifest["algorithm"])
        data = Path(manifest["data"]).name
        state = saves.read_shards_state(folder, data, NAMES) if "num_shards" in manifest else None
        shards = self._replay.shards
        shards.start_lost()
        staged, own = saves.stage_shards(shards, folder, data, names, self._algorithm.spaces or {})
        return functools.partial(self._use, state, staged, own, WarmUp(**manifest["warm_up"]))

    def _use(self, state: dict[str, Any] | None, staged: CallOfAll, own: list[Folder] | None, warm_up: WarmUp) -> None:
        wait = self._replay.shards.take_over(staged)
        self._replay.shards.last_save = own  # rows of other shards belong to none of these
        if state is None:
            self._replay.resume_at(max(staged.values.values()))
        else:
            self._replay.load_driver_state(state)
        self._go_on_from(warm_up)
        wait()


def write_shards(
    replay: ShardedEpisodeReplayBuffer,
    folder: Folder,
    warm_up: WarmUp,
    files: Mapping[str, Any],
    previous: Path | None = None,
) -> list[Folder]:
    """Saves the shards and the driver's state; returns the shards' folders.

    ``files`` are fingerprints of the checkpoint's other files. Unchanged files of the save in ``previous`` are linked.
    """
    earlier = saves.earlier_shards(previous, len(replay.shards), lambda folder: read_manifest_of_shards(folder)[1])
    fields = {"warm_up": warm_up._asdict(), "algorithm": files}
    parts = saves.write_shards(replay.shards, folder, NAMES, replay.driver_state, fields, earlier, warm_up)
    if folder.local is not None:
        (folder.local / BUFFER_MANIFEST).unlink(missing_ok=True)  # of an earlier save here, which this one replaces
    return parts


def read_manifest_of_shards(folder: Folder) -> tuple[dict[str, Any], list[str]]:
    """Returns the manifest of a save, and the names of the shards' folders.

    A save of a buffer without shards is one of a single shard, whose folder has no name: it is ``folder`` itself.
    """
    with folder.to_read(deep=False) as local:
        if not (local / MANIFEST).exists() and (local / BUFFER_MANIFEST).exists():
            return read_buffer_manifest(local), [""]
        manifest = read_shards_manifest(local)
    return manifest, saves.names_of_shards(Path(manifest["data"]).name, manifest["num_shards"])
