# SPDX-License-Identifier: Apache-2.0
"""Baselines of the parallel curriculum: one task only, and stages from easy to hard."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_replay.saving.spec import recorded
from lightning_replay.schedulers.scheduler import Scheduler, among_ready
from lightning_replay.validation import ABOVE_ZERO, check_kind, checked_count, checked_entries, checked_share


class _StagedScheduler(Scheduler):
    """Spreads the actors evenly over the tasks played now; batches come from one table of all rows."""

    shares_one_table = True

    @abstractmethod
    def _played(self) -> list[int]:
        """Returns the tasks played now, the hardest first."""

    def probabilities(self, ready: np.ndarray) -> np.ndarray:
        """Returns the shares of the actors among the tasks played now."""
        shares, played = np.zeros(len(self.tasks)), self._played()
        shares[played] = 1.0 / len(played)
        return among_ready(shares, ready)

    def actor_tasks(self, num_actors: int) -> list[int]:
        """Returns the tasks played now in turn, the hardest of them first."""
        return self._in_turn(self._played(), num_actors)


@recorded
class OneTask(_StagedScheduler):
    """No curriculum: every actor plays one task. The paper's baseline DB.

    Args:
        task: its name.

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


@recorded
class EasyToHard(_StagedScheduler):
    """All actors play the task of the current stage; the next stage begins when it is played well enough.

    A stage ends with the first progress signal of its task that reaches ``advance_at``, or with its ``max_signals``-th
    signal. Signals of other tasks are ignored; the last stage never ends. The paper's baseline DBC; the paper does not
    state when a stage ends.

    Args:
        order: names of the tasks, easiest first. Tasks left out are not played.
        advance_at: progress at which a stage ends; above 0, at most 1.
        max_signals: signals after which a stage ends in any case; ``None`` waits for ``advance_at`` without limit.

    Attributes:
        stage: position in ``order``, from 0.

    Raises:
        ValueError: ``order`` is empty or names a task twice, ``advance_at`` is outside (0, 1], or ``max_signals`` is
            below 1.

    Example:
        >>> scheduler = EasyToHard(order=["near", "far", "target"], advance_at=0.8)
        >>> scheduler.start(["target", "far", "near"])
        >>> scheduler.progress(2, 0.9)
        >>> scheduler.stage, scheduler.actor_tasks(4)
        (1, [1, 1, 1, 1])
    """

    def __init__(self, order: Sequence[str], advance_at: float = 0.8, max_signals: int | None = None) -> None:
        super().__init__()
        self.order: tuple[Any, ...] = tuple(
            checked_entries("order", order, "the names of the tasks from easy to hard, each once")
        )
        if not self.order or len(set(self.order)) < len(self.order):
            raise ValueError(f"order is {order!r}; give the names of the tasks from easy to hard, each once")
        self._required = ("order", self.order)
        self.advance_at: float = checked_share("advance_at", advance_at, ABOVE_ZERO)
        self.max_signals: int | None = None if max_signals is None else checked_count("max_signals", max_signals)
        self.stage: int = 0
        self._signals_in_stage = 0

    def progress(self, task: int, value: float) -> None:
        """Ends the stage if the signal is of its task and reaches ``advance_at``, or is its last one."""
        super().progress(task, value)
        if self.stage + 1 == len(self.order) or self.tasks[task] != self.order[self.stage]:
            return
        self._signals_in_stage += 1
        if value >= self.advance_at or self._signals_in_stage == self.max_signals:
            self.stage += 1
            self._signals_in_stage = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the order, the stage, and the number of its signals so far."""
        stage = {"order": list(self.order), "stage": self.stage, "signals_in_stage": self._signals_in_stage}
        return super().state_dict() | stage

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: the state was saved with other tasks or another order.
        """
        super().load_state_dict(state)
        if list(state["order"]) != list(self.order):
            raise ValueError(
                f"the state was saved with the order {list(state['order'])}, this one is {list(self.order)}; give the "
                "former"
            )
        self.stage = int(state["stage"])
        self._signals_in_stage = int(state["signals_in_stage"])

    def _played(self) -> list[int]:
        return [self.index_of(self.order[self.stage])]


@recorded
class ReverseCurriculum(EasyToHard):
    """Spreads the actors over all tasks up to the current stage, otherwise like :class:`EasyToHard`.

    The buffer therefore keeps receiving easy episodes. The paper's baseline DRC.

    Args:
        order: as in :class:`EasyToHard`.
        advance_at: as in :class:`EasyToHard`.
        max_signals: as in :class:`EasyToHard`.

    Example:
        >>> scheduler = ReverseCurriculum(order=["near", "far", "target"])
        >>> scheduler.start(["target", "far", "near"])
        >>> scheduler.progress(2, 0.9)
        >>> scheduler.actor_tasks(4)
        [1, 2, 1, 2]
    """

    def _played(self) -> list[int]:
        return [self.index_of(name) for name in reversed(self.order[: self.stage + 1])]
