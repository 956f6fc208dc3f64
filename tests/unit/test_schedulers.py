# SPDX-License-Identifier: Apache-2.0
"""EXP3 against the fixture, EXP3.S and the stages by hand; when a signal is applied; every error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_replay import schedulers
from lightning_replay.saving.spec import build, describe

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "dpcer_exp3.json").read_text())
CASES = {case["name"]: case for case in FIXTURE["cases"]}
TASKS = ["target", "far", "near", "goal_mouth"]
EVERY_SCHEDULER = [
    schedulers.UniformTasks(),
    schedulers.Exp3(),
    schedulers.Exp3S(),
    schedulers.OneTask(),
    schedulers.EasyToHard(order=["goal_mouth", "near", "target"]),
    schedulers.ReverseCurriculum(order=["goal_mouth", "near", "target"], max_signals=3),
]


def started(scheduler: schedulers.Scheduler, tasks: list[str] = TASKS) -> Any:
    again = build(json.loads(json.dumps(describe(scheduler))))
    again.start(tasks)
    return again


def exp3_of(case: dict[str, Any]) -> schedulers.Exp3:
    return started(
        schedulers.Exp3(case["inputs"]["gamma"]), [f"task {number}" for number in range(case["inputs"]["buffers"])]
    )


def all_ready(scheduler: schedulers.Scheduler) -> np.ndarray:
    return scheduler.probabilities(np.ones(len(scheduler.tasks), dtype=bool))


def assert_close(actual: np.ndarray, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=FIXTURE["tolerance_abs"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "steps" in case.get("expected", {})])
def test_exp3_follows_the_fixture(name: str) -> None:
    case = CASES[name]
    scheduler = exp3_of(case)
    assert_close(all_ready(scheduler), case["expected"]["initial_probabilities"])
    for step, expected in zip(case["inputs"]["steps"], case["expected"]["steps"], strict=True):
        before = all_ready(scheduler)
        assert_close(before, expected["probabilities_before"])
        scheduler.update(step["chosen"], step["profit"], before[step["chosen"]])
        log_weights = np.array(expected["log_weights_after"])
        assert_close(scheduler.log_weights, log_weights - log_weights.max())
        assert_close(all_ready(scheduler), expected["probabilities_after"])


def test_twenty_thousand_wins_do_not_overflow_and_an_exploration_of_one_is_uniform() -> None:
    case = CASES["no_overflow_20000_wins"]
    scheduler, repeated = exp3_of(case), case["inputs"]["steps_compact"]
    for _ in range(repeated["repeat"]):
        scheduler.update(repeated["chosen"], repeated["profit"], all_ready(scheduler)[repeated["chosen"]])
    assert_close(all_ready(scheduler), case["expected"]["probabilities_after"])
    difference = case["expected"]["log_weight_of_0"] - case["expected"]["log_weight_of_others"]
    np.testing.assert_allclose(scheduler.log_weights[0] - scheduler.log_weights[1:], difference, rtol=1e-9)
    case = CASES["gamma1_is_uniform"]
    scheduler = exp3_of(case)
    for step in case["inputs"]["steps"]:
        scheduler.update(step["chosen"], step["profit"], all_ready(scheduler)[step["chosen"]])
    assert_close(all_ready(scheduler), case["expected"]["final_probabilities"])


def test_tasks_that_are_not_ready_are_masked_and_uniform_tasks() -> None:
    case = CASES["buffers_not_ready_are_masked"]
    masked = schedulers.among_ready(np.array(case["inputs"]["probabilities"]), np.array(case["inputs"]["ready"]))
    assert_close(masked, case["expected"]["probabilities"])
    assert_close(all_ready(started(schedulers.UniformTasks())), CASES["uniform_scheduler"]["expected"]["probabilities"])


@pytest.mark.parametrize("scheduler", [schedulers.Exp3(0.2), schedulers.Exp3S(0.2, 0.01)])
def test_many_updates_stay_finite(scheduler: schedulers.Exp3) -> None:
    scheduler = started(scheduler)
    for update in range(10_000):  # e**2500, unless weights are scaled
        scheduler.update(int(update % 4 == 0), 1.0, 0.05)
    assert np.isfinite(scheduler.log_weights).all() and scheduler.log_weights.max() == 0.0
    probabilities = all_ready(scheduler)
    assert probabilities.min() >= 0.05 - 1e-12 and probabilities.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("signals", "expected"), [
    ([0.35, 0.6, 0.8, 0.95], [0.35 / 2.7, 0.6 / 2.7, 0.8 / 2.7, 0.95 / 2.7]),
    ([0.0, 0.3, 0.6, 0.9], [0.05, 0.95 / 6, 0.95 / 3, 0.95 / 2]),  # 1 : 2 : 3 of what the bound 0.2 / 4 leaves
])  # fmt: skip
def test_signals_of_all_tasks_equally_often_settle_exp3_in_proportion_to_them(signals, expected) -> None:
    scheduler, ready = started(schedulers.Exp3(exploration=0.2)), np.ones(4, dtype=bool)
    for _ in range(2_000):
        for task, probability in enumerate(scheduler.probabilities(ready).tolist()):
            scheduler.drawn(task, probability)
        for task, signal in enumerate(signals):
            scheduler.progress(task, signal)
    assert scheduler.probabilities(ready) == pytest.approx(expected, abs=0.001)


def test_exp3s_by_hand() -> None:
    """Weights 1, 1; task 0 pays 1 with p = 1/2, γ = 1/2, α = 0.1: w0 = e^(0.5 / 1) + e·0.1/2·2, w1 = 1 + e·0.1/2·2."""
    scheduler = started(schedulers.Exp3S(exploration=0.5, weight_sharing=0.1), ["a", "b"])
    scheduler.update(0, 1.0, 0.5)
    first, second = math.exp(0.5) + math.e * 0.1, 1 + math.e * 0.1
    assert scheduler.log_weights == pytest.approx([0.0, math.log(second / first)], abs=1e-12)
    assert all_ready(scheduler) == pytest.approx(
        [0.25 + 0.5 * first / (first + second), 0.25 + 0.5 * second / (first + second)]
    )
    # Task 1 pays 0.4 with p = 0.25. The shared part is of the sum before the update.
    scheduler.update(1, 0.4, 0.25)
    shared = math.e * 0.1 / 2 * (first + second)
    first, second = first + shared, second * math.exp(0.5 * 0.4 / (0.25 * 2)) + shared
    assert scheduler.log_weights == pytest.approx(np.log([first, second]) - math.log(max(first, second)), abs=1e-12)


def test_exp3s_follows_a_change_that_exp3_does_not() -> None:
    seconds = []
    for scheduler in (started(schedulers.Exp3(0.1), ["a", "b"]), started(schedulers.Exp3S(0.1, 0.001), ["a", "b"])):
        for task in [0] * 2_000 + [1] * 100:
            scheduler.update(task, 1.0, probability=0.5)
        seconds.append(all_ready(scheduler)[1])
    assert seconds[0] == pytest.approx(0.05) and seconds[1] > 0.9


class Counting(schedulers.Exp3):
    """Writes down what is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[tuple[int, float, float]] = []

    def update(self, task: int, profit: float, probability: float) -> None:
        super().update(task, profit, probability)
        self.applied.append((task, profit, probability))


def test_a_signal_is_applied_once_and_only_to_a_drawn_task() -> None:
    r"""When each signal is applied.

    ::

        drawn      .5  .4                    .3  .2        .25
                     \   \                    |                |
        progress          .6   .7  .8  (waits)|       .1  .9   |(none waits: .9 was applied at .2)
        applied        (.6, .4)        (.8, .3)      (.1, .2)  (.9, .25)
    """
    scheduler = Counting()
    scheduler.start(TASKS)
    scheduler.drawn(1, 0.5)
    scheduler.drawn(1, 0.4)
    assert scheduler.applied == []
    scheduler.progress(1, 0.6)
    assert scheduler.applied == [(1, 0.6, 0.4)]  # with the probability of its last draw
    scheduler.progress(1, 0.7)
    scheduler.progress(1, 0.8)
    scheduler.drawn(0, 0.9)  # of another task
    assert len(scheduler.applied) == 1
    scheduler.drawn(1, 0.3)
    assert scheduler.applied[1:] == [(1, 0.8, 0.3)]  # the latest won; this draw has had its update
    scheduler.drawn(1, 0.2)
    scheduler.progress(1, 0.1)
    scheduler.progress(1, 0.9)
    scheduler.drawn(1, 0.25)
    assert scheduler.applied[2:] == [(1, 0.1, 0.2), (1, 0.9, 0.25)]
    scheduler.progress(1, 1.0)  # a draw that a waiting signal used serves no second one
    assert len(scheduler.applied) == 4


def test_easy_to_hard_advances_by_success_or_by_signals() -> None:
    scheduler = started(schedulers.EasyToHard(order=["goal_mouth", "near", "target"], advance_at=0.8, max_signals=3))
    stages = []
    for task, value in [(3, 0.7), (2, 1.0), (3, 0.8), (2, 0.0), (3, 1.0), (2, 0.0), (2, 0.0), (0, 1.0), (0, 1.0)]:
        scheduler.progress(task, value)
        stages.append(scheduler.stage)
    # near's 1.0 comes while goal_mouth is played; 0.8 reaches advance_at; near gives up at its third 0.0.
    assert stages == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert scheduler.actor_tasks(2) == [0, 0] and all_ready(scheduler).tolist() == [1.0, 0.0, 0.0, 0.0]
    scheduler = started(schedulers.EasyToHard(order=["near", "target"]))
    for _ in range(1_000):
        scheduler.progress(2, 0.799)
    assert scheduler.stage == 0 and scheduler.actor_tasks(2) == [2, 2]


def test_the_reverse_curriculum_keeps_playing_the_easy_tasks() -> None:
    scheduler = started(schedulers.ReverseCurriculum(order=["goal_mouth", "near", "target"]))
    assert scheduler.actor_tasks(3) == [3, 3, 3]
    scheduler.progress(3, 0.9)
    assert scheduler.actor_tasks(5) == [2, 3, 2, 3, 2] and all_ready(scheduler).tolist() == [0.0, 0.0, 0.5, 0.5]
    scheduler.progress(2, 0.9)
    assert scheduler.actor_tasks(4) == [0, 2, 3, 0]
    assert all_ready(scheduler) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_who_shares_one_table_and_who_plays_what() -> None:
    assert [scheduler.shares_one_table for scheduler in EVERY_SCHEDULER] == [False, False, False, True, True, True]
    one = started(schedulers.OneTask())
    assert all_ready(one).tolist() == [1.0, 0.0, 0.0, 0.0] and one.actor_tasks(3) == [0, 0, 0]
    for scheduler in EVERY_SCHEDULER[:3]:
        assert started(scheduler).actor_tasks(6) == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("scheduler", EVERY_SCHEDULER, ids=lambda scheduler: type(scheduler).__name__)
def test_probabilities_are_a_distribution_over_the_ready_tasks(scheduler: schedulers.Scheduler) -> None:
    scheduler = started(scheduler)
    scheduler.drawn(3, 0.25)
    scheduler.progress(3, 1.0)
    for number in range(16):
        ready = np.array([bool(number >> task & 1) for task in range(4)])
        probabilities = scheduler.probabilities(ready)
        assert probabilities.dtype == np.float64 and (probabilities[~ready] == 0).all()
        assert probabilities.sum() == pytest.approx(float(ready.any()), abs=1e-12)


@pytest.mark.parametrize("scheduler", EVERY_SCHEDULER, ids=lambda scheduler: type(scheduler).__name__)
def test_a_saved_scheduler_goes_on_alike(scheduler: schedulers.Scheduler) -> None:
    first, second = started(scheduler), started(scheduler)
    for task, value in [(3, 0.9), (2, 0.3), (2, 0.4), (0, 0.5)]:
        first.progress(task, value)
        first.drawn((task + 1) % 4, 0.25)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for each in (first, second):
        each.drawn(0, 0.3)
        each.progress(3, 1.0)
        each.progress(2, 0.2)
        each.drawn(2, 0.6)
    assert all_ready(first).tolist() == all_ready(second).tolist() != [0.25] * 4 or isinstance(
        scheduler, schedulers.UniformTasks
    )
    assert first.state_dict() == second.state_dict() and first.actor_tasks(5) == second.actor_tasks(5)


@pytest.mark.parametrize("scheduler", EVERY_SCHEDULER, ids=lambda scheduler: type(scheduler).__name__)
def test_bad_input_of_every_scheduler(scheduler: schedulers.Scheduler) -> None:
    with pytest.raises(RuntimeError, match=r"has no tasks yet; call start\(tasks\) first"):
        build(describe(scheduler)).probabilities(np.ones(4, dtype=bool))
    scheduler = started(scheduler)
    for value in (-0.1, 1.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"the progress signal of task 'near' is {value}; it must be a number in"):
            scheduler.progress(2, value)
    for task in (-1, 4):
        with pytest.raises(ValueError, match=f"task is {task}; it must be a whole number from 0 to 3, of "):
            scheduler.progress(task, 0.5)
        with pytest.raises(ValueError, match=f"task is {task}"):
            scheduler.drawn(task, 0.5)
    for probability in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"probability is {probability}"):
            scheduler.drawn(0, probability)
    with pytest.raises(ValueError, match="ready has the shape \\(3,\\); there are 4 tasks"):
        scheduler.probabilities(np.ones(3, dtype=bool))
    with pytest.raises(ValueError, match="num_actors is 0"):
        scheduler.actor_tasks(0)
    with pytest.raises(ValueError, match="already serves the tasks .*build a scheduler for each buffer"):
        scheduler.start(TASKS)
    with pytest.raises(ValueError, match="task is 'keeper'; the tasks are 'target', 'far', 'near', 'goal_mouth'"):
        scheduler.index_of("keeper")
    with pytest.raises(ValueError, match="saved with the tasks .*'other'.*; this scheduler has"):
        scheduler.load_state_dict({**scheduler.state_dict(), "tasks": ["other"]})


def test_the_tasks_need_names_of_their_own() -> None:
    scheduler = schedulers.UniformTasks()
    wrong = dict.fromkeys(((), ("",), ("a", "b", "a")), "at least one and each once")
    for tasks, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            scheduler.start(list(tasks))
    scheduler.start("target")
    assert scheduler.tasks == ("target",), "one name is one task, not its letters"


def test_options_out_of_range() -> None:
    one, stages = schedulers.OneTask("goal"), schedulers.EasyToHard(order=["near", "goal"])
    with pytest.raises(ValueError, match=r"task names \['goal'\]; the tasks are 'target', 'far'"):
        one.start(TASKS)
    with pytest.raises(ValueError, match=r"order names \['goal'\]"):
        stages.start(TASKS)
    stages.start(["goal", "near"])  # what was refused did not start it
    for order in ([], ["near", "near"]):
        with pytest.raises(ValueError, match="order is .*each once"):
            schedulers.EasyToHard(order=order)
    with pytest.raises(ValueError, match="profit is nan"):
        started(schedulers.Exp3()).update(0, math.nan, 0.5)
    with pytest.raises(ValueError, match="probability is 0.0"):
        started(schedulers.Exp3()).update(0, 0.5, 0.0)
    with pytest.raises(ValueError, match="saved with the order .*'near', 'far'.*this scheduler has .*'far', 'near'"):
        state = started(schedulers.EasyToHard(order=["near", "far"])).state_dict()
        started(schedulers.EasyToHard(order=["far", "near"])).load_state_dict(state)
