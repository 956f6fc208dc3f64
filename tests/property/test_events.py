# SPDX-License-Identifier: Apache-2.0
"""Conditions over episodes agree with whole episodes searched by hand, however their steps are interleaved and cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay.events import any_of, every_of, first_in_episode, reestablished, reward_at_least, sustained
from lightning_replay.saving.spec import build, describe
from lightning_replay.saving.states import join_state, split_state

PAID = reward_at_least(1.0)


@dataclass
class Episode:
    """All steps of one episode, in order, and the places they came at."""

    held: list[bool] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


Row = tuple[int | None, bool, bool]  # trajectory, whether it holds, whether it ends the episode


@st.composite
def histories(draw: st.DrawFn) -> list[list[Row]]:
    """Calls of rows of up to three interleaved environments, or of one whose rows name no trajectory."""
    trajectory: st.SearchStrategy[Any] = draw(st.sampled_from([st.integers(0, 2), st.none()]))
    row = st.tuples(trajectory, st.sampled_from([True, True, False]), st.sampled_from([False] * 6 + [True]))
    return draw(st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=8))


def episodes_of(rows: list[Row]) -> list[Episode]:
    running: dict[int | None, Episode] = {}
    ended: list[Episode] = []
    for place, (trajectory, held, done) in enumerate(rows):
        episode = running.setdefault(trajectory, Episode())
        episode.held.append(held)
        episode.places.append(place)
        if done:
            ended.append(running.pop(trajectory))
    return ended + list(running.values())


def search(rows: list[Row], happens: Callable[[list[bool]], bool]) -> list[bool]:
    """Asks ``happens`` about every beginning of every episode."""
    said = [False] * len(rows)
    for episode in episodes_of(rows):
        for length, place in enumerate(episode.places, start=1):
            said[place] = happens(episode.held[:length])
    return said


def is_first(held: list[bool]) -> bool:
    return held[-1] and not any(held[:-1])


def is_sustained(held: list[bool], steps: int) -> bool:
    before = held[: len(held) - steps]
    return len(held) >= steps and all(held[-steps:]) and not (before and before[-1])


def is_reestablished(held: list[bool], steps: int) -> bool:
    """The newest ``steps`` hold, and the step before them is the failure they make good."""
    return len(held) > steps and all(held[-steps:]) and not held[-steps - 1]


def steps_of(rows: list[Row]) -> TensorDict:
    held, done = torch.tensor([row[1] for row in rows]), torch.tensor([row[2] for row in rows])
    steps = TensorDict({"next": {"reward": held.float().unsqueeze(1), "done": done.unsqueeze(1)}}, [len(rows)])
    if rows[0][0] is not None:
        steps["trajectory"] = torch.tensor([row[0] for row in rows])
    return steps


def drive(condition: Any, calls: list[list[Row]], save_after: int) -> list[bool]:
    """What the condition says in all calls; it is saved after one of them, and another goes on from there."""
    said: list[bool] = []
    for number, rows in enumerate(calls):
        said += condition(steps_of(rows)).tolist()
        if number == save_after:
            values, tensors = split_state(condition.state_dict())
            condition = build(json.loads(json.dumps(describe(condition))))
            condition.load_state_dict(join_state(json.loads(json.dumps(values)), tensors))
    return said


@given(histories(), st.integers(1, 4), st.integers(0, 7))
def test_conditions_agree_with_whole_episodes(calls: list[list[Row]], steps: int, save_after: int) -> None:
    rows = [row for call in calls for row in call]
    for condition, happens in [
        (first_in_episode(PAID), is_first),
        (sustained(PAID, steps), lambda held: is_sustained(held, steps)),
        (reestablished(PAID, steps), lambda held: is_reestablished(held, steps)),
    ]:
        assert drive(condition, calls, save_after) == search(rows, happens), condition


@given(histories(), st.integers(1, 3), st.integers(0, 7))
def test_nested_conditions_agree_with_whole_episodes(calls: list[list[Row]], steps: int, save_after: int) -> None:
    rows = [row for call in calls for row in call]

    def is_first_sustained(held: list[bool]) -> bool:
        return is_first([is_sustained(held[:length], steps) for length in range(1, len(held) + 1)])

    nested = any_of(first_in_episode(sustained(PAID, steps)), every_of(PAID, reestablished(PAID, steps)))
    expected = search(rows, lambda held: is_first_sustained(held) or is_reestablished(held, steps))
    assert drive(nested, calls, save_after) == expected


@pytest.mark.slow
@given(histories())
def test_what_is_remembered_is_of_running_episodes_only(calls: list[list[Row]]) -> None:
    condition = reestablished(sustained(PAID, 2), 2)
    for call in calls:
        condition(steps_of(call))
    last = {trajectory: done for call in calls for trajectory, _, done in call}
    running = {trajectory for trajectory, done in last.items() if not done}
    state = condition.state_dict()
    for each in (state, state["condition"]):
        assert set(each["trajectory"].tolist()) <= running
        assert each["unnamed"] is None or None in running
