# SPDX-License-Identifier: Apache-2.0
"""What the level buffer and its baselines refuse, and that a refusal changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_replay.levels import LevelBuffer, SequentialLevels, UniformLevels, tscl
from lightning_replay.levels import scores as level_scores
from tests.level_steps import buffer, column, first_reward, play, scored, segment


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [3, 5, 3]}, "level 3 is given twice"),
        ({"levels": [2**63]}, "level_id is 9223372036854775808; .* the largest of 64 bits"),
        ({"levels": [3, -5]}, "level_id is -5; it must be a whole number from 0 on"),
        ({"levels": []}, "at least one level"),
        ({"levels": 0}, "at least one level"),
        ({}, "capacity is None"),
        ({"levels": 5, "capacity": 3}, "capacity is 3 for 5 given levels"),
        ({"levels": 5, "editor": lambda parent, generator: 1}, "leave levels out"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LevelBuffer(**options)


def test_types_that_are_refused():
    for levels in (True, 4.5):
        with pytest.raises(TypeError, match=f"levels is {levels}; it must be distinct whole numbers, or their number"):
            LevelBuffer(levels)
    with pytest.raises(TypeError, match="an object such as L1ValueLoss"):
        LevelBuffer(5, score=level_scores.L1ValueLoss)
    levels = SequentialLevels([4, 5])
    with pytest.raises(TypeError, match="an actor is a number or a name"):
        levels.next_level((0, 1))
    assert levels.next_level(np.int64(3)) == 4, "nothing was chosen for the actor that was refused"
    assert levels.in_flight(3) == [4]


def with_next(name, column):
    """Two steps to an end with another column."""
    return segment([1.0, 1.0]).set(("next", name), column)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level_id": 5}, "actor 0 does not play level 5; it plays \\[4\\]"),
        ({"actor": 8}, "actor 8 plays no level; those that do are \\[0\\]"),
        ({"episode_done": False}, "episode_done is False, but the last step's done is True"),
        ({"steps": scored(0.5)[:0]}, "at least one step"),
        ({"steps": scored(0.5, length=2).repeat(2)}, "an episode ends at step 1 of 4"),
        ({"steps": scored(math.nan)}, "reward of the segment is NaN"),
        ({"steps": segment([1.0], [math.inf])}, "state_value of the segment is NaN or infinite"),
        ({"steps": scored(0.5).exclude(("next", "done"))}, r"the keys .*'state_value'.*; \('next', 'done'\) and"),
        ({"steps": segment([1.0], logits=[[math.nan, 0.0]])}, "logits of the segment are NaN"),
        ({"steps": with_next("truncated", torch.ones(2) > 0)}, "a step is truncated and not done"),
        ({"steps": with_next("terminated", torch.zeros(2) > 0)}, "neither terminated nor truncated"),
        ({"level_id": "4"}, r"does not play level '4'; it plays \[4\]"),
        ({"steps": {"state_value": torch.zeros(1)}}, "steps are a dict; give a TensorDict"),
        ({"steps": with_next("reward", torch.zeros(2, 2))}, r"give \[T\] or \[T, 1\]"),
    ],
)
def test_updates_that_are_refused_change_nothing(change, message):
    levels = buffer()
    levels.start(0, 4)
    before = levels.state_dict()
    with pytest.raises((TypeError, ValueError), match=message):
        levels.update(**{"actor": 0, "level_id": 4, "steps": scored(0.5), "episode_done": True} | change)
    assert str(levels.state_dict()) == str(before)
    assert levels.update(0, 4, scored(0.5), episode_done=True) == 0.5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda steps: "high", "could not convert"),
        (lambda steps: steps["next", "reward"], "only one element tensors|converted to Scalar"),
        (lambda steps: 1 + "a", "unsupported operand"),
        (lambda steps: math.nan, "the score of level 4 is nan"),
    ],
)
def test_a_score_function_that_fails_changes_nothing(wrong, message):
    answers = iter([wrong, first_reward])
    levels = buffer(score=lambda steps: next(answers)(steps))
    levels.start(0, 4)
    before = str(levels.state_dict())
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        levels.update(0, 4, scored(0.5, length=2), episode_done=True)
    assert str(levels.state_dict()) == before
    assert levels.update(0, 4, scored(0.5), episode_done=True) == 0.5


def test_an_editor_that_fails_changes_nothing():
    answers = iter([-1, 1])
    levels = LevelBuffer(capacity=4, score=first_reward, editor=lambda parent, generator: next(answers), seed=0)
    play(levels, 7, 0.5)
    levels.start(0, 7)
    with pytest.raises(ValueError, match="level_id is -1"):
        levels.update(0, 7, scored(0.9), episode_done=True)
    assert column(levels, "score") == {7: 0.5}
    assert levels.update(0, 7, scored(0.1), episode_done=True) == pytest.approx(0.1)
    play(levels, 1, 0.2)
    level_id = levels.next_level(0)
    assert levels.trains_on(0, level_id), "a child that was played meanwhile is none any more"


def test_levels_that_were_not_given_and_states_of_other_buffers_are_refused():
    with pytest.raises(ValueError, match="level 77 is none of the 10 levels"):
        buffer().start(0, 77)
    with pytest.raises(ValueError, match="level 77 is none of the 3 levels"):
        UniformLevels(3).start(0, 77)
    state = buffer().state_dict()
    with pytest.raises(ValueError, match=r"the saved levels \[9\] are not among the 9 given"):
        buffer(9).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the saved levels \[0\] are not among the 10 given"):
        buffer(range(1, 11)).load_state_dict(state)
    with pytest.raises(ValueError, match="known set"):
        LevelBuffer(capacity=10).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the state is \[\], without 'kind'; give what state_dict"):
        buffer().load_state_dict({})
    with pytest.raises(ValueError, match="that of a LevelBuffer; this is a UniformLevels"):
        UniformLevels(10).load_state_dict(state)
    with pytest.raises(ValueError, match="the state has version 0; 1 can be read"):
        buffer().load_state_dict(state | {"version": 0})
    with pytest.raises(ValueError, match=r"the saved levels \[1, 2\] are not among the 2 given"):
        UniformLevels([7, 8]).load_state_dict(UniformLevels([1, 2]).state_dict())
    with pytest.raises(ValueError, match="levels is None"):
        SequentialLevels(None)


@pytest.mark.parametrize("other", [tscl(10).state_dict(), LevelBuffer(11).state_dict(), None])
def test_a_refused_state_changes_nothing(other):
    levels = buffer()
    play(levels, 3, 0.5)
    before = str(levels.state_dict())
    state = other or {name: part for name, part in levels.state_dict().items() if name != "sampler"}
    with pytest.raises(ValueError, match=r"are not among|scored by segments|lacks or adds \['sampler'\]"):
        levels.load_state_dict(state)
    assert str(levels.state_dict()) == before
    assert levels.next_level(0) in range(10)
