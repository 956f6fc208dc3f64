# SPDX-License-Identifier: Apache-2.0
"""Which task of a curriculum the next batch is drawn from, and which task each actor plays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from lightning_replay.options import (
    ABOVE_ZERO,
    check_kind,
    check_option,
    checked_count,
    checked_flag,
    checked_names,
    checked_number,
    checked_share,
)
from lightning_replay.saving.spec import rebuildable
from lightning_replay.state import Stateful

__all__ = [
    "EasyToHard",
    "Exp3",
    "Exp3S",
    "MeanReturn",
    "OneTask",
    "ReturnChange",
    "ReturnProgress",
    "ReverseCurriculum",
    "Scheduler",
    "UniformTasks",
    "among_ready",
]


class Scheduler(Stateful, ABC):
    """Chooses the task each training batch is drawn from, and the task each actor plays.

    The buffer calls :meth:`start` once with the names of its tasks, then :meth:`probabilities` and :meth:`drawn` for
    every batch. :meth:`progress` is called with measurements of how well a task is played. Tasks are numbered in the
    order of their names. Build a scheduler for each buffer. Distributed Parallel Curriculum Experience Replay,
    section 4.

    Attributes:
        tasks: the names, in the order of the numbers, empty before :meth:`start`.
        shares_one_table: whether the rows of all tasks go to one first-in-first-out table instead of one table each.
            Then every batch is drawn from that table, and the probabilities are the shares of the actors.
    """

    shares_one_table: bool = False
    saved_attributes: tuple[str, ...] = ("tasks",)
    _required: tuple[str, Sequence[str]] = ("", ())  # The name of an option and the tasks that it names.

    def __init__(self) -> None:
        self.tasks: tuple[str, ...] = ()

    def start(self, tasks: Sequence[str]) -> None:
        """Sets the tasks, once, or raises ``ValueError`` for empty or repeated names, or if an option names another."""
        if self.tasks:
            name = type(self).__name__
            raise ValueError(
                f"this {name} already serves the tasks {list(self.tasks)}; build a scheduler for each buffer"
            )
        # One name is one task, not its letters.
        names = tuple(checked_names("tasks", [tasks] if isinstance(tasks, str) else tasks, "task"))
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
            float64 ``[N]``, 0 if not ready, of sum 1, or all 0 when no task is ready.
        """

    def drawn(self, task: int, probability: float) -> None:
        """Notes that a batch of a task was drawn, and with which probability. The default checks and ignores both."""
        self._check_task(task)
        if type(probability) is not float or not 0.0 < probability <= 1.0:  # The full check is slower.
            checked_share("probability", probability, ABOVE_ZERO)

    def progress(self, task: int, value: float) -> None:
        """Takes a new progress signal of a task, in [0, 1]. The default checks and ignores it."""
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
        """Returns the number of a task, or raises ``ValueError`` if there is none of this name.

        :meta private:
        """
        self._check_started()
        if name not in self.tasks:
            raise ValueError(f"task is {name!r}; the tasks are {', '.join(map(repr, self.tasks))}")
        return self.tasks.index(name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved state. Raises ``ValueError`` if it was saved with other tasks or another order."""
        fixed: dict[str, Any] = {
            name: getattr(self, name) for name in ("tasks", "order") if name in self.saved_attributes
        }
        for name, here in fixed.items():  # A file has lists in place of tuples.
            if list(state_dict[name]) != list(here):
                raise ValueError(
                    f"the state was saved with the {name} {list(state_dict[name])}; this scheduler has {list(here)}. "
                    "Build a scheduler with the same names in the same order, then load"
                )
        super().load_state_dict({**state_dict, **fixed})

    def _check_started(self) -> None:
        if not self.tasks:
            raise RuntimeError(f"this {type(self).__name__} has no tasks yet; call start(tasks) first")

    def _check_task(self, task: int) -> None:
        self._check_started()
        last = len(self.tasks) - 1
        if type(task) is int and 0 <= task <= last:  # The error texts are too slow for every draw.
            return
        check_option("task", task, Integral, f"a whole number from 0 to {last}, of {list(self.tasks)}", 0, last)


@rebuildable
class UniformTasks(Scheduler):
    """Draws every ready task with the same probability, whatever its progress. Section 4.2.1 of the paper.

    Example:
        >>> scheduler = UniformTasks()
        >>> scheduler.start(["target", "far", "near", "goal_mouth"])
        >>> scheduler.probabilities(np.array([True, True, False, False]))
        array([0.5, 0.5, 0. , 0. ])
    """

    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        """Returns the same probability for every ready task, float64 ``[N]``."""
        self._check_started()
        ready = np.asarray(ready, dtype=bool)
        count = np.count_nonzero(ready)
        if count and ready.shape == (len(self.tasks),):  # The result is that of among_ready, in less time.
            return ready / count
        return among_ready(np.ones(len(self.tasks)), ready)


def checked_probabilities(scheduler: Scheduler, ready: np.ndarray) -> np.ndarray:
    """Returns the probabilities of a scheduler, or ``ValueError`` if one of a user's own returned something else."""
    given = scheduler.probabilities(ready)
    if isinstance(given, np.ndarray) and given.shape == ready.shape:
        # Two reductions of an array cost more for few tasks.
        numbers = given.tolist()
        total = sum(numbers)
        if min(numbers) >= 0 and (abs(total - 1.0) < 1e-6 or total == 0):
            return given
    raise ValueError(
        f"{type(scheduler).__name__}.probabilities returned {given!r} for the tasks {list(scheduler.tasks)}; return a "
        f"float64 array [{len(ready)}] from 0 on, of sum 1, or all 0 where no task is ready"
    )


def among_ready(preferences: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """Computes ``preferences * ready`` divided by its sum, float64 ``[N]``.

    If only tasks of preference 0 are ready, each has the same chance. All are 0 when no task is ready. Raises
    ``ValueError`` if the shapes differ.

    Example:
        >>> among_ready(np.array([0.5, 0.25, 0.25]), np.array([True, False, True]))
        array([0.66666667, 0.        , 0.33333333])
    """
    ready = np.asarray(ready, dtype=bool)
    if ready.shape != preferences.shape:
        raise ValueError(f"ready has the shape {ready.shape}; there are {preferences.size} tasks, one value for each")
    masked = np.where(ready, preferences, 0.0)  # not a product: 0 * inf is NaN
    if not np.count_nonzero(masked):
        masked = ready.astype(np.float64)
    return masked / max(np.add.reduce(masked), np.finfo(np.float64).tiny)


@rebuildable
class Exp3(Scheduler):
    """Draws task i with probability ``(1 - exploration) * w[i] / sum(w) + exploration / N``.

    A progress signal r of task i, drawn with probability p, multiplies its weight by
    ``exp(exploration * r / (p * N))``. Weights are kept as logarithms, so they never overflow. Distributed Parallel
    Curriculum Experience Replay, equations 4a to 4c; Auer et al. 2002, https://doi.org/10.1137/S0097539701398375.

    Each signal causes one update. It is applied at once if its task was drawn since the task's last update, with the
    probability of the last draw. Otherwise, it is kept for the next draw of the task, and a newer signal replaces it.

    If every task has signals equally often, probabilities settle in proportion to the signals, none below ``exploration
    / N``. With mean returns, the tasks that are played best are drawn most, and the target falls to that bound until it
    is solved. :class:`ReturnChange` as signal prefers the tasks that are being learned instead.

    Args:
        exploration: Share γ of probability spread evenly over the tasks, in (0, 1]. 1 draws uniformly.

    Attributes:
        log_weights: float64 ``[N]``, the greatest is 0.

    Example:
        >>> scheduler = Exp3(exploration=0.1)
        >>> scheduler.start(["target", "far", "near", "goal_mouth"])
        >>> scheduler.drawn(0, probability=0.25)
        >>> scheduler.progress(0, 1.0)
        >>> scheduler.probabilities(np.ones(4, dtype=bool)).round(4)
        array([0.2673, 0.2442, 0.2442, 0.2442])
    """

    saved_attributes: tuple[str, ...] = ("tasks", "log_weights", "_drawn_with", "_waiting")

    def __init__(self, exploration: float = 0.1) -> None:
        super().__init__()
        self.exploration: float = checked_share("exploration", exploration, ABOVE_ZERO)
        self.log_weights: np.ndarray = np.zeros(0)
        self._drawn_with: list[float | None] = []
        self._waiting: list[float | None] = []

    def start(self, tasks: Sequence[str]) -> None:
        """Sets the tasks and gives all of them the same weight."""
        super().start(tasks)
        self.log_weights = np.zeros(len(self.tasks))
        self._drawn_with = [None] * len(self.tasks)
        self._waiting = [None] * len(self.tasks)

    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        """Returns the probabilities of equation 4a, renormalized over the ready tasks, float64 ``[N]``."""
        # This is equation 4a, renormalized over the ready tasks.
        self._check_started()
        weights = np.exp(self.log_weights - self.log_weights.max())
        chosen = (1.0 - self.exploration) * weights / weights.sum()
        return among_ready(chosen + self.exploration / len(self.tasks), ready)

    def drawn(self, task: int, probability: float) -> None:
        """Applies the pending signal of a task. If it has none, stores the probability."""
        super().drawn(task, probability)
        waiting = self._waiting[task]
        self._waiting[task] = None
        if waiting is None:
            self._drawn_with[task] = float(probability)
        else:
            self.update(task, waiting, probability)

    def progress(self, task: int, value: float) -> None:
        """Applies the signal if its task was drawn since its last update, and otherwise keeps it for the next draw."""
        super().progress(task, value)
        probability = self._drawn_with[task]
        self._drawn_with[task] = None
        if probability is None:
            self._waiting[task] = float(value)
        else:
            self.update(task, value, probability)

    def update(self, task: int, profit: float, probability: float) -> None:
        """Computes ``w[task] *= exp(exploration * profit / (probability * N))``, for any finite profit r."""
        self._check_task(task)
        self.log_weights[task] += self._gain(profit, probability)
        # Only differences matter. With a maximum of 0, weights cannot grow until a gain is lost in rounding.
        self.log_weights -= self.log_weights.max()

    def state_dict(self) -> dict[str, Any]:
        """Returns tasks, weights, and pending signals as plain values."""
        return super().state_dict() | {"log_weights": self.log_weights.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved state. Raises ``ValueError`` if it was saved with other tasks."""
        super().load_state_dict(state_dict)
        self.log_weights = np.array(self.log_weights, dtype=np.float64)

    def _gain(self, profit: float, probability: float) -> float:
        checked_number("profit", profit)
        checked_share("probability", probability, ABOVE_ZERO)
        return self.exploration * profit / (probability * len(self.tasks))


@rebuildable
class Exp3S(Exp3):
    """:class:`Exp3` in which every update also gives each task the share ``e * weight_sharing / N`` of all weights.

    This bounds the ratios of weights, so that the scheduler adapts when the signals of another task rise: a difference
    without new signals decays over about ``1 / weight_sharing`` updates. Auer et al. 2002, section 8,
    https://doi.org/10.1137/S0097539701398375.

    Args:
        exploration: Share γ, as in :class:`Exp3`.
        weight_sharing: Share α, in (0, 1], about one over the number of updates in which signals change. Give well
            below ``exploration / N``. Otherwise, the weights stay nearly equal. For none, use :class:`Exp3`.

    Example:
        >>> scheduler = Exp3S(exploration=0.5, weight_sharing=0.01)
        >>> scheduler.start(["target", "near"])
        >>> for _ in range(1000):
        ...     scheduler.update(1, profit=1.0, probability=0.5)
        >>> scheduler.log_weights.round(1)
        array([-3.9,  0. ])
    """

    def __init__(self, exploration: float = 0.1, weight_sharing: float = 0.001) -> None:
        super().__init__(exploration)
        accepted = "a number in (0, 1]; for none, use Exp3"
        self.weight_sharing: float = checked_number("weight_sharing", weight_sharing, ABOVE_ZERO, 1, accepted=accepted)

    def update(self, task: int, profit: float, probability: float) -> None:
        """Computes the update of :class:`Exp3`, then ``w += e * weight_sharing / N * sum(w before)``."""
        self._check_task(task)
        gain = self._gain(profit, probability)
        # The logarithm of e * α / N * sum(w). The sum is the one before the gain.
        shared = np.logaddexp.reduce(self.log_weights) + 1.0 + math.log(self.weight_sharing / len(self.tasks))
        self.log_weights[task] += gain
        self.log_weights: np.ndarray = np.logaddexp(self.log_weights, shared)
        self.log_weights -= self.log_weights.max()


class ReturnProgress(Stateful, ABC):
    """Turns the returns of episodes into progress signals in [0, 1], separately for each task.

    Call :meth:`episode` at the end of every episode and pass its result, unless ``None``, to the buffer's
    ``progress``. A scheduler learns once from each signal, so ``every`` sets how often it does.

    Args:
        low: Least return, the signal 0.
        high: Greatest return, the signal 1.
        window: Number of newest episodes of a task that count.
        every: Number of episodes from one signal of a task to the next.
        across_tasks: Whether episodes of all tasks count, not only episodes of the task. Tasks of short episodes then
            send as many signals as others, and :class:`Exp3` does not prefer them for their number.

    Raises:
        ValueError: ``low`` is not below ``high``, or ``window`` or ``every`` is too small.
    """

    least_episodes: int = 1
    saved_attributes: tuple[str, ...] = ("_returns", "_episodes", "_sent")

    def __init__(self, low: float, high: float, window: int = 100, every: int = 10, across_tasks: bool = False) -> None:
        self.low: float = checked_number("low", low)
        self.high: float = checked_number("high", high)
        if not self.low < self.high:
            raise ValueError(f"low is {low} and high is {high}; give the least and the greatest return, low < high")
        self.window: int = checked_count("window", window, self.least_episodes, of="episodes")
        self.every: int = checked_count("every", every, of="episodes")
        self.across_tasks: bool = checked_flag("across_tasks", across_tasks)
        # The keys are task numbers as texts, as in JSON. The values are the newest returns, the number of episodes, and
        # the stretch of ``every`` episodes of the last signal.
        self._returns: dict[str, list[float]] = {}
        self._episodes: dict[str, int] = {}
        self._sent: dict[str, int] = {}

    def episode(self, task: int, episode_return: float) -> float | None:
        """Adds the undiscounted return of an episode. Returns a signal once in ``every``, else ``None``."""
        if not math.isfinite(episode_return):
            raise ValueError(
                f"the return of an episode of task {task} is {episode_return}; a progress signal needs finite returns"
            )
        name = str(int(task))
        returns = self._returns[name] = [*self._returns.get(name, []), float(episode_return)][-self.window :]
        self._episodes[name] = self._episodes.get(name, 0) + 1
        counted = sum(self._episodes.values()) if self.across_tasks else self._episodes[name]
        if counted // self.every == self._sent.get(name, 0) or len(returns) < self.least_episodes:
            return None
        self._sent[name] = counted // self.every
        return min(max(self.signal(returns), 0.0), 1.0)

    @abstractmethod
    def signal(self, returns: list[float]) -> float:
        """Computes the signal of a task from its newest returns, oldest first, clipped to [0, 1] afterwards."""


@rebuildable
class MeanReturn(ReturnProgress):
    """Mean of the newest returns of a task: ``(mean - low) / (high - low)``, clipped to [0, 1].

    The signal of Distributed Parallel Curriculum Experience Replay, as far as its figure 7 shows it: it is highest for
    tasks that are played well.

    Args:
        low, high, window, every, across_tasks: as in :class:`ReturnProgress`. A goal of half field is 5.

    Example:
        >>> progress = MeanReturn(low=0.0, high=5.0, every=2)
        >>> [progress.episode(0, value) for value in (0.0, 5.0, 5.0, 0.0)]
        [None, 0.5, None, 0.5]
    """

    def signal(self, returns: list[float]) -> float:
        """Returns the mean of the returns, as a share of the range from ``low`` to ``high``."""
        return (math.fsum(returns) / len(returns) - self.low) / (self.high - self.low)


@rebuildable
class ReturnChange(ReturnProgress):
    """Change of the returns of a task: ``|newer mean - older mean| / (high - low)``, clipped to [0, 1].

    The means cover the newer and the older half of the window. The middle one of an odd number of returns
    counts in neither. A task that is mastered, or out of reach, has signal 0, so a scheduler prefers tasks that are
    being learned or forgotten.

    Args:
        low, high, window, every, across_tasks: as in :class:`ReturnProgress`. From ``low`` to ``high`` is the signal 1.

    Example:
        >>> progress = ReturnChange(low=0.0, high=5.0, window=4, every=4)
        >>> [progress.episode(0, value) for value in (0.0, 0.0, 0.0, 5.0)]
        [None, None, None, 0.5]
    """

    least_episodes = 2

    def signal(self, returns: list[float]) -> float:
        """Returns the change between the halves of the returns, as a share of the range from ``low`` to ``high``."""
        half = len(returns) // 2
        return abs(math.fsum(returns[-half:]) - math.fsum(returns[:half])) / half / (self.high - self.low)


class _StagedScheduler(Scheduler):
    """Spreads the actors evenly over the tasks played now. Batches come from one table of all rows."""

    shares_one_table = True

    @abstractmethod
    def _played(self) -> list[int]:
        """Returns the tasks played now, the hardest first."""

    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        """Returns equal probabilities of the tasks played now, float64 ``[N]``, 0 for the others."""
        shares = np.zeros(len(self.tasks))
        played = self._played()
        shares[played] = 1.0 / len(played)
        return among_ready(shares, ready)

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the task of each actor, in turn among the tasks played now."""
        return self._in_turn(self._played(), num_actors)


@rebuildable
class OneTask(_StagedScheduler):
    """No curriculum: every actor plays one task. The paper's baseline DB.

    Args:
        task: Name of the task.

    Example:
        >>> scheduler = OneTask("target")
        >>> scheduler.start(["near", "target"])
        >>> scheduler.actor_tasks(3)
        [1, 1, 1]
    """

    def __init__(self, task: str = "target") -> None:
        super().__init__()
        check_kind("task", task, str, "the name of a task")
        self.task = task
        self._required = ("task", [task])

    def _played(self) -> list[int]:
        return [self.index_of(self.task)]


@rebuildable
class EasyToHard(_StagedScheduler):
    """All actors play the task of the current stage. The next stage begins when it is played well enough.

    A stage ends with the first progress signal of its task that reaches ``advance_at``, or with its ``max_signals``-th
    signal. Signals of other tasks are ignored. The last stage never ends. The paper's baseline DBC. The paper does not
    state when a stage ends.

    Args:
        order: Names of the tasks, easiest first. Tasks left out are not played.
        advance_at: Progress at which a stage ends, above 0, at most 1.
        max_signals: Number of signals after which a stage ends in any case. ``None`` waits for ``advance_at`` without
            limit.

    Attributes:
        stage: position in ``order``, from 0.

    Example:
        >>> scheduler = EasyToHard(order=["near", "far", "target"], advance_at=0.8)
        >>> scheduler.start(["target", "far", "near"])
        >>> scheduler.progress(2, 0.9)
        >>> scheduler.stage, scheduler.actor_tasks(4)
        (1, [1, 1, 1, 1])
    """

    saved_attributes: tuple[str, ...] = ("tasks", "order", "stage", "_signals_in_stage")

    def __init__(self, order: Sequence[str], advance_at: float = 0.8, max_signals: int | None = None) -> None:
        super().__init__()
        self.order: tuple[str, ...] = tuple(checked_names("order", order, "task"))
        self._required = ("order", self.order)
        self.advance_at: float = checked_share("advance_at", advance_at, ABOVE_ZERO)
        self.max_signals: int | None = None if max_signals is None else checked_count("max_signals", max_signals)
        self.stage: int = 0
        self._signals_in_stage = 0

    def progress(self, task: int, value: float) -> None:
        """Begins the next stage if the signal ends the present one. Ignores signals of other tasks."""
        super().progress(task, value)
        if self.stage + 1 == len(self.order) or self.tasks[task] != self.order[self.stage]:
            return
        self._signals_in_stage += 1
        if value >= self.advance_at or self._signals_in_stage == self.max_signals:
            self.stage += 1
            self._signals_in_stage = 0

    def _played(self) -> list[int]:
        return [self.index_of(self.order[self.stage])]


@rebuildable
class ReverseCurriculum(EasyToHard):
    """Spreads the actors over all tasks up to the current stage, otherwise like :class:`EasyToHard`.

    The buffer therefore keeps receiving easy episodes. The paper's baseline DRC.

    Example:
        >>> scheduler = ReverseCurriculum(order=["near", "far", "target"])
        >>> scheduler.start(["target", "far", "near"])
        >>> scheduler.progress(2, 0.9)
        >>> scheduler.actor_tasks(4)
        [1, 2, 1, 2]
    """

    def _played(self) -> list[int]:
        return [self.index_of(name) for name in reversed(self.order[: self.stage + 1])]
