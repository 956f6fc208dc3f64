# SPDX-License-Identifier: Apache-2.0
"""One environment told its level: who is asked when, the check that it follows, the errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from lightning_replay.levels import SequentialLevels
from lightning_replay.levels.environments import LevelWrapper
from tests.corridors import Corridor, RestlessCorridor, StubbornCorridor, ToldCorridor, lengths_of


def test_every_reset_plays_the_next_level_by_its_seed() -> None:
    env = LevelWrapper(Corridor(), partial(SequentialLevels([5, 3, 9]).next_level, "the only actor"), check=False)
    assert env.level_id is None
    for level_id in (5, 3, 9, 5):
        observation, info = env.reset()
        assert (env.level_id, info["level_id"], observation[0]) == (level_id, level_id, *lengths_of(level_id))
        assert env.step(0)[-1] == {"place": 1, "way": {"left": env.unwrapped.length}, "level_id": level_id}
    assert env.unwrapped.seeds == [5, 3, 9, 5]


def test_a_named_level_goes_before_the_next_one_and_counts_once() -> None:
    env = LevelWrapper(Corridor(), iter(range(100)).__next__, check=False)
    env.set_level(30)
    assert env.reset(seed=20, options={"level_id": 7, "mode": "hard"})[1]["level_id"] == 7
    assert env.unwrapped.options == [{"mode": "hard"}]
    env.set_level(31)
    assert [env.reset(seed=20)[1]["level_id"] for _ in range(2)] == [31, 0]
    assert [env.reset()[1]["level_id"] for _ in range(2)] == [1, 2]
    assert env.unwrapped.options[1:] == [None] * 4
    with pytest.raises(ValueError, match=r"nothing chooses a level; give next_level= to LevelWrapper"):
        LevelWrapper(Corridor(), check=False).reset()


def test_set_level_is_called_below_other_wrappers_and_the_generator_seeded_once() -> None:
    inner = ToldCorridor()
    env = LevelWrapper(gymnasium.wrappers.TimeLimit(inner, 9), iter([4, 6]).__next__, seed=11, check=False)
    assert [env.reset()[0][0] for _ in range(2)] == [4, 6] and inner.seeds == [11, None, None]
    assert env.reset(seed=8, options={"level_id": 8})[0][0] == 8 and inner.seeds[3:] == [8, None]
    assert LevelWrapper(ToldCorridor(), lambda: 3, seed=0).reset()[0][0] == 3  # the check sets levels too
    outer = LevelWrapper(env, check=False)  # a wrapped environment has set_level too
    assert outer.reset(options={"level_id": 2})[0][0] == 2


@pytest.mark.parametrize("level_id", [-1, 2**31, True, 1.0, "7", np.float32(2)])
def test_ids_of_levels_are_whole_numbers_that_fit_a_seed(level_id: Any) -> None:
    env = LevelWrapper(Corridor(), lambda: level_id, check=False)
    for reset in (env.reset, partial(env.reset, options={"level_id": level_id}), partial(env.set_level, level_id)):
        error = ValueError if level_id in (-1, 2**31) else TypeError
        with pytest.raises(error, match=r"level_id is .*; it must be a whole number from 0 to 2\*\*31 - 1"):
            reset()
    highest = np.int64(2**31 - 1)
    assert LevelWrapper(Corridor(), lambda: highest, check=False).reset()[1] == {"begun": 1, "level_id": highest}


def test_the_check_takes_three_resets_once_and_more_where_levels_begin_alike() -> None:
    env = LevelWrapper(Corridor(), iter([50, 60]).__next__)
    assert [env.reset()[1]["level_id"] for _ in range(2)] == [50, 60]
    assert env.unwrapped.seeds == [0, 0, 1, 50, 60]

    class Halves(ToldCorridor):
        def choose_length(self) -> int:
            return self.level_id // 7

    env = LevelWrapper(Halves(), iter([50]).__next__)
    env.reset()
    assert len(env.unwrapped.seeds) == 1 + 8 + 1
    with pytest.raises(ValueError, match=r"the levels 3, 5 all gave the same first observation"):
        LevelWrapper(Halves(), iter([50]).__next__, check=[5, 3, 5]).reset()


def test_an_environment_that_does_not_follow_its_seed_is_refused() -> None:
    env = LevelWrapper(StubbornCorridor(), iter([50]).__next__)
    seen = r"ignores its level: the levels 0, 1, 2, 3, 4, 5, 6, 7 all gave the same first observation"
    with pytest.raises(ValueError, match=rf"StubbornCorridor.*{seen}.*reset\(seed=level_id\).*set_level.*check=False"):
        env.reset()
    assert LevelWrapper(StubbornCorridor(), iter([50]).__next__, check=False).reset()[1]["level_id"] == 50
    seen = r"does not follow its level: level 0, begun twice, gave two different first observations"
    with pytest.raises(ValueError, match=rf"RestlessCorridor.*{seen}.*Accepted are environments whose reset\(seed="):
        LevelWrapper(RestlessCorridor(), iter([50]).__next__).reset()


@pytest.mark.parametrize("check", [[], [4], [4, 4]])
def test_one_level_is_nothing_to_compare(check: list[int]) -> None:
    with pytest.raises(ValueError, match="check is .*; it must be True, False or at least two different ids of levels"):
        LevelWrapper(Corridor(), check=check)
