# SPDX-License-Identifier: Apache-2.0
"""A buffer with a table for each task: batches of one task, progress, probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_replay import PackedStorage, recipes
from lightning_replay.samplers import RandomPairSampler, ScheduledSampler
from lightning_replay.samplers.tables import TableShares
from lightning_replay.schedulers import Exp3, OneTask, UniformTasks
from lightning_replay.table_replay import CurriculumReplay
from lightning_replay.writers.tables import TaskTableWriter
from tests.transitions import connected, task_steps

TASKS = ["target", "far", "near"]


def curriculum(**options) -> CurriculumReplay:
    return recipes.parallel_curriculum(
        TASKS, **{"capacity_per_task": 6, "batch_size": 4, "min_size": 2, "seed": 0} | options
    )


class Answers(UniformTasks):
    """A user's scheduler that answers with whatever it is told to."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def probabilities(self, ready):
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [np.array([np.nan, 0.5, 0.5]), np.array([-1.0, 1.0, 1.0]), np.array([1.0, 0.5, 0.5]), np.array([0.5, 0.5]), None],
)
def test_what_a_scheduler_of_ones_own_answers_is_checked(answer) -> None:
    replay = curriculum(scheduler=Answers(answer))
    replay.extend(task_steps([0, 1, 2] * 4))
    for ask in (replay.sample, replay.probabilities):
        with pytest.raises(ValueError, match=r"Answers.probabilities returned .*float64 array \[3\].*of sum 1"):
            ask()


def test_the_state_of_another_scheduler_is_refused_and_nothing_is_changed() -> None:
    saved, other = curriculum(scheduler=Exp3()), curriculum(scheduler=UniformTasks())
    for replay in (saved, other):
        replay.extend(task_steps([0, 1, 2] * 4))
    with pytest.raises(ValueError, match="saved scheduler is Exp3, here it is UniformTasks"):
        other.load_state_dict(saved.state_dict())
    assert len(other) == 12


def test_batches_of_a_curriculum_are_of_one_task() -> None:
    replay = curriculum(scheduler=UniformTasks())
    assert replay.tasks == TASKS
    replay.extend(task_steps([0, 1, 2] * 4))
    tasks = [replay.sample()["task"].unique().tolist() for _ in range(40)]
    assert {tuple(task) for task in tasks} == {(0,), (1,), (2,)}
    tables = replay.stats()["tables"].values()
    shares = [table["share_drawn"] for table in tables if "event_share" not in table]
    assert sum(shares) == pytest.approx(1.0) and min(shares) > 0.1


def test_the_probabilities_by_name_leave_out_tasks_with_too_few_rows() -> None:
    replay = curriculum()
    assert replay.probabilities() == pytest.approx(dict.fromkeys(TASKS, 1 / 3)), "before any row: the scheduler's own"
    replay.extend(task_steps([0, 0, 1, 2, 2]))
    assert replay.probabilities() == {"target": 0.5, "far": 0.0, "near": 0.5}
    assert replay.actor_tasks(5) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_size": 7}, "min_size is 7 and a table holds 6 rows at most: it can never fill"),
        ({"scheduler": OneTask("gaol")}, "'gaol'"),
        ({"batch_size": 19}, "capacity 18 is below batch_size 19"),
    ],
)
def test_bad_options_of_a_curriculum_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        curriculum(**options)


def test_a_curriculum_needs_a_scheduler() -> None:
    writer = TaskTableWriter(TASKS, 4)
    shares = TableShares({"target": 0.5, "far": 0.5, "near": 0.0})
    replay = CurriculumReplay(storage=PackedStorage(12), writer=writer, sampler=shares, batch_size=2)
    with pytest.raises(TypeError, match="sampler is a TableShares; a curriculum needs a ScheduledSampler"):
        replay.probabilities()


def test_a_curriculum_may_be_drawn_from_in_pairs() -> None:
    first = ScheduledSampler(TASKS, UniformTasks(), min_size=2)
    sampler = RandomPairSampler(base_sampler=first, seed=0)
    replay = CurriculumReplay(
        storage=PackedStorage(12), writer=TaskTableWriter(TASKS, 4), sampler=sampler, batch_size=2
    )
    replay.extend(task_steps([0, 0, 1, 1, 2]))
    assert replay.sample()["observation"].shape[:2] == (2, 2)
    replay.progress("far", 1.0)
    assert replay.probabilities() == {"target": 0.5, "far": 0.5, "near": 0.0}


def returns(replay: CurriculumReplay) -> dict[int, tuple[float, int]]:
    """Of the row of each number that is drawn: the return, and over how many steps."""
    batch = torch.cat([replay.sample() for _ in range(40)])  # of one task each
    columns = (batch["observation"][:, 0], batch["next", "reward"].flatten(), batch["steps_to_next_obs"].flatten())
    return {
        int(number): (total, steps) for number, total, steps in zip(*map(torch.Tensor.tolist, columns), strict=True)
    }


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_returns_never_cross_a_row_that_was_dropped(at_once: int) -> None:
    """One stream of two tasks, of each of which the last 2 rows stay; rewards are the numbers, 3 steps, discount 1/2::

    task     t  f  f  f  t  t  t  f  |  t
    stays             3     5  6  7           3    5 + 6/2 + 7/4    6 + 7/2          7
    then              3        6  7     8     3                     6 + 7/2 + 8/4    7 + 8/2    8
    """
    replay = recipes.parallel_curriculum(["t", "f"], 2, 4, min_size=1, n_steps=3, discount=0.5, seed=0)
    rows = task_steps([0, 1, 1, 1, 0, 0, 0, 1])
    for start in range(0, 8, at_once):
        replay.extend(rows[start : start + at_once])
    assert returns(replay) == {3: (3.0, 1), 5: (9.75, 3), 6: (9.5, 2), 7: (7.0, 1)}
    replay.extend(task_steps([0], first=8))
    assert returns(replay) == {3: (3.0, 1), 6: (11.5, 3), 7: (11.0, 2), 8: (8.0, 1)}


def test_returns_of_episodes_side_by_side_never_cross_a_row_that_was_dropped() -> None:
    """Of the second task rows 0, 2 and 3 do not stay; row 3 lies in the middle of its episode::

    episode 7      1 t      3 f      5 t             1      5       then 7 t     5 + 7/2    7
    episode 8   0 f      2 f      4 f      6 f       4 + 6/2     6
    """
    replay = recipes.parallel_curriculum(["t", "f"], 2, 4, min_size=1, n_steps=3, discount=0.5, seed=0)
    rows = task_steps([1, 0, 1, 1, 1, 0, 1, 0])
    rows["trajectory"] = torch.tensor([8, 7, 8, 7, 8, 7, 8, 7])
    connected(rows)
    replay.extend(rows[:7])
    assert returns(replay) == {1: (1.0, 1), 4: (7.0, 2), 5: (5.0, 1), 6: (6.0, 1)}
    replay.extend(rows[7:])
    assert returns(replay) == {4: (7.0, 2), 5: (8.5, 2), 6: (6.0, 1), 7: (7.0, 1)}
