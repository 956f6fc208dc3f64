# SPDX-License-Identifier: Apache-2.0
"""One table for each task: which rows stay where, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.samplers import PrioritizedSampler, RandomPairSampler, UniformSampler
from lightning_replay.samplers.tables import ScheduledSampler
from lightning_replay.schedulers import UniformTasks
from lightning_replay.table_replay import CurriculumReplay
from lightning_replay.writers.tables import EventTableWriter, TaskTableWriter
from tests.transitions import numbered_steps, task_steps

TASKS = ["target", "far", "near"]


def curriculum(**options) -> CurriculumReplay:
    return recipes.parallel_curriculum(TASKS, **{"capacity_per_task": 3, "batch_size": 2, "seed": 0} | options)


def contents(replay: CurriculumReplay) -> dict[str, list[int]]:
    return {name: replay.table(name)["observation"][:, 0].int().tolist() for name in replay.tables.names}


def test_each_task_has_a_table_that_its_oldest_rows_leave() -> None:
    """Capacity 3; rows numbered in order, by task t f n::

    t f f t f        target 0 3      far 1 2 4      near
    f n t t          target 3 7 8    far 2 4 5      near 6
    """
    replay = curriculum()
    assert len(replay.extend(task_steps([0, 1, 1, 0, 1]))) == 5
    assert contents(replay) == {"target": [0, 3], "far": [1, 2, 4], "near": []}
    replay.extend(task_steps([1, 2, 0, 0], first=5))
    assert contents(replay) == {"target": [3, 7, 8], "far": [2, 4, 5], "near": [6]}
    assert len(replay) == 7 and replay.capacity == 9


def test_the_slots_are_those_of_the_rows_that_stayed_in_their_order() -> None:
    replay = curriculum()
    index = replay.extend(task_steps([1, 0, 1, 1, 1, 0, 1]))
    assert replay.storage.get(index)["observation"][:, 0].tolist() == [1, 3, 4, 5, 6]
    assert contents(replay) == {"target": [1, 5], "far": [3, 4, 6], "near": []}


def test_td_errors_reach_the_rows_that_stayed() -> None:
    """Row 0 of task 1 leaves at once, so that the priorities kept are not the last ones given."""
    replay = curriculum(priority_exponent=1.0, priority_offset=0.0)
    rows = task_steps([1, 0, 1, 1, 1])
    rows["td_error"] = torch.arange(5.0)
    index = replay.extend(rows)
    assert replay.sampler.priority_of(index).tolist() == [1, 2, 3, 4]
    assert replay.storage.get(index)["observation"][:, 0].tolist() == [1, 2, 3, 4]
    rows = task_steps([1, 1, 1, 0, 1])
    rows["td_error"] = torch.arange(5.0)
    index = replay.extend(rows)
    assert replay.sampler.priority_of(index).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "got no such column"),
        (torch.zeros(4, dtype=torch.int32), r"int64 \[N\].*got torch.int32 \[\]"),
        (torch.zeros(4, 2, dtype=torch.int64), r"got torch.int64 \[2\]"),
        (torch.tensor([0, 3, -1, 7]), r"holds \[-1, 3, 7\]; tasks are numbered 0..2, \['target', 'far', 'near'\]"),
    ],
)
def test_a_bad_task_column_is_refused_and_nothing_is_stored(column, message: str) -> None:
    replay = curriculum()
    rows = numbered_steps(1, 4)
    if column is not None:
        rows["task"] = column
    with pytest.raises(ValueError, match=message + ".*Nothing was stored"):
        replay.extend(rows)
    assert len(replay) == 0 and replay.nbytes == curriculum().nbytes


def test_a_task_column_of_one_number_a_row_is_taken() -> None:
    replay = curriculum()
    rows = numbered_steps(0, 3)
    rows["task"] = torch.tensor([[2], [0], [2]])
    replay.extend(rows)
    assert contents(replay) == {"target": [1], "far": [], "near": [0, 2]}


@pytest.mark.parametrize("tasks", [[], "target", ["target", "far", "target"]])
def test_tasks_that_cannot_be_told_apart_are_refused(tasks) -> None:
    with pytest.raises((TypeError, ValueError), match="tasks is .*; it must be .*the names of tasks"):
        TaskTableWriter(tasks, 3)


@pytest.mark.parametrize("sampler", [UniformSampler, RandomSampler, lambda: PrioritizedSampler(9), RandomPairSampler])
@pytest.mark.parametrize("kind", ["tasks", "events"])
def test_samplers_that_do_not_draw_from_tables_are_refused(sampler, kind: str) -> None:
    table = EventTable("goal", reward_at_least(1.0), history_length=1, capacity=3)
    writer = TaskTableWriter(TASKS, 3) if kind == "tasks" else EventTableWriter(6, [table])
    for buffer in (Replay, TensorDictReplayBuffer):
        with pytest.raises(TypeError, match=f"would draw slots that no table of {type(writer).__name__}.*TableShares"):
            buffer(storage=PackedStorage(writer.num_slots), writer=writer, sampler=sampler(), batch_size=2)


def test_it_writes_into_a_storage_of_enough_rows() -> None:
    sampler = ScheduledSampler(TASKS, UniformTasks())
    with pytest.raises(TypeError, match=r"TaskTableWriter got a LazyTensorStorage with ndim=2.*PackedStorage\(9\)"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(9, ndim=2), writer=TaskTableWriter(TASKS, 3), sampler=sampler)
    with pytest.raises(ValueError, match="has 8 rows and TaskTableWriter needs 9"):
        Replay(storage=PackedStorage(8), writer=TaskTableWriter(TASKS, 3), sampler=sampler, batch_size=2)


def test_ages_count_transitions_of_every_task() -> None:
    replay = curriculum()
    index = replay.extend(task_steps([0, 1, 1, 2]))
    assert replay.writer.age_of(index).tolist() == [3, 2, 1, 0]
    replay.extend(task_steps([0], first=4))
    assert replay.writer.age_of(index).tolist() == [4, 3, 2, 1]


def test_a_wrapped_call_writes_each_row_into_its_own_slot() -> None:
    """Slots become free out of order, so that rows of one call lie in slots that do not follow each other."""
    replay, rng = curriculum(), np.random.default_rng(0)
    for first in range(0, 300, 3):
        index = replay.extend(task_steps(rng.integers(0, 3, 3).tolist(), first))
        assert replay.storage.get(index)["observation"][:, 0].tolist() == [first, first + 1, first + 2]
