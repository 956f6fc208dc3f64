# SPDX-License-Identifier: Apache-2.0
"""Signals from returns: hand-worked means and changes, windows, cadence, clipping, saving."""

from __future__ import annotations

import json
import math

import pytest

from lightning_replay.saving.spec import build, describe
from lightning_replay.schedulers import MeanReturn, ReturnChange


def signals(progress: MeanReturn | ReturnChange, returns: list[float], task: int = 0) -> list[float | None]:
    return [progress.episode(task, value) for value in returns]


def test_the_mean_is_of_the_newest_returns_scaled_and_clipped() -> None:
    # window 4; of 0 5 | 5 5 | 0 0 the fourth signal would see all, the third sees 5 5 0 0
    assert signals(MeanReturn(0.0, 5.0, window=4, every=2), [0, 5, 5, 5, 0, 0]) == [None, 0.5, None, 0.75, None, 0.5]
    assert signals(MeanReturn(-10.0, 10.0, every=1), [-10.0, 10.0, 0.0]) == [0.0, 0.5, 0.5]
    progress = MeanReturn(0.0, 1.0)
    for episode in range(1, 31):
        first, second = progress.episode(0, 1.0), progress.episode(1, 0.0)
        assert (first, second) == ((1.0, 0.0) if episode % 10 == 0 else (None, None))
    assert signals(MeanReturn(0.0, 1.0, every=1), [-3.0, 1.0, 20.0]) == [0.0, 0.0, 1.0]
    assert signals(ReturnChange(0.0, 1.0, every=1), [0.0, 7.0])[1] == 1.0


def test_the_change_is_between_the_halves_of_the_window() -> None:
    # 0 1 2 3: (2+3)/2 - (0+1)/2 = 2; 1 2 3 0: (3+0)/2 - (1+2)/2 = 0; 3 0 0 0: 0 - 1.5; all of a range of 10
    change = ReturnChange(0.0, 10.0, window=4, every=1)
    assert signals(change, [0, 1, 2, 3, 0])[3:] == pytest.approx([0.2, 0.0])
    assert signals(change, [0, 0])[1] == pytest.approx(0.15)
    # of three returns the middle one counts in neither half
    assert signals(ReturnChange(0.0, 10.0, every=3), [1, 9, 4])[2] == pytest.approx(0.3)
    assert signals(ReturnChange(0.0, 1.0, every=1), [1.0, 1.0]) == [None, 0.0]


def test_across_tasks_a_task_has_one_signal_in_as_many_episodes_of_all() -> None:
    progress = MeanReturn(0.0, 1.0, every=4, across_tasks=True)
    played = [0, 0, 1, 0, 1, 0, 0, 1, 1, 0]  # the stretches of four begin with the fourth and the eighth
    assert [progress.episode(task, 1.0 - task) for task in played] == [None] * 3 + [1, 0, None, None, 0, None, 1]
    counts = dict.fromkeys((0, 1), 0)
    often = MeanReturn(0.0, 1.0, every=20, across_tasks=True)
    for number in range(1_001):  # nine episodes of the task 0 for each of the task 1
        counts[number % 10 == 9] += often.episode(number % 10 == 9, 1.0) is not None
    assert counts == {0: 50, 1: 50}


@pytest.mark.parametrize("across_tasks", [False, True])
@pytest.mark.parametrize("cls", [MeanReturn, ReturnChange])
def test_what_was_saved_goes_on_alike(cls: type[MeanReturn] | type[ReturnChange], across_tasks: bool) -> None:
    first = cls(0.0, 1.0, window=5, every=3, across_tasks=across_tasks)
    second = build(json.loads(json.dumps(describe(first))))
    for task, value in [(0, 0.1), (2, 0.7), (0, 0.9), (2, 0.4), (0, 0.3), (2, 0.2), (0, 0.8)]:
        first.episode(task, value)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    later = [(0, 0.2), (0, 0.6), (2, 0.9), (2, 0.0), (2, 1.0), (5, 1.0)]
    answers = [first.episode(*episode) for episode in later]
    assert answers == [second.episode(*episode) for episode in later] and any(answers)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match=f"the return of an episode of task 3 is {value}"):
        MeanReturn(0.0, 1.0).episode(3, value)


def test_options_out_of_range() -> None:
    for low, high in [(1.0, 1.0), (2.0, 1.0)]:
        with pytest.raises(ValueError, match=f"low is {low} and high is {high}"):
            MeanReturn(low, high)
    with pytest.raises(ValueError, match="window is 1; it must be a whole number of episodes from 2 on"):
        ReturnChange(0.0, 1.0, window=1)
    with pytest.raises(TypeError, match="across_tasks is 'yes'"):
        MeanReturn(0.0, 1.0, across_tasks="yes")
