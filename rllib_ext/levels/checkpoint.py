# SPDX-License-Identifier: Apache-2.0
"""The level buffer as a part of an RLlib algorithm's checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle

from lightning_replay.saving import read_state, write_state
from rllib_ext.checkpoint.algorithm import CheckFiles
from rllib_ext.levels.remote import RemoteLevels

FOLDER = "levels"


class LevelsPart:
    """Saves and restores the level buffer, see :class:`~rllib_ext.checkpoint.algorithm.CheckpointPart`.

    Episodes that run during a restore are not scored.

    Args:
        levels: of the algorithm.
        packed: the level buffer as it was built, by cloudpickle; a restore tries the saved state on a copy.
    """

    folder = FOLDER
    option = "restore_levels"
    restores = True
    instead = "restore_levels=False restores the algorithm alone"

    def __init__(self, levels: RemoteLevels, packed: bytes) -> None:
        self._levels, self._packed = levels, packed

    def state(self) -> dict[str, Any]:
        """Returns the state of the level buffer."""
        return self._levels.whole_state()

    def write(self, folder: Path, state: dict[str, Any], files: Mapping[str, Any], *, stays: bool) -> None:
        """Writes the state."""
        write_state(folder, state | {"algorithm": files})

    def read(self, folder: Path, check_files: CheckFiles) -> Callable[[], None]:
        """Reads the state and loads it into a copy."""
        state = read_state(folder)
        check_files(state.pop("algorithm", None))
        cloudpickle.loads(self._packed).load_state_dict(state["levels"])
        return functools.partial(self._levels.load_whole_state, state)

    def leave_out(self, folder: Path) -> Callable[[], None]:
        """Leaves the levels as they are."""
        return lambda: None
