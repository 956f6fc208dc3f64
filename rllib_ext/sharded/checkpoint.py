# SPDX-License-Identifier: Apache-2.0
"""A sharded replay in a checkpoint: a folder that each shard writes, and a manifest that names them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_replay.saving.folders import Folder
from lightning_replay.sharded import saves
from rllib_ext.checkpoints import MANIFEST as BUFFER_MANIFEST
from rllib_ext.checkpoints import MANIFEST_OF_SHARDS as MANIFEST
from rllib_ext.checkpoints import CheckFiles, ReplayPart, WarmUp, read_buffer_manifest, read_shards_manifest

if TYPE_CHECKING:
    from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer

NAMES = saves.FileNames(MANIFEST, BUFFER_MANIFEST, BUFFER_MANIFEST, "driver")


class ShardedReplayPart(ReplayPart):
    """Saves and restores a sharded replay and the warm-up. Each shard writes and reads its own folder."""

    def write(self, folder: Folder, state: WarmUp, files: Mapping[str, Any]) -> None:
        """Lets every shard write its rows, linking files of the last save if saves are incremental."""
        previous = self._last_save if self._incremental and folder.local is not None else None
        write_shards(self._algorithm.local_replay_buffer, folder, state, files, previous)
        self._last_save = folder.local or self._last_save

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        """Lets every shard read a save, and returns the function that takes it over."""
        replay: ShardedEpisodeReplayBuffer = self._algorithm.local_replay_buffer
        saved = saves.SavedShards.read(folder, NAMES, _manifest_of)
        check_files(saved.manifest["algorithm"])
        use = saves.load_shards(replay.shards, folder, saved, self._algorithm.spaces or {})

        def restore(staged: list[int]) -> None:
            """Restores the driver's state, or starts it at the saved rows."""
            # A buffer without shards has no such state.
            if saved.state is None:
                replay.resume_at(max(staged))
            else:
                replay.load_driver_state(saved.state)
            self._go_on_from(WarmUp(**saved.manifest["warm_up"]))

        return functools.partial(use, restore)


def write_shards(
    replay: ShardedEpisodeReplayBuffer,
    folder: Folder,
    warm_up: WarmUp,
    files: Mapping[str, Any],
    previous: Path | None = None,
) -> None:
    """Saves the shards and the driver's state, with fingerprints of the checkpoint's other ``files``."""
    fields = {"warm_up": warm_up._asdict(), "algorithm": files}
    saves.write_shards(replay.shards, folder, NAMES, replay.driver_state, fields, previous, warm_up)


def _manifest_of(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).exists() and (folder / BUFFER_MANIFEST).exists():
        return read_buffer_manifest(folder)
    return read_shards_manifest(folder)
