# SPDX-License-Identifier: Apache-2.0
"""The task of an environment: set by name at any time, in effect from the next reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_replay.validation import checked_choice


class TaskChoice:
    """Base of environments with tasks; keeps the chosen task apart from that of the running episode.

    A subclass names its tasks in :attr:`TASKS` and calls :meth:`_begin_task` in ``reset``. Through wrappers the task is
    set with Gymnasium's ``set_wrapper_attr("task", name)``, in a vector with ``set_attr("task", [name, ...])``.

    Attributes:
        TASKS: names of the tasks, the target task first.
    """

    TASKS: tuple[str, ...] = ("target",)

    def __init__(self, task: str | None = None) -> None:
        self.task = self.TASKS[0] if task is None else task
        self._running_task = self.TASKS.index(self.task)

    @property
    def task(self) -> str:
        """Name of the task of the next episode; an unknown name raises ``ValueError``."""
        return self._task

    @task.setter
    def task(self, name: str) -> None:
        self._task = str(checked_choice("task", name, self.TASKS))

    def _begin_task(self, options: Mapping[str, Any] | None) -> int:
        """Returns the index of the task of a new episode; ``options["task"]``, if given, becomes :attr:`task`."""
        if options and "task" in options:
            self.task = options["task"]
        self._running_task = self.TASKS.index(self.task)
        return self._running_task
