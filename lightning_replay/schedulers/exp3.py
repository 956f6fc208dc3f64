# SPDX-License-Identifier: Apache-2.0
"""Adversarial bandits as schedulers: tasks with higher progress signals are drawn more often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_replay.saving.spec import recorded
from lightning_replay.schedulers.scheduler import Scheduler, among_ready
from lightning_replay.validation import ABOVE_ZERO, checked_number, checked_share


@recorded
class Exp3(Scheduler):
    """Draws task i with probability ``(1 - exploration) * w[i] / sum(w) + exploration / N``.

    A progress signal r of task i, drawn with probability p, multiplies its weight by
    ``exp(exploration * r / (p * N))``. Weights are kept as logarithms, so they never overflow. Distributed Parallel
    Curriculum Experience Replay, equations 4a to 4c; Auer et al. 2002, https://doi.org/10.1137/S0097539701398375.

    Each signal causes one update. It is applied at once if its task was drawn since the task's last update, with the
    probability of the last draw; otherwise it is kept for the next draw of the task, and a newer signal replaces it.
    (Updating at every learner step instead saturates on the first task with a positive signal.)

    Weights do not decay: the task that has positive signals first, usually an easy one, keeps the largest weight, and
    the target falls towards ``exploration / N``. :class:`Exp3S`, or :class:`ReturnChange` as signal, corrects that.

    Args:
        exploration: γ, the share of probability spread evenly over the tasks; in (0, 1], 1 draws uniformly.

    Attributes:
        log_weights: float64 ``[N]``, the greatest is 0.

    Raises:
        ValueError: ``exploration`` is outside (0, 1].

    Example:
        >>> scheduler = Exp3(exploration=0.1)
        >>> scheduler.start(["target", "far", "near", "goal_mouth"])
        >>> scheduler.drawn(0, probability=0.25)
        >>> scheduler.progress(0, 1.0)
        >>> scheduler.probabilities(np.ones(4, dtype=bool)).round(4)
        array([0.2673, 0.2442, 0.2442, 0.2442])
    """

    def __init__(self, exploration: float = 0.1) -> None:
        super().__init__()
        self.exploration: float = checked_share("exploration", exploration, ABOVE_ZERO)
        self.log_weights: np.ndarray = np.zeros(0)
        self._drawn_with: list[float | None] = []
        self._waiting: list[float | None] = []

    def start(self, tasks: Sequence[str]) -> None:
        """Sets the tasks and gives each the same weight."""
        super().start(tasks)
        self.log_weights = np.zeros(len(self.tasks))
        self._drawn_with = [None] * len(self.tasks)
        self._waiting = [None] * len(self.tasks)

    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        """Computes equation 4a, renormalised over the ready tasks."""
        self._check_started()
        weights = np.exp(self.log_weights - self.log_weights.max())
        chosen = (1.0 - self.exploration) * weights / weights.sum()
        return among_ready(chosen + self.exploration / len(self.tasks), ready)

    def drawn(self, task: int, probability: float) -> None:
        """Applies the pending signal of a task; if it has none, stores the probability."""
        super().drawn(task, probability)
        waiting, self._waiting[task] = self._waiting[task], None
        if waiting is None:
            self._drawn_with[task] = float(probability)
        else:
            self.update(task, waiting, probability)

    def progress(self, task: int, value: float) -> None:
        """Applies the signal if its task was drawn since its last update; otherwise keeps it for the next draw."""
        super().progress(task, value)
        probability, self._drawn_with[task] = self._drawn_with[task], None
        if probability is None:
            self._waiting[task] = float(value)
        else:
            self.update(task, value, probability)

    def update(self, task: int, profit: float, probability: float) -> None:
        """Computes ``w[task] *= exp(exploration * profit / (probability * N))``.

        Args:
            task: the task the batch was drawn from.
            profit: r, any finite number; the guarantees of the method need one in [0, 1].
            probability: p of that draw, before this update.
        """
        self._check_task(task)
        self.log_weights[task] += self._gain(profit, probability)
        self._normalize()

    def state_dict(self) -> dict[str, Any]:
        """Returns the weights, the pending signals and the probabilities of draws without a signal yet."""
        return {
            **super().state_dict(),
            "log_weights": self.log_weights.tolist(),
            "drawn_with": list(self._drawn_with),
            "waiting": list(self._waiting),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        super().load_state_dict(state)
        self.log_weights = np.array(state["log_weights"], dtype=np.float64)
        self._drawn_with = list(state["drawn_with"])
        self._waiting = list(state["waiting"])

    def _gain(self, profit: float, probability: float) -> float:
        checked_number("profit", profit)
        checked_share("probability", probability, ABOVE_ZERO)
        return self.exploration * profit / (probability * len(self.tasks))

    def _normalize(self) -> None:
        # Only differences matter. With a maximum of 0, weights cannot grow until a gain is lost in rounding.
        self.log_weights -= self.log_weights.max()


@recorded
class Exp3S(Exp3):
    """:class:`Exp3` in which every update also gives each task the share ``e * weight_sharing / N`` of all weights.

    This bounds the ratios of weights, so that the scheduler adapts when the signals of another task rise: a difference
    without new signals decays over about ``1 / weight_sharing`` updates. Auer et al. 2002, section 8,
    https://doi.org/10.1137/S0097539701398375.

    Args:
        exploration: γ, as in :class:`Exp3`.
        weight_sharing: α, in (0, 1]; about one over the number of updates in which signals change. Give well below
            ``exploration / N``; otherwise the weights stay nearly equal. For none, use :class:`Exp3`.

    Raises:
        ValueError: ``exploration`` or ``weight_sharing`` is outside (0, 1].

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
        self.weight_sharing: float = checked_number(
            "weight_sharing", weight_sharing, ABOVE_ZERO, 1.0, accepted=accepted
        )

    def update(self, task: int, profit: float, probability: float) -> None:
        """Computes the update of :class:`Exp3`, then ``w += e * weight_sharing / N * sum(w before)``."""
        self._check_task(task)
        gain = self._gain(profit, probability)
        shared = np.logaddexp.reduce(self.log_weights) + 1.0 + math.log(self.weight_sharing / len(self.tasks))
        self.log_weights[task] += gain
        self.log_weights: np.ndarray = np.logaddexp(self.log_weights, shared)
        self._normalize()
