# SPDX-License-Identifier: Apache-2.0
"""The level buffer of an algorithm in the driver."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_replay.saving import read_state, write_state
from lightning_replay.sharded.folders import Folder
from rllib_ext.checkpoint.algorithm import CheckFiles
from rllib_ext.levels.server import LevelServer
from rllib_ext.rllib_compat import Attached

if TYPE_CHECKING:
    from tensordict import TensorDict


class RemoteLevels:
    """The level buffer of an algorithm: a named Ray actor on the driver's node without a CPU of its own.

    A :class:`~rllib_ext.checkpoint.algorithm.CheckpointPart`; episodes that run during a restore are not scored.

    Args:
        packed: the level buffer as it was built, by cloudpickle; a restore tries the saved state on a copy.
        seed: of the training levels that evaluations draw.
        options: of :class:`~rllib_ext.levels.server.LevelServer`.

    Attributes:
        name: of the actor; ``ray.get_actor(name)`` finds it from any process of the job.
        actor: its handle.
    """

    folder = "levels"
    option = "restore_levels"
    restores = True
    instead = "restore_levels=False restores the algorithm alone"

    def __init__(self, packed: bytes, seed: int | None, **options: Any) -> None:
        self._packed = packed
        self.gap_generator: np.random.Generator = np.random.default_rng(seed)
        self.name: str = f"levels_{uuid.uuid4().hex}"
        self._spare = tempfile.TemporaryDirectory(prefix=f"{self.name}_", ignore_cleanup_errors=True)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        kind: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(LevelServer)
        self.actor: Any = kind.options(name=self.name, scheduling_strategy=here).remote(
            packed, spare=self._spare.name, **options
        )

    def check(self) -> None:
        """Waits until the actor has started; raises ``RuntimeError`` if a level could not be chosen."""
        ray.get(self.actor.check.remote())

    def probabilities(self) -> TensorDict:
        """Returns :meth:`~lightning_replay.levels.LevelSelector.probabilities`."""
        return ray.get(self.actor.probabilities.remote())

    def played_levels(self) -> list[int]:
        """Returns levels that were played, see :meth:`~rllib_ext.levels.server.LevelServer.played_levels`."""
        return list(ray.get(self.actor.played_levels.remote()))

    def stats(self) -> dict[str, float]:
        """Returns the figures that results have under ``levels``."""
        return dict(ray.get(self.actor.stats.remote()))

    def report(self, lost_runners: list[int]) -> dict[str, float]:
        """Returns :meth:`~rllib_ext.levels.server.LevelServer.report`."""
        return dict(ray.get(self.actor.report.remote(lost_runners)))

    def state_dict(self) -> dict[str, Any]:
        """Returns :meth:`~lightning_replay.levels.LevelSelector.state_dict`."""
        return dict(self.state()["levels"])

    def save(self, path: str | Path) -> None:
        """Writes a save for :meth:`~lightning_replay.levels.LevelSelector.load`."""
        state = self.state_dict()
        write_state(path, state, of=state["kind"])

    def state(self) -> dict[str, Any]:
        """Returns :meth:`~rllib_ext.levels.server.LevelServer.state`, for checkpoints."""
        return dict(ray.get(self.actor.state.remote()))

    def write(self, folder: Folder, state: dict[str, Any], files: Mapping[str, Any]) -> None:
        with folder.to_write() as local:
            write_state(local, state | {"algorithm": files})

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        """Reads the state from a checkpoint and loads it into a copy; returns a function that restores it."""
        with folder.to_read() as local:
            state = read_state(local)
        check_files(state.pop("algorithm", None))
        cloudpickle.loads(self._packed).load_state_dict(state["levels"])
        return lambda: ray.get(self.actor.load_state.remote(state))

    def leave_out(self, folder: Folder) -> Callable[[], None]:
        return lambda: None

    def stop(self) -> None:
        ray.kill(self.actor)
        self._spare.cleanup()


LEVELS = Attached[RemoteLevels]("levels")  # of algorithms


def level_buffer(algorithm: Any) -> RemoteLevels:
    """Returns the level buffer of an algorithm that was configured with :func:`rllib_ext.configure` and ``levels``.

    Raises:
        ValueError: it was not.
    """
    levels = LEVELS.of(algorithm)
    if levels is None:
        raise ValueError(
            "the algorithm has no level buffer: call rllib_ext.configure(config, levels=...) before config.build_algo()"
        )
    return levels
