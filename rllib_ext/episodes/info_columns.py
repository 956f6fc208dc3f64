# SPDX-License-Identifier: Apache-2.0
"""Columns from the infos of environment steps: numbers by key, and the task."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from lightning_replay.envs.step_check import checked_info_keys

logger: logging.Logger = logging.getLogger(__name__)

TASK = "task"  # among the infos, among an episode's custom_data, and the name of the column
_ROWS_BEFORE_WARNING = 1_000


class Information:
    """Reads the infos of an episode's steps as columns.

    Args:
        keys: of numbers or flags; each becomes a column, 0 where an info lacks it.
        tasks: names of the tasks of a curriculum. The task of a step is what :func:`rllib_ext.configure` had its
            EnvRunner play, else the info ``task``, a name or an index into ``tasks``.

    Raises:
        TypeError: no sequence of names.
        ValueError: a key that is empty, given twice, or the name of a column that every row has.
    """

    def __init__(self, keys: Sequence[str] = (), tasks: Sequence[str] | None = None) -> None:
        self.keys: tuple[str, ...] = checked_info_keys(keys)
        self.tasks: list[str] | None = None if tasks is None else list(tasks)
        self._missing = set(keys)
        self._rows_read = 0

    def read(self, episode: SingleAgentEpisode) -> list[np.ndarray]:
        """Returns the values of each key in the steps' infos, float32 ``[n, 1]``."""
        infos = _infos(episode)
        self._missing = {key for key in self._missing if not any(key in info for info in infos)}
        rows_before, self._rows_read = self._rows_read, self._rows_read + len(infos)
        if self._missing and rows_before < _ROWS_BEFORE_WARNING <= self._rows_read:  # they may be misspelt
            logger.warning(
                "info_keys has %s, which no info had in the first %d steps and which is stored as 0; the last info has "
                "%s",
                sorted(self._missing),
                self._rows_read,
                sorted(map(str, infos[-1])),
            )
        return [np.array([[_number(key, info, episode)] for info in infos], dtype=np.float32) for key in self.keys]

    def read_tasks(self, episode: SingleAgentEpisode) -> np.ndarray:
        """Returns the task of each step of a curriculum, int64 ``[n]``."""
        tag = episode.custom_data.get(TASK)
        if tag is not None:
            return np.full(len(episode), self._task(tag, episode), dtype=np.int64)
        return np.array([self._task(info.get(TASK), episode) for info in _infos(episode)], dtype=np.int64)

    def _task(self, value: Any, episode: SingleAgentEpisode) -> int:
        assert self.tasks is not None
        value = _scalar(value)
        if isinstance(value, str) and value in self.tasks:
            return self.tasks.index(value)
        if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) < len(self.tasks):
            return int(value)
        if value is None:
            raise ValueError(
                f"the steps of episode {episode.id_} have no task, and the replay has the tasks {self.tasks}. Let "
                "rllib_ext.configure(config) set each environment's task, or put 'task' into the info of every step"
            )
        raise ValueError(
            f"episode {episode.id_} is of task {value!r}; the replay has the tasks {self.tasks}, by name or numbered "
            f"0 to {len(self.tasks) - 1}"
        )


def _infos(episode: SingleAgentEpisode) -> list[dict[str, Any]]:
    return [info or {} for info in episode.get_infos(slice(1, len(episode) + 1))]


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def _number(key: str, info: dict[str, Any], episode: SingleAgentEpisode) -> float:
    value = _scalar(info.get(key, 0))
    if not isinstance(value, numbers.Real | np.bool_):
        raise ValueError(
            f"info {key!r} of episode {episode.id_} holds {value!r}; info_keys takes one number or flag for each step. "
            "Leave the key out, or put a number into the info by a wrapper. Nothing was stored"
        )
    return float(value)
