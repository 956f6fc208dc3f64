# SPDX-License-Identifier: Apache-2.0
"""The replay buffer as a part of an RLlib algorithm's checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pyarrow import fs
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)

from rllib_ext.algorithm_files import check_algorithm_files, fingerprints_of
from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.files import SavedBuffer, WarmUp, check_spaces, read_buffer, read_warm_up, write_buffer
from rllib_ext.checkpoint_folders import folder_to_read, folder_to_write

logger = logging.getLogger(__name__)

FOLDER = "replay_buffer"


class CheckpointedReplay:
    """Saves the buffer into the folder ``replay_buffer`` of each checkpoint, and restores it from there.

    RLlib 2.60 ignores ``store_buffer_in_checkpoints`` on its new stack and has no hook around a checkpoint, so
    :meth:`install` puts this object's methods over the algorithm's ``save_to_path`` and ``restore_from_path``, which
    ``from_checkpoint`` and Tune call too. A restore reads and checks the whole buffer before anything of the algorithm
    is changed.

    Args:
        algorithm: with a :class:`~rllib_ext.buffer.episode_buffer.RecipeEpisodeReplayBuffer`.
        restore: whether restoring includes the buffer, where ``restore_from_path(restore_replay=...)`` does not say.
        incremental: whether a save links files of the last one that have not changed.
    """

    def __init__(self, algorithm: Any, *, restore: bool = True, incremental: bool = True) -> None:
        self._algorithm = algorithm
        self._restores, self._incremental = restore, incremental
        self._warmup_steps: int = algorithm.config.num_steps_sampled_before_learning_starts
        self._last_save: Path | None = None
        self._save_algorithm, self._restore_algorithm = algorithm.save_to_path, algorithm.restore_from_path

    @property
    def _buffer(self) -> RecipeEpisodeReplayBuffer:
        return self._algorithm.local_replay_buffer

    def install(self) -> None:
        """From now on the algorithm's checkpoints hold the buffer."""
        self._algorithm.save_to_path = self.save_to_path
        self._algorithm.restore_from_path = self.restore_from_path
        self._buffer.is_in_checkpoints = True

    def save_to_path(
        self, path: str | Path | None = None, *, filesystem: fs.FileSystem | None = None, **options: Any
    ) -> str:
        """``Algorithm.save_to_path``, and the buffer; returns the path.

        Args:
            path: a directory, or a URI of any file system of pyarrow.
            filesystem: of ``path``.
            options: RLlib's ``state`` and ``use_msgpack``.
        """
        saved = self._save_algorithm(path, filesystem=filesystem, **options)
        warm_up = WarmUp(self._warmup_steps, self._algorithm.config.num_steps_sampled_before_learning_starts)
        with folder_to_write(path, filesystem, saved, FOLDER) as (folder, stays):
            previous = self._last_save if self._incremental and stays else None
            files = fingerprints_of(path, filesystem, saved)
            size = write_buffer(self._buffer, folder, warm_up, previous, files)
            self._last_save = folder if stays else self._last_save
        logger.info(
            "replay buffer saved to %s: %s bytes, %s of them written", saved, f"{size.total:,}", f"{size.written:,}"
        )
        return saved

    def restore_from_path(
        self,
        path: str | Path,
        *,
        component: str | None = None,
        filesystem: fs.FileSystem | None = None,
        restore_replay: bool | None = None,
        **options: Any,
    ) -> None:
        """``Algorithm.restore_from_path``, and the buffer.

        Args:
            path: of a checkpoint, a directory or a URI.
            component: of the algorithm, to restore that alone; the buffer stays as it is then.
            filesystem: of ``path``.
            restore_replay: whether to restore the buffer; as :func:`rllib_ext.configure` says by default. If not, the
                algorithm collects a new warm-up before it learns. ``from_checkpoint`` takes it too.
            options: RLlib's own.

        Raises:
            FileNotFoundError: the checkpoint has no buffer.
            DamagedFileError: a file of it is missing, truncated or changed, or files of two checkpoints are mixed,
                because a save into the same folder was cut short; nothing is changed.
            ValueError: a buffer of another recipe, capacity or space; nothing is changed.
        """
        restores = self._restores if restore_replay is None else restore_replay
        if component is not None:
            self._restore_algorithm(path, component=component, filesystem=filesystem, **options)
        elif restores:
            saved = self._read(path, filesystem)
            self._restore_algorithm(path, filesystem=filesystem, **options)
            self._buffer.take_over(saved.modules, saved.state)
            self._warmup_steps = saved.warm_up.steps
            self._start_learning_at(saved.warm_up.learning_starts)
        else:
            with folder_to_read(path, filesystem, FOLDER) as folder:
                warm_up = read_warm_up(folder)
            self._restore_algorithm(path, filesystem=filesystem, **options)
            self._warmup_steps = self._warmup_steps if warm_up is None else warm_up.steps
            self._warm_up_again()

    def _read(self, path: str | Path, filesystem: fs.FileSystem | None) -> SavedBuffer:
        with folder_to_read(path, filesystem, FOLDER) as folder:
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"{path} holds no {FOLDER}: it was saved without rllib_ext.configure, or the folder is gone. "
                    "Nothing was restored; restore_replay=False restores the algorithm and starts with a new warm-up"
                )
            saved = read_buffer(self._buffer, folder)
        instead = "restore_replay=False restores the algorithm alone and starts with a new warm-up"
        check_algorithm_files(path, filesystem, saved.algorithm, instead)
        check_spaces(saved.modules, self._algorithm.spaces or {})
        return saved

    def _warm_up_again(self) -> None:
        """RLlib compares the steps of the whole run, which were restored, with the warm-up: that many are due anew."""
        missing = max(0, self._warmup_steps - self._buffer.num_env_steps_stored)
        self._start_learning_at(self._steps_sampled() + missing)
        logger.info("the replay buffer was not restored: %d steps are collected before learning goes on", missing)

    def _start_learning_at(self, steps: int) -> None:
        algorithm = self._algorithm
        if algorithm.config.num_steps_sampled_before_learning_starts != steps:
            config = algorithm.config.copy(copy_frozen=False)
            config.num_steps_sampled_before_learning_starts = steps
            config.freeze()
            algorithm.config = config

    def _steps_sampled(self) -> int:
        metrics = self._algorithm.metrics
        if self._algorithm.config.count_steps_by == "agent_steps":
            by_agent = metrics.peek((ENV_RUNNER_RESULTS, NUM_AGENT_STEPS_SAMPLED_LIFETIME), default={})
            return int(sum(by_agent.values()))
        return int(metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0))
