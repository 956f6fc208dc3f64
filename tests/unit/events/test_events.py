# SPDX-License-Identifier: Apache-2.0
"""Conditions on hand-made steps and timelines, tables and their errors, suggestions, describing and building again."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from lightning_replay import recipes
from lightning_replay.events import (
    Condition,
    ConditionError,
    EpisodeCondition,
    Event,
    EventTable,
    any_of,
    every_of,
    first_in_episode,
    holds,
    info_key,
    key_in_region,
    reestablished,
    reward_at_least,
    reward_below,
    suggest_events,
    sustained,
    terminal_with_reward,
)
from lightning_replay.saving.spec import build, describe

NEXT_OBSERVATION = ("next", "observation")
PAID = reward_at_least(1.0)


def steps_of(rewards: Any, *, done: Any = None, trajectory: Any = None, **columns: Any) -> TensorDict:
    reward = torch.as_tensor(rewards, dtype=torch.float32)
    count = len(reward)
    ends = torch.zeros(count, dtype=torch.bool) if done is None else torch.as_tensor(done, dtype=torch.bool)
    following = {
        "reward": reward.reshape(count, 1),
        "terminated": ends.reshape(count, 1),
        "done": ends.reshape(count, 1),
    }
    steps = TensorDict({"next": following | {name: torch.as_tensor(value) for name, value in columns.items()}}, [count])
    if trajectory is not None:
        steps["trajectory"] = torch.as_tensor(trajectory, dtype=torch.int64)
    return steps


def along(condition: Any, timeline: str, *, each: int | None = None) -> str:
    """What a condition says along a timeline such as ``"T.T|T"``: T = paid, . = not, | ends an episode.

    ``each`` steps are given to every call; all of them to one where it is ``None``.
    """
    marks = timeline.replace(" ", "")
    steps = [(mark == "T", marks[place + 1 : place + 2] == "|") for place, mark in enumerate(marks) if mark != "|"]
    said: list[bool] = []
    for start in range(0, len(steps), each or len(steps)):
        held, done = zip(*steps[start : start + (each or len(steps))], strict=True)
        said += condition(steps_of(held, done=done)).tolist()
    answers = iter(said)
    return "".join(mark if mark == "|" else ".T"[next(answers)] for mark in marks)


def test_rewards() -> None:
    steps = steps_of([0.5, 1.0, 2.0, math.nan], done=[False, True, False, True])
    assert reward_at_least(1)(steps).tolist() == [False, True, True, False]
    assert reward_below(1.0)(steps).tolist() == [True, False, False, False]
    assert terminal_with_reward(0.5)(steps).tolist() == [False, True, False, False]


def test_truncation_is_not_terminal() -> None:
    steps = steps_of([1.0], done=[True])
    steps["next", "terminated"] = torch.tensor([[False]])
    assert terminal_with_reward(0.0)(steps).tolist() == [False]


def test_thresholds_and_bounds_are_compared_in_the_precision_of_the_column() -> None:
    for dtype in (torch.float32, torch.float64):
        steps = steps_of([0.0], observation=torch.tensor([[0.1, 0.7]], dtype=dtype))
        steps["next", "reward"] = torch.tensor([[0.1]], dtype=dtype)
        assert reward_at_least(0.1)(steps).item()
        assert key_in_region(NEXT_OBSERVATION, low=[0.1, 0.7], high=[0.1, 0.7])(steps).item()


def test_regions() -> None:
    points = [[6.0, 1.0], [6.0, 2.0], [6.0, 2.1], [5.9, 1.0], [6.0, -50.0], [math.nan, 1.0]]
    steps = steps_of([0.0] * 6, observation=points, cell=[3, 4, 5, 6, 7, 8])
    region = key_in_region(NEXT_OBSERVATION, low=[6, None], high=[6, 2])
    assert region(steps).tolist() == [True, True, False, False, True, False]
    assert key_in_region(NEXT_OBSERVATION, low=1)(steps).tolist() == [True, True, True, True, False, False]
    assert key_in_region(("next", "cell"), low=4, high=6)(steps).tolist() == [False, True, True, True, False, False]
    assert key_in_region(NEXT_OBSERVATION, high=[None, 1.5], low=-math.inf)(steps).tolist() == [
        True, False, False, True, True, False
    ]  # fmt: skip


def test_information_keys() -> None:
    steps = steps_of([0.0] * 3, success=[[False], [True], [False]])
    steps["next", "ball", "distance"] = torch.tensor([0.1, 2.0, 0.3])
    assert info_key("success")(steps).tolist() == [False, True, False]
    assert info_key(("ball", "distance"), at_least=0.3)(steps).tolist() == [False, True, True]


def test_combinations() -> None:
    steps = steps_of([0.0, 1.0, 2.0, 3.0])
    middle = every_of(reward_at_least(1.0), lambda steps: steps["next", "reward"] < 3)
    assert middle(steps).tolist() == [False, True, True, False]
    assert any_of(reward_below(1.0), reward_at_least(3.0))(steps).tolist() == [True, False, False, True]
    assert repr(any_of(PAID, every_of(reward_below(2)))) == "any_of(reward_at_least(1.0), every_of(reward_below(2.0)))"


TIMELINES = [
    (first_in_episode(PAID), "..TT.T | .. | T.T | TT", "..T... | .. | T.. | T."),
    (sustained(PAID, steps=1), "TT.T | T.T", "T..T | T.T"),
    (sustained(PAID, steps=3), "TT.TTTT.TTT | TT | T.TTT", ".....T....T | .. | ....T"),
    (reestablished(PAID, steps=1), "TT.T..TT | T.T", "...T..T. | ..T"),
    (reestablished(PAID, steps=2), "TTT.T..TTTT.TT | TTT", "........T....T | ..."),
    # An episode that begins with a failure; one that ends before the failure is made good; no memory of it afterwards.
    (reestablished(PAID, steps=3), "..TTT | TT.TT | TTTT", "....T | ..... | ...."),
    (first_in_episode(sustained(PAID, steps=2)), "TT.TT | TT", ".T... | .T"),
    (sustained(any_of(PAID, sustained(PAID, 2)), steps=2), "TT.TT", ".T..T"),
]


@pytest.mark.parametrize("each", [None, 1, 4])
@pytest.mark.parametrize(("condition", "timeline", "expected"), TIMELINES, ids=lambda value: repr(value))
def test_timelines(condition: Any, timeline: str, expected: str, each: int | None) -> None:
    assert along(condition.fresh(), timeline, each=each) == expected.replace(" ", "")


def test_every_part_of_a_combination_sees_every_step() -> None:
    """The second part must not miss the steps at which the first alone decides."""
    combined = any_of(reward_at_least(2.0), sustained(PAID, steps=2))
    assert combined(steps_of([2.0, 1.0, 0.0])).tolist() == [True, True, False]
    combined = every_of(reward_below(2.0), sustained(PAID, steps=2))
    assert combined(steps_of([2.0, 1.0, 0.0])).tolist() == [False, True, False]


def test_torchrl_collectors_name_episodes_in_their_own_way() -> None:
    steps = steps_of([1, 1, 1])
    steps["collector", "traj_ids"] = torch.tensor([4, 5, 4])
    assert sustained(PAID, steps=2)(steps).tolist() == [False, False, True]


def test_episodes_given_up_without_an_end_are_forgotten_when_told() -> None:
    condition = every_of(PAID, first_in_episode(sustained(PAID, 2)))
    condition(steps_of([1, 1], trajectory=[3, 4]))
    again = Event(condition).condition
    again.load_state_dict(condition.state_dict())
    again.end_episodes([3, None])
    inner = again.state_dict()["conditions"][1]["condition"]
    assert inner["trajectory"].tolist() == [4] and inner["remembered"].tolist() == [1]


def test_every_event_follows_the_episodes_by_itself() -> None:
    condition = sustained(PAID, steps=2)
    events = [Event(condition, 5), Event(every_of(condition), 5)]
    tables = [EventTable(name, events=events, capacity=10) for name in ("a", "b")]
    for event in [event for table in tables for event in table.events]:
        assert event.condition(steps_of([1, 1])).tolist() == [False, True]
    assert condition(steps_of([1])).tolist() == [False]
    assert tables[0].fresh().events[0].condition(steps_of([1])).tolist() == [False]
    assert Event(PAID).condition is PAID  # nothing to remember, nothing to copy


class Everything(EpisodeCondition):
    """A user's own, without a recorded constructor: true at every second step of an episode."""

    def follow(self, remembered: int, held: bool) -> tuple[bool, int]:
        return remembered == 1, 1 - remembered


def test_a_user_can_write_such_a_condition() -> None:
    condition = Event(Everything(PAID)).condition
    assert along(condition, ".... | ...") == ".T.T|.T."


def test_tables_are_built_again_from_json() -> None:
    region = key_in_region(NEXT_OBSERVATION, low=[None, 1], high=3.0)
    events = [Event(reestablished(every_of(region, info_key("success")), 4), 10), Event(json.loads, 20)]
    table = EventTable("several", events=events, capacity=30, share=0.5)
    again = build(json.loads(json.dumps(describe(table))), trust=["json"])
    assert repr(again) == repr(table) and again.history_length == 20
    assert again.events[0].condition(steps_of([1.0], observation=[[0.0, 2.0]], success=[True])).tolist() == [False]


def test_suggested_thresholds_are_stored_rewards() -> None:
    steps = steps_of(torch.arange(11) / 10)
    assert [event.condition.threshold for event in suggest_events(steps)] == pytest.approx([0.5, 0.8, 0.9])
    for event, count in zip(suggest_events(steps, history_length=7), (6, 3, 2), strict=True):
        assert event.condition(steps).sum() == count and event.history_length == 7


def test_suggestions_for_sparse_rewards_leave_out_what_every_step_reaches() -> None:
    sparse = steps_of([0.0] * 98 + [1.0, 5.0])
    assert [repr(event.condition) for event in suggest_events(sparse)] == ["reward_at_least(1.0)"]
    costs = steps_of([-1.0] * 99 + [0.0])
    assert [repr(event.condition) for event in suggest_events(costs, [0.0, 1.0])] == ["reward_at_least(0.0)"]


def test_suggestions_from_a_buffer() -> None:
    replay = recipes.uniform(capacity=100, batch_size=4)
    with pytest.raises(ValueError, match="nothing is stored.*call extend first"):
        suggest_events(replay)
    replay.extend(steps_of([0.0, 1.0, 2.0, 3.0, 4.0]))
    events = suggest_events(replay, [0.5])
    assert EventTable("reward", events=events, capacity=200).events[0].condition.threshold == 2.0


def test_suggestions_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="all 3 stored rewards are 2.0, so no threshold separates them"):
        suggest_events(steps_of([2.0] * 3))
    with pytest.raises(ValueError, match="NaN or infinite"):
        suggest_events(steps_of([2.0, math.nan]))
    with pytest.raises(ValueError, match="quantiles is empty"):
        suggest_events(steps_of([1.0, 2.0]), [])


TABLE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name is ''; an event table needs one"),
    ({"condition": None}, "was given neither condition nor events"),
    ({"events": [Event(PAID)]}, "was given both condition and events"),
    ({"condition": None, "events": []}, "events of table 'goal' is empty; give at least one"),
    ({"condition": None, "events": [Event(PAID, 5)], "history_length": 6}, "was given events and history_length 6"),
    ({"history_length": 101}, "history longer than the table: 'goal' has history_length 101 and capacity 100"),
    ({"min_size": 101}, "min_size of table 'goal' is 101 and its capacity 100"),
    ({"share": 1.0}, "share of table 'goal' is 1.0"),
]


@pytest.mark.parametrize(("options", "message"), TABLE_ERRORS, ids=[message[:30] for _, message in TABLE_ERRORS])
def test_tables_that_are_refused(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"name": "goal", "condition": PAID, "history_length": 50, "capacity": 100}
    if "events" in options and "history_length" not in options:
        good["history_length"] = 200
    EventTable(**{**good, "history_length": 50})
    with pytest.raises(ValueError, match=message):
        EventTable(**{**good, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"condition": None, "events": [PAID]}, r"events\[0\] of table 'goal' is reward_at_least.*must be an Event"),
        ({"condition": None, "events": Event(PAID)}, "events of table 'goal' is Event.*must be a sequence of Events"),
        ({"condition": reward_at_least}, "condition is <class .*RewardAtLeast'>; it must be a condition"),
    ],
)
def test_tables_of_the_wrong_kind_are_refused(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"name": "goal", "condition": PAID, "capacity": 1_000}
    with pytest.raises(TypeError, match=message):
        EventTable(**{**good, **options})


def test_conditions_that_are_refused() -> None:
    for low, high, message in [
        (2.0, 1.0, r"low 2.0 is above high 1.0"),
        ([0, 2], [1, 1], r"low \[0, 2\] is above high \[1, 1\]"),
        (None, None, "the region is everything"),
        ([None], [None, None], "the region is everything"),
        ([0, 1], [1, 2, 3], "low has 2 components and high has 3"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            key_in_region("observation", low=low, high=high)
    for key in ("", (), ("next", 3)):
        with pytest.raises((TypeError, ValueError), match="key is .*; it must be the name of a column"):
            key_in_region(key, low=0.0)
    for make in (every_of, any_of):
        with pytest.raises(ValueError, match="no condition was given"):
            make()


def test_columns_that_are_missing_or_do_not_fit() -> None:
    steps = steps_of([1.0, 2.0], observation=torch.zeros(2, 3))
    with pytest.raises(ConditionError, match=r"no column 'goal'; stored are \('next', 'reward'\), .*'observation'\)"):
        key_in_region("goal", low=0.0)(steps)
    with pytest.raises(ConditionError, match=r"no column \('next', 'success'\)"):
        info_key("success")(steps)
    with pytest.raises(ConditionError, match="region has 2 components, .* has 3"):
        key_in_region(NEXT_OBSERVATION, low=[0.0, 0.0])(steps)
    with pytest.raises(ConditionError, match=r"has the shape \[2, 3\]; this condition needs one number for each step"):
        info_key("observation")(steps)
    with pytest.raises(ConditionError, match=r"no column \('next', 'done'\)"):
        sustained(PAID, 2)(steps.exclude(("next", "done")))


def test_answers_that_are_refused() -> None:
    steps = steps_of([1.0, 2.0])
    assert holds(lambda steps: steps["next", "reward"] > 1, steps).tolist() == [False, True]
    for answer, message in [
        (torch.tensor([1.0, 0.0]), "returned a torch.float32 tensor; return a bool tensor"),
        ([True, False], "returned a list; return a bool tensor"),
        (torch.tensor(True), r"returned shape \[\]; return \[2\]"),
        (torch.ones(2, 2, dtype=torch.bool), r"returned shape \[2, 2\]; return \[2\]"),
    ]:
        with pytest.raises(ConditionError, match=message):
            holds(lambda steps, answer=answer: answer, steps)
    with pytest.raises(ConditionError, match="raised ZeroDivisionError: .*given 2 steps with"):
        every_of(lambda steps: 1 / 0)(steps)


def test_a_condition_that_raises_leaves_the_episodes_as_they_were() -> None:
    broken = [True]
    condition = sustained(lambda steps: (steps["next", "reward"] > 0) if not broken else 1 / 0, steps=2)
    with pytest.raises(ConditionError):
        condition(steps_of([1.0]))
    broken.clear()
    assert condition(steps_of([1.0, 1.0])).tolist() == [False, True]


def test_a_condition_that_remembers_nothing_has_an_empty_state() -> None:
    assert PAID.state_dict() == {} and PAID.fresh() is PAID and isinstance(PAID, Condition)
    PAID.load_state_dict({})
    PAID.end_episodes([1])
