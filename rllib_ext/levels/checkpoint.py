# SPDX-License-Identifier: Apache-2.0
"""The level buffer as a part of an RLlib algorithm's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import fs
from ray import cloudpickle

from lightning_replay.saving import read_state, write_state
from rllib_ext.algorithm_files import check_algorithm_files, fingerprints_of
from rllib_ext.checkpoint_folders import folder_to_read, folder_to_write

if TYPE_CHECKING:
    from rllib_ext.levels.remote import RemoteLevels

FOLDER = "levels"


class CheckpointedLevels:
    """Saves the level buffer into the folder ``levels`` of each checkpoint, and restores it from there.

    RLlib 2.60 has no hook around a checkpoint, so :meth:`install` puts this object's methods over the algorithm's
    ``save_to_path`` and ``restore_from_path``, which ``from_checkpoint`` and Tune call too. A restore reads the levels
    and tries them on a copy before anything is changed.

    Args:
        algorithm: whose levels they are.
        levels: of the algorithm.
        packed: the level buffer as it was built, as cloudpickle has it.
    """

    def __init__(self, algorithm: Any, levels: RemoteLevels, packed: bytes) -> None:
        self._algorithm, self._levels, self._packed = algorithm, levels, packed
        self._save_algorithm, self._restore_algorithm = algorithm.save_to_path, algorithm.restore_from_path

    def install(self) -> None:
        """From now on the algorithm's checkpoints hold the levels."""
        self._algorithm.save_to_path = self.save_to_path
        self._algorithm.restore_from_path = self.restore_from_path

    def save_to_path(
        self, path: str | Path | None = None, *, filesystem: fs.FileSystem | None = None, **options: Any
    ) -> str:
        """``Algorithm.save_to_path``, and the levels; returns the path.

        Args:
            path: a directory, or a URI of any file system of pyarrow.
            filesystem: of ``path``.
            options: RLlib's ``state`` and ``use_msgpack``.
        """
        state = self._levels.whole_state()
        saved: str = self._save_algorithm(path, filesystem=filesystem, **options)
        with folder_to_write(path, filesystem, saved, FOLDER) as (folder, _):
            write_state(folder, state | {"algorithm": fingerprints_of(path, filesystem, saved)})
        return saved

    def restore_from_path(
        self,
        path: str | Path,
        *,
        component: str | None = None,
        filesystem: fs.FileSystem | None = None,
        restore_levels: bool = True,
        **options: Any,
    ) -> None:
        """``Algorithm.restore_from_path``, and the levels. Episodes that run meanwhile are not scored.

        Args:
            path: of a checkpoint, a directory or a URI.
            component: of the algorithm, to restore that alone; the levels stay as they are then.
            filesystem: of ``path``.
            restore_levels: ``False`` leaves the levels as they are. ``from_checkpoint`` takes it too.
            options: RLlib's own.

        Raises:
            FileNotFoundError: the checkpoint has no levels.
            DamagedFileError: a file of them is missing or damaged, or files of two checkpoints are mixed, because a
                save into the same folder was cut short; nothing is changed.
            ValueError: other levels than the algorithm's; nothing is changed.
        """
        if component is not None:
            options["component"] = component
        state = self._read(path, filesystem) if component is None and restore_levels else None
        self._restore_algorithm(path, filesystem=filesystem, **options)
        if state is not None:
            self._levels.load_whole_state(state)

    def _read(self, path: str | Path, filesystem: fs.FileSystem | None) -> dict[str, Any]:
        with folder_to_read(path, filesystem, FOLDER) as folder:
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"{path} holds no {FOLDER}: it was saved without rllib_ext.configure_levels, or the folder is "
                    "gone. Nothing was restored; restore_levels=False restores the algorithm alone"
                )
            state = read_state(folder)
        instead = "restore_levels=False restores the algorithm alone"
        check_algorithm_files(path, filesystem, state.pop("algorithm", None), instead)
        cloudpickle.loads(self._packed).load_state_dict(state["levels"])
        return state
