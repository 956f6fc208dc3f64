# SPDX-License-Identifier: Apache-2.0
"""Base class of the schedulers of a curriculum, and the scheduler without preferences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from lightning_replay.saving.spec import recorded
from lightning_replay.validation import ABOVE_ZERO, check_option, checked_count, checked_number, checked_share

_ROUNDING = 1e-6
_TINY = float(np.finfo(np.float64).tiny)


class Scheduler(ABC):
    """Chooses the task each training batch is drawn from, and the task each actor plays.

    The buffer calls :meth:`start` once with the names of its tasks, then :meth:`probabilities` and :meth:`drawn` for
    every batch; :meth:`progress` is called with measurements of how well a task is played. Tasks are numbered in the
    order of their names. Build a scheduler for each buffer. Distributed Parallel Curriculum Experience Replay,
    section 4.

    Attributes:
        tasks: the names, in the order of the numbers; empty before :meth:`start`.
        shares_one_table: whether the rows of all tasks go to one first-in-first-out table instead of one table each.
            Then every batch is drawn from that table, and the probabilities are the shares of the actors.
    """

    shares_one_table: bool = False
    _required: tuple[str, Sequence[str]] = ("", ())  # an option, and the tasks that it names

    def __init__(self) -> None:
        self.tasks: tuple[str, ...] = ()

    def start(self, tasks: Sequence[str]) -> None:
        """Sets the tasks, once.

        Raises:
            ValueError: no task, an empty name, a name given twice, a name in the scheduler's options that is not
                among the tasks, or a scheduler that already serves a buffer.
        """
        names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        if self.tasks:
            raise ValueError(
                f"this {type(self).__name__} already serves the tasks {list(self.tasks)}; build a scheduler for each "
                "buffer"
            )
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"tasks are {list(names)}; a curriculum needs at least one task, each with a name")
        if len(set(names)) < len(names):
            raise ValueError(f"tasks are {list(names)}, some of them twice; give every task a name of its own")
        option, required = self._required
        unknown = [name for name in required if name not in names]
        if unknown:
            raise ValueError(f"{option} names {unknown}; the tasks are {', '.join(map(repr, names))}")
        self.tasks = names

    @abstractmethod
    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        """Returns the probability of each task to give the next batch.

        Args:
            ready: bool ``[N]``, the tasks that hold enough data to be drawn from.

        Returns:
            float64 ``[N]``, 0 where not ready, of sum 1; all 0 when no task is ready.
        """

    def drawn(self, task: int, probability: float) -> None:
        """Notes that a batch of a task was drawn, and with which probability. The default checks and ignores both."""
        self._check_task(task)
        if type(probability) is not float or not 0.0 < probability <= 1.0:
            checked_share("probability", probability, ABOVE_ZERO)

    def progress(self, task: int, value: float) -> None:
        """Takes a new progress signal of a task. The default checks and ignores it.

        Raises:
            ValueError: there is no such task, or the value is NaN or outside [0, 1].
        """
        self._check_task(task)
        accepted = "a number in [0, 1], as lightning_replay.schedulers.MeanReturn makes it from returns"
        checked_number(f"the progress signal of task {self.tasks[task]!r}", value, 0.0, 1.0, accepted=accepted)

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the task each actor plays next: actor k plays task ``k % N``, whatever the batches are drawn from."""
        return self._in_turn(range(len(self.tasks)), num_actors)

    def _in_turn(self, tasks: Sequence[int], num_actors: int) -> list[int]:
        self._check_started()
        checked_count("num_actors", num_actors)
        return [tasks[actor % len(tasks)] for actor in range(num_actors)]

    def index_of(self, name: str) -> int:
        """Returns the number of a task.

        Raises:
            ValueError: there is no such task.
        """
        self._check_started()
        if name not in self.tasks:
            raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(map(repr, self.tasks))}")
        return self.tasks.index(name)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values from which :meth:`load_state_dict` restores everything, in lists of their own."""
        return {"tasks": list(self.tasks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: the state was saved with other tasks.
        """
        if list(state["tasks"]) != list(self.tasks):
            raise ValueError(
                f"the state was saved with the tasks {list(state['tasks'])}; this scheduler has {list(self.tasks)}. "
                "Start a scheduler with the same tasks in the same order, then load"
            )

    def _check_started(self) -> None:
        if not self.tasks:
            raise RuntimeError(f"this {type(self).__name__} has no tasks yet; call start(tasks) first")

    def _check_task(self, task: int) -> None:
        self._check_started()
        last = len(self.tasks) - 1
        if type(task) is int and 0 <= task <= last:  # without the texts of an error, in every draw
            return
        check_option("task", task, Integral, f"a whole number from 0 to {last}, of {list(self.tasks)}", 0, last)


@recorded
class UniformTasks(Scheduler):
    """Draws every ready task with the same probability, whatever its progress. Section 4.2.1 of the paper.

    Example:
        >>> scheduler = UniformTasks()
        >>> scheduler.start(["target", "far", "near", "goal_mouth"])
        >>> scheduler.probabilities(np.array([True, True, False, False]))
        array([0.5, 0.5, 0. , 0. ])
    """

    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        """Returns one over the number of ready tasks for each of them."""
        self._check_started()
        ready = np.asarray(ready, dtype=bool)
        count = np.count_nonzero(ready)
        if count and ready.shape == (len(self.tasks),):
            return ready / count
        return among_ready(np.ones(len(self.tasks)), ready)


def checked_probabilities(scheduler: Scheduler, ready: np.ndarray) -> np.ndarray:
    """Returns the probabilities of a scheduler, which may be a user's own, float64 ``[N]`` of sum 1, or all 0.

    Raises:
        ValueError: the scheduler returned something else.
    """
    given = scheduler.probabilities(ready)
    if isinstance(given, np.ndarray) and given.shape == ready.shape:
        numbers = given.tolist()  # of few tasks cheaper than two reductions
        total = sum(numbers)
        if min(numbers) >= 0 and (abs(total - 1.0) < _ROUNDING or total == 0):
            return given
    raise ValueError(
        f"{type(scheduler).__name__}.probabilities returned {given!r} for the tasks {list(scheduler.tasks)}; return a "
        f"float64 array [{len(ready)}] from 0 on, of sum 1, or all 0 where no task is ready"
    )


def among_ready(preferences: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """Computes ``preferences * ready`` divided by its sum.

    Args:
        preferences: float64 ``[N]``, at least 0.
        ready: bool ``[N]``.

    Returns:
        float64 ``[N]``: where only tasks of preference 0 are ready, the same chance for each of these; all 0 when no
        task is ready.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> among_ready(np.array([0.5, 0.25, 0.25]), np.array([True, False, True]))
        array([0.66666667, 0.        , 0.33333333])
    """
    ready = np.asarray(ready, dtype=bool)
    if ready.shape != preferences.shape:
        raise ValueError(f"ready has the shape {ready.shape}; there are {preferences.size} tasks, one value for each")
    masked = np.where(ready, preferences, 0.0)
    if not np.count_nonzero(masked):
        masked = ready.astype(np.float64)
    return masked / max(np.add.reduce(masked), _TINY)
