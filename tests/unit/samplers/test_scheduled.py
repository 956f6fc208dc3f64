# SPDX-License-Identifier: Apache-2.0
"""Batches of one task at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_replay.samplers.tables import ScheduledSampler
from lightning_replay.schedulers import EasyToHard, Exp3, OneTask, UniformTasks
from lightning_replay.tables.tables import Tables

TASKS = ["target", "far", "near"]


def tables_of_lengths(*lengths: int) -> Tables:
    tables = Tables(dict.fromkeys(TASKS, 10))
    tables.append_new_to_each(np.repeat(np.arange(3), lengths))
    return tables


def test_tasks_with_too_few_rows_are_left_out() -> None:
    sampler = ScheduledSampler(TASKS, Exp3(), min_size=3, seed=0)
    rows = np.stack([sampler.rows_of_tables(tables_of_lengths(2, 3, 9), 8)[0] for _ in range(40)])
    assert not rows[:, 0].any() and rows[:, 1].any() and rows[:, 2].any()
    assert sampler.ready(tables_of_lengths(2, 3, 9)).tolist() == [False, True, True]


def test_the_scheduler_is_told_which_task_was_drawn_and_with_which_probability() -> None:
    """Only near is ready, so it is drawn with certainty; the signal 1 then multiplies its weight by exp(0.3 / 3)."""
    sampler = ScheduledSampler(TASKS, Exp3(exploration=0.3), min_size=3, seed=0)
    sampler.rows_of_tables(tables_of_lengths(0, 0, 9), 8)
    sampler.scheduler.progress(2, 1.0)
    np.testing.assert_allclose(sampler.scheduler.log_weights, [-0.1, -0.1, 0.0])


def test_the_probability_told_is_the_one_among_the_ready() -> None:
    """Two of three are ready: whichever is drawn was drawn with 1/2, and a signal of 1 adds 0.3 / (3/2)."""
    sampler = ScheduledSampler(TASKS, Exp3(exploration=0.3), min_size=3, seed=0)
    drawn = int(sampler.rows_of_tables(tables_of_lengths(0, 9, 9), 8)[0].argmax())
    sampler.scheduler.progress(drawn, 1.0)
    assert np.ptp(sampler.scheduler.log_weights) == pytest.approx(0.2)


def test_the_scheduler_is_a_copy_of_the_one_given() -> None:
    given = Exp3()
    first, second = ScheduledSampler(TASKS, given), ScheduledSampler(TASKS, given)
    first.scheduler.drawn(0, 0.5)
    first.scheduler.progress(0, 1.0)
    assert given.tasks == () and not second.scheduler.log_weights.any()
    assert first.scheduler.log_weights.any()


@pytest.mark.parametrize("scheduler", [OneTask("far"), EasyToHard(order=["near", "far", "target"])])
def test_baselines_draw_from_the_one_table_of_all_tasks(scheduler) -> None:
    tables = Tables({"all tasks": 10})
    sampler = ScheduledSampler(TASKS, scheduler, min_size=4, seed=0)
    tables.append_new_to_each(np.zeros(3, dtype=np.int64))
    with pytest.raises(RuntimeError, match=r"holds 4 rows; there are \{'all tasks': 3\}.*Collect more steps"):
        sampler.rows_of_tables(tables, 8)
    tables.append_new_to_each(np.zeros(1, dtype=np.int64))
    assert sampler.ready(tables).tolist() == [True] * 3
    assert sampler.rows_of_tables(tables, 8)[0].tolist() == [8]


def test_no_ready_task_is_refused() -> None:
    sampler = ScheduledSampler(TASKS, UniformTasks(), min_size=6)
    with pytest.raises(RuntimeError, match=r"holds 6 rows.*'target': 5, 'far': 0, 'near': 1.*lower min_size"):
        sampler.rows_of_tables(tables_of_lengths(5, 0, 1), 8)


def test_torchrls_generator_is_taken() -> None:
    sampler = ScheduledSampler(TASKS, UniformTasks(), seed=0)
    sampler._rng = torch.Generator().manual_seed(5)
    other = ScheduledSampler(TASKS, UniformTasks(), seed=5)
    tables = tables_of_lengths(5, 5, 5)
    assert all((sampler.rows_of_tables(tables, 1)[0] == other.rows_of_tables(tables, 1)[0]).all() for _ in range(10))
