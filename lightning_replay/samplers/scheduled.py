# SPDX-License-Identifier: Apache-2.0
"""Every batch from one table, chosen by a scheduler."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_replay.draw_parts import GroupRows
from lightning_replay.samplers.table_sampler import SummedTables, WithinTables
from lightning_replay.saving.spec import recorded
from lightning_replay.schedulers import Scheduler
from lightning_replay.schedulers.scheduler import checked_probabilities
from lightning_replay.schedules import Schedule
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import check_kind, checked_count, checked_entries


@recorded
class ScheduledSampler(WithinTables):
    """Draws a whole batch from the table of one task, which the scheduler chooses for every batch.

    Tasks with fewer than ``min_size`` rows are left out and the others renormalised. Distributed Parallel Curriculum
    Experience Replay (DPCER; Li and Ji 2021, https://openreview.net/forum?id=EiW3FLYBiP), Algorithm 2: learner.

    Args:
        tasks: names, in the order of the column ``task``.
        scheduler: chooses the task. It is copied; give draws and progress to ``scheduler``, the copy.
        min_size: rows that a task must hold to be drawn from.
        priority_exponent, importance_exponent, priority_offset, seed: as
            :class:`~lightning_replay.samplers.table_sampler.WithinTables`.

    Sampled keys:
        index: int64 ``[B]``.
        priority_weight: float32 ``[B]``, with priorities.

    Raises:
        ValueError: ``min_size`` is not positive, or the scheduler refuses the tasks.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        scheduler: Scheduler,
        min_size: int = 1,
        priority_exponent: float = 0.0,
        importance_exponent: float | Schedule = 0.4,
        priority_offset: float = 1e-6,
        seed: int | None = None,
    ) -> None:
        super().__init__(priority_exponent, importance_exponent, priority_offset, seed)
        check_kind("scheduler", scheduler, Scheduler, "an object of lightning_replay.schedulers, such as Exp3()")
        self.tasks: list[Any] = checked_entries("tasks", tasks, "the names of the tasks, as ['hard', 'easy']")
        self.scheduler: Scheduler = copy.deepcopy(scheduler)
        self.min_size: int = checked_count("min_size", min_size, of="rows")
        self.scheduler.start(self.tasks)

    def ready(self, tables: Tables | SummedTables) -> np.ndarray:
        if self.scheduler.shares_one_table:
            return np.full(len(self.tasks), bool(tables.length[0] >= self.min_size))
        return tables.length >= self.min_size

    def rows_of_tables(self, tables: Tables | SummedTables, batch_size: int) -> GroupRows:
        """Returns all ``batch_size`` rows for the task drawn with the scheduler's probabilities."""
        rows = np.zeros(len(tables.names), dtype=np.int64)
        ready = self.ready(tables)
        probability = checked_probabilities(self.scheduler, ready)
        cumulative = list(itertools.accumulate(probability.tolist()))
        if not cumulative[-1]:
            raise RuntimeError(
                f"no task that the scheduler may choose holds {self.min_size} rows; there are "
                f"{dict(zip(tables.names, tables.length.tolist(), strict=True))}. Collect more steps before the first "
                "draw, or lower min_size"
            )
        uniform = float(self._uniform(1)[0])
        task = bisect.bisect_right(cumulative, uniform * cumulative[-1])
        rows[0 if self.scheduler.shares_one_table else task] = batch_size
        self.scheduler.drawn(task, float(probability[task]))
        return GroupRows(rows, rows / batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Returns what :class:`~lightning_replay.samplers.table_sampler.WithinTables` saves, and the scheduler."""
        kind = type(self.scheduler).__name__
        return super().state_dict() | {"scheduler": self.scheduler.state_dict(), "scheduler_class": kind}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: the state of another scheduler.
        """
        saved, kind = state_dict["scheduler_class"], type(self.scheduler).__name__
        if saved != kind:
            raise ValueError(f"the saved scheduler is {saved}, here it is {kind}; build it with {saved}")
        super().load_state_dict(state_dict)
        self.scheduler.load_state_dict(state_dict["scheduler"])

    def __repr__(self) -> str:
        return f"ScheduledSampler({self.tasks}, scheduler={type(self.scheduler).__name__})"
