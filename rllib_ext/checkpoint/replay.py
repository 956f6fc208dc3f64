# SPDX-License-Identifier: Apache-2.0
"""The replay buffer as a part of an RLlib algorithm's checkpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)

from lightning_replay.sharded.folders import Folder
from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.files import (
    MANIFEST_OF_SHARDS,
    SavedBuffer,
    WarmUp,
    check_spaces,
    read_buffer,
    read_warm_up,
    write_buffer,
)
from rllib_ext.checkpoint.algorithm import CheckFiles

logger: logging.Logger = logging.getLogger(__name__)

FOLDER = "replay_buffer"


class ReplayPart:
    """Saves and restores the replay buffer and the warm-up, see :class:`~.algorithm.CheckpointPart`.

    Without the buffer, a restored algorithm collects a new warm-up before it learns.

    Args:
        algorithm: with a :class:`~rllib_ext.buffer.episode_buffer.RecipeEpisodeReplayBuffer`.
        restore: whether a restore includes the buffer by default.
        incremental: whether a save links files of the last one that have not changed.
    """

    folder = FOLDER
    option = "restore_replay"
    instead = "restore_replay=False restores the algorithm alone and starts with a new warm-up"

    def __init__(self, algorithm: Any, *, restore: bool = True, incremental: bool = True) -> None:
        self._algorithm = algorithm
        self.restores: bool = restore
        self._incremental = incremental
        self._warmup_steps: int = algorithm.config.num_steps_sampled_before_learning_starts
        self._last_save: Path | None = None
        self._buffer.is_in_checkpoints = True

    @property
    def _buffer(self) -> RecipeEpisodeReplayBuffer:
        return self._algorithm.local_replay_buffer

    def state(self) -> WarmUp:
        """Returns the warm-up; the rows are written from the buffer itself."""
        return WarmUp(self._warmup_steps, self._algorithm.config.num_steps_sampled_before_learning_starts)

    def write(self, folder: Folder, state: WarmUp, files: Mapping[str, Any]) -> None:
        previous = self._last_save if self._incremental and folder.local is not None else None
        with folder.to_write() as local:
            size = write_buffer(self._buffer, local, state, previous, files)
            (local / MANIFEST_OF_SHARDS).unlink(missing_ok=True)  # of an earlier save here, which this one replaces
        self._last_save = folder.local or self._last_save
        logger.info("replay buffer saved: %s bytes, %s of them written", f"{size.total:,}", f"{size.written:,}")

    def read(self, folder: Folder, check_files: CheckFiles) -> Callable[[], None]:
        with folder.to_read() as local:
            saved = read_buffer(self._buffer, local)
        check_files(saved.algorithm)
        check_spaces(saved.modules, self._algorithm.spaces or {})
        return functools.partial(self._take_over, saved)

    def leave_out(self, folder: Folder) -> Callable[[], None]:
        with folder.to_read(deep=False) as local:
            return functools.partial(self._restart_warm_up, read_warm_up(local))

    def _take_over(self, saved: SavedBuffer) -> None:
        self._buffer.take_over(saved.modules, saved.state)
        self._go_on_from(saved.warm_up)

    def _go_on_from(self, warm_up: WarmUp) -> None:
        self._warmup_steps = warm_up.steps
        self._start_learning_at(warm_up.learning_starts)

    def _restart_warm_up(self, saved: WarmUp | None) -> None:
        self._warmup_steps = self._warmup_steps if saved is None else saved.steps
        # RLlib compares the warm-up with the steps of the whole run, which were restored.
        missing = max(0, self._warmup_steps - self._buffer.num_env_steps_stored)
        metrics = self._algorithm.metrics
        if self._algorithm.config.count_steps_by == "agent_steps":
            steps = sum(metrics.peek((ENV_RUNNER_RESULTS, NUM_AGENT_STEPS_SAMPLED_LIFETIME), default={}).values())
        else:
            steps = metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        self._start_learning_at(int(steps) + missing)
        logger.info("the replay buffer was not restored: %d steps are collected before learning continues", missing)

    def _start_learning_at(self, steps: int) -> None:
        algorithm = self._algorithm
        if algorithm.config.num_steps_sampled_before_learning_starts != steps:
            config = algorithm.config.copy(copy_frozen=False)
            config.num_steps_sampled_before_learning_starts = steps
            config.freeze()
            algorithm.config = config
