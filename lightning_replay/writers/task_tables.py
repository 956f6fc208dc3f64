# SPDX-License-Identifier: Apache-2.0
"""Writing each row into the table of its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.parts import Insertion
from lightning_replay.saving.spec import recorded
from lightning_replay.storage.stored_column import as_array
from lightning_replay.storage.transition_check import Column
from lightning_replay.tables.tables import Tables
from lightning_replay.validation import check_kind, checked_count, checked_flag
from lightning_replay.writers.announcement import announce, chosen
from lightning_replay.writers.table_writer import TableWriter

SHARED_TABLE = "all tasks"


@recorded
class TaskTableWriter(TableWriter):
    """Writes each row into the table of its task; in each the oldest leave. Needs no feedback.

    Rows carry ``task``, int64 ``[N]``, an index into ``tasks``. One replay buffer for each task is the memory of
    Distributed Parallel Curriculum Experience Replay (DPCER; Li and Ji 2021,
    https://openreview.net/forum?id=EiW3FLYBiP).

    Args:
        tasks: their names.
        capacity_per_task: most rows kept of each.
        shares_one_table: keep all tasks in one table of ``len(tasks) * capacity_per_task`` rows, as the baselines do.

    Raises:
        ValueError: no tasks, or a name that is taken twice.
    """

    def __init__(self, tasks: Sequence[str], capacity_per_task: int, shares_one_table: bool = False) -> None:
        check_tasks(tasks)
        self.tasks: list[str] = list(tasks)
        capacity_per_task = checked_count("capacity_per_task", capacity_per_task, of="transitions")
        self._shares_one_table = checked_flag("shares_one_table", shares_one_table)
        self._columns: Mapping[Any, Any] | None = None  # those in which the task is at the place _task_at
        self._task_at = -1
        everything = {SHARED_TABLE: capacity_per_task * len(tasks)}
        super().__init__(Tables(everything if shares_one_table else dict.fromkeys(tasks, capacity_per_task)))

    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes transitions ``[N]``, oldest first; see :meth:`insert`, whose slots it returns."""
        return self.insert(data).slots

    def insert(self, data: TensorDictBase) -> Insertion:
        """Writes transitions ``[N]``, oldest first.

        Returns:
            The slots of the rows that are stored afterwards, in the order of the rows, and these rows.

        Raises:
            ValueError: rows without ``task`` or of a task that does not exist, or that do not fit the rows stored
                before. Nothing is stored then.
        """
        return self.insert_columns(self._storage.checked_values(data), data)

    def insert_columns(self, columns: Sequence[Column], rows: Any) -> Insertion:
        task, storage = self._tasks_of(columns), self._storage
        count, at_once = len(task), storage.rows_at_once
        table = np.zeros_like(task) if self._shares_one_table else task
        slots = self.tables.try_append_new(table) if count <= at_once else None
        if slots is not None:
            index = self.write(slots, columns)
            inserted = Insertion(index, slice(0, count))
            for buffer in storage._attached_entities:
                buffer.mark_update(index)
        else:  # more rows than fit a table, or more frames than are free
            kept = self._kept(table)
            table, columns = table[kept], chosen(columns, kept)
            slots = np.empty(len(table), dtype=np.int64)
            for start in range(0, len(table), at_once):
                part = slice(start, start + at_once)
                slots[part] = self.tables.append_new_to_each(table[part])
                self.write(slots[part], [column[part] for column in columns])
            # Of rows written part by part, those that did not leave to make room for later ones.
            is_last = np.zeros(len(table), dtype=np.bool_)
            is_last[len(table) - 1 - np.unique(slots[::-1], return_index=True)[1]] = True
            stayed = is_last & (self.tables.pool.references[slots] > 0)
            slots, kept = slots[stayed], kept[stayed]
            index = torch.from_numpy(slots).to(storage.device)
            inserted = Insertion(index, torch.from_numpy(kept))
            announce(storage, index, kept, rows, count)
        self._write_count += count
        return inserted

    def _kept(self, table: np.ndarray) -> np.ndarray:
        """Returns the rows that are written, int64 ascending: of more than a table's capacity, the last ones."""
        capacities = self.tables.capacity
        if (np.bincount(table, minlength=len(capacities)) <= capacities).all():
            return np.arange(len(table))
        kept = [np.flatnonzero(table == number)[-int(most) :] for number, most in enumerate(capacities)]
        return np.sort(np.concatenate(kept))

    def _tasks_of(self, columns: Sequence[Column]) -> np.ndarray:
        """Returns the task of each row, int64 ``[N]``; raises ``ValueError`` where there is none."""
        stored = self._storage.row_columns
        if self._columns is not stored:
            dtype, shape = stored.get(("task",), (None, torch.Size()))
            if dtype != torch.int64 or shape.numel() != 1:
                given = "no such column" if dtype is None else f"{dtype} {list(shape)} for each row"
                raise ValueError(
                    f"the transitions need a column 'task', int64 [N], an index into {self.tasks}; got {given}. "
                    "Nothing was stored"
                )
            self._columns, self._task_at = stored, list(stored).index(("task",))
        task = np.ascontiguousarray(as_array(columns[self._task_at]).reshape(-1))
        if task.min() < 0 or task.max() >= len(self.tasks):
            unknown = np.unique(task[(task < 0) | (task >= len(self.tasks))])
            raise ValueError(
                f"the column 'task' holds {unknown.tolist()}; tasks are numbered 0..{len(self.tasks) - 1}, "
                f"{self.tasks}. Nothing was stored"
            )
        return task


def check_tasks(tasks: Sequence[str]) -> None:
    """Raises ``TypeError`` for no sequence of names, ``ValueError`` for none or a name that is taken twice."""
    check_kind("tasks", tasks, Sequence, "the names of the tasks, as ['hard', 'easy']")
    for place, name in enumerate(tasks):
        check_kind(f"tasks[{place}]", name, str, "the name of a task")
    twice = sorted({name for name in tasks if list(tasks).count(name) > 1})
    if isinstance(tasks, str) or not tasks or twice:
        raise ValueError(f"tasks is {tasks!r}; at least one name is needed, and each once")
