# SPDX-License-Identifier: Apache-2.0
"""Assigns a curriculum's tasks to environments, and reports progress from the episodes they play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from lightning_replay.schedulers.progress import ReturnProgress
from lightning_replay.training_replay import TrainingReplay

__all__ = ["TaskAssignment", "check_tasks"]


class TaskAssignment:
    """Sets each environment's task ahead of the reset that begins it; environments reset when an episode ends.

    Args:
        replay: a buffer with tasks, as :func:`lightning_replay.recipes.parallel_curriculum` builds it.
        progress: makes progress signals from the returns of finished episodes; ``None`` sends none.
    """

    def __init__(self, replay: TrainingReplay, progress: ReturnProgress | None) -> None:
        self.replay = replay
        self._progress = progress
        self._next: list[int] = []
        self.running: np.ndarray = np.zeros(0, dtype=np.int64)

    def begin(self, environments: VectorEnv[Any, Any, Any]) -> None:
        """Sets the tasks of new environments before their first reset; as many as before keep their tasks."""
        count = environments.num_envs
        self._assign(environments, self._next if len(self._next) == count else self.replay.actor_tasks(count))
        self.running = np.array(self._next, dtype=np.int64)

    def finish(self, environments: VectorEnv[Any, Any, Any], ended: np.ndarray, returns: Sequence[float]) -> None:
        """Reports episodes that ended, whose environments already play the next, and updates the assignment."""
        names = self.replay.tasks
        for task, episode_return in zip(self.running[ended], returns, strict=True):
            signal = None if self._progress is None else self._progress.episode(int(task), episode_return)
            if signal is not None:
                self.replay.progress(names[task], signal)
        self.running[ended] = np.array(self._next)[ended]
        tasks = list(self.replay.actor_tasks(environments.num_envs))
        if tasks != self._next:
            self._assign(environments, tasks)

    def _assign(self, environments: VectorEnv[Any, Any, Any], tasks: Sequence[int]) -> None:
        self._next = [int(task) for task in tasks]
        names = [self.replay.tasks[task] for task in self._next]
        environments.set_attr("task", names)  # type: ignore[attr-defined]  # both of Gymnasium's vectors have it

    def state_dict(self) -> dict[str, Any]:
        """The task of each environment's next episode, and the progress so far."""
        progress = None if self._progress is None else self._progress.state_dict()
        return {"next": [self.replay.tasks[task] for task in self._next], "progress": progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` before environments are begun."""
        self._next = [self.replay.tasks.index(name) for name in state["next"]]
        if self._progress is not None and state["progress"] is not None:
            self._progress.load_state_dict(state["progress"])


def check_tasks(environment: gymnasium.Env[Any, Any], tasks: Sequence[str]) -> None:
    """Refuses an environment that cannot play these tasks.

    Raises:
        ValueError: it has no ``TASKS``, lacks one of the names, or its ``task`` cannot be set.
    """
    if not (environment.has_wrapper_attr("TASKS") and environment.has_wrapper_attr("task")):
        raise ValueError(
            f"the replay has the tasks {list(tasks)}, but {environment} has no TASKS and no task to set. Give the "
            "environment both (lightning_replay.envs.tasks.TaskChoice), or use a replay without tasks."
        )
    known = list(environment.get_wrapper_attr("TASKS"))
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ValueError(f"the replay has the tasks {unknown}, which {environment} does not have; it has {known}.")
    try:
        environment.set_wrapper_attr("task", tasks[0])
    except AttributeError as error:
        raise ValueError(
            f"the task of {environment} cannot be set ({error}); collecting for a replay with tasks sets it before "
            "each reset. Make it an attribute, or give its property a setter."
        ) from error
