# SPDX-License-Identifier: Apache-2.0
"""An RLlib algorithm whose checkpoints hold a replay buffer, or levels, in a folder of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pyarrow import fs

from lightning_replay.sharded.folders import Folder
from rllib_ext.checkpoint.files import check_fingerprints, fingerprints_of

CheckFiles = Callable[[Mapping[str, Any] | None], None]


class CheckpointPart(Protocol):
    """A part of an algorithm that RLlib's checkpoints lack.

    Attributes:
        folder: name of its folder in a checkpoint.
        option: of ``restore_from_path``, which leaves the part out.
        restores: default of the option.
        instead: effect of the option, for errors.
    """

    folder: str
    option: str
    restores: bool
    instead: str

    def state(self) -> Any:
        """Returns the state to save; called before RLlib saves the algorithm."""

    def write(self, folder: Folder, state: Any, files: Mapping[str, Any]) -> None:
        """Writes the state and fingerprints of RLlib's files."""

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        """Reads and checks the part, and RLlib's files by their fingerprints; returns a function that restores it."""

    def leave_out(self, folder: Folder) -> Callable[[], None]:
        """Returns a function to call after a restore without the part, of which there may be no folder."""


class CheckpointedAlgorithm:
    """Replaces ``save_to_path`` and ``restore_from_path`` of one algorithm, so that they include a part.

    RLlib 2.60 ignores ``store_buffer_in_checkpoints`` on its new stack and has no hook around a checkpoint.
    ``from_checkpoint`` and Tune call the two methods too. A restore reads and checks the part before the algorithm is
    changed.

    Args:
        algorithm: just built.
        part: of it.
    """

    def __init__(self, algorithm: Any, part: CheckpointPart) -> None:
        self._part = part
        self._save_algorithm, self._restore_algorithm = algorithm.save_to_path, algorithm.restore_from_path
        algorithm.save_to_path, algorithm.restore_from_path = self.save_to_path, self.restore_from_path

    def save_to_path(
        self, path: str | Path | None = None, *, filesystem: fs.FileSystem | None = None, **options: Any
    ) -> str:
        """Saves the algorithm and the part; returns the path.

        Args:
            path: a directory, or a URI of any file system of pyarrow.
            filesystem, options: as RLlib's.
        """
        state = self._part.state()
        saved: str = self._save_algorithm(path, filesystem=filesystem, **options)
        checkpoint = dataclasses.replace(Folder.at(path, filesystem), path=saved)
        self._part.write(checkpoint / self._part.folder, state, fingerprints_of(checkpoint))
        return saved

    def restore_from_path(
        self,
        path: str | Path,
        *,
        component: str | None = None,
        filesystem: fs.FileSystem | None = None,
        **options: Any,
    ) -> None:
        """Restores the algorithm and the part.

        Args:
            path: of a checkpoint, a directory or a URI.
            component: of the algorithm, to restore that alone and leave the part as it is.
            filesystem, options: as RLlib's; and ``restore_replay`` or ``restore_levels``, whether to restore the part,
                accepted by ``from_checkpoint`` too.

        Raises:
            FileNotFoundError: the checkpoint lacks the part.
            DamagedFileError: a file of the part is missing, truncated or changed, or files of two checkpoints are
                mixed, because a save into the same folder was cut short; nothing is changed.
            ValueError: a buffer of another recipe, capacity or space, or other levels; nothing is changed.
        """
        given = options.pop(self._part.option, None)
        if component is not None:
            self._restore_algorithm(path, component=component, filesystem=filesystem, **options)
            return
        restores = self._part.restores if given is None else given
        checkpoint = Folder.at(path, filesystem)
        folder = checkpoint / self._part.folder
        if restores and not folder.exists():
            raise FileNotFoundError(
                f"{path} holds no {self._part.folder}: it was saved without rllib_ext.configure, or the folder is "
                f"gone. Nothing was restored; {self._part.instead}"
            )
        check_files = functools.partial(check_fingerprints, checkpoint, instead=self._part.instead)
        finish = self._part.read(folder, check_files) if restores else self._part.leave_out(folder)
        self._restore_algorithm(path, filesystem=filesystem, **options)
        finish()
