# SPDX-License-Identifier: Apache-2.0
"""The task an environment plays: told by name at any time, in force from the next reset on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_replay.validation import checked_choice


class TaskChoice:
    """Keeps the task an environment was told apart from the one its running episode plays.

    An environment inherits from it, names its tasks in :attr:`TASKS` and calls :meth:`_begin_task` in ``reset``.
    Through wrappers the task is set with Gymnasium's ``set_wrapper_attr("task", name)``, in a vector of
    environments with ``set_attr("task", [name, ...])``.

    Attributes:
        TASKS: names of the tasks, the target task first.
    """

    TASKS: tuple[str, ...] = ("target",)

    def __init__(self, task: str | None = None) -> None:
        self.task = self.TASKS[0] if task is None else task
        self._running_task = self.TASKS.index(self.task)

    @property
    def task(self) -> str:
        """Name of the task that the next reset begins; setting an unknown name raises ``ValueError``."""
        return self._task

    @task.setter
    def task(self, name: str) -> None:
        self._task = _known(name, self.TASKS)

    def _begin_task(self, options: Mapping[str, Any] | None) -> int:
        """Index of the task of the episode that begins; ``options["task"]``, where given, becomes :attr:`task`."""
        if options and "task" in options:
            self.task = options["task"]
        self._running_task = self.TASKS.index(self.task)
        return self._running_task


def _known(name: str, tasks: Sequence[str]) -> str:
    return str(checked_choice("task", name, tasks))
