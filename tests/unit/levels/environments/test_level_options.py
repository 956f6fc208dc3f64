# SPDX-License-Identifier: Apache-2.0
"""Environments that take their level as an option of reset, and objects of a set as levels."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from lightning_replay.levels import LevelBuffer, LevelSet, SequentialLevels
from lightning_replay.levels.environments import LevelVectorWrapper, LevelWrapper, make_level_vector
from tests.corridors import Corridor, StubbornCorridor, ToldCorridor

TASKS = LevelSet([{"length": length} for length in (4, 2, 7, 5)])


class AskedCorridor(Corridor):
    """Its options hold its length, or a task with it; without them it cannot begin."""

    def choose_length(self) -> int:
        level = self.options[-1]["level"]
        return level["length"] if isinstance(level, dict) else level


class ToldTask(ToldCorridor):
    def choose_length(self) -> int:
        return self.level_id["length"]


def test_the_level_is_an_option_beside_others_and_the_generator_is_seeded_once() -> None:
    inner = AskedCorridor()
    env = LevelWrapper(inner, iter([5, 6]).__next__, seed=11, level_option="level", check=False)
    given = {"mode": "hard"}
    assert [env.reset(options=given)[0][0] for _ in range(2)] == [5, 6] and given == {"mode": "hard"}
    assert inner.seeds == [11, None] and inner.options == [{"mode": "hard", "level": 5}, {"mode": "hard", "level": 6}]
    assert env.reset(options={"level_id": 9}, seed=8)[0][0] == 9 == env.level_id and inner.seeds[-1] == 8
    env.set_level(3)
    assert env.reset()[1]["level_id"] == 3 and inner.seeds[-1] is None


@pytest.mark.parametrize(("made", "option"), [(AskedCorridor, "level"), (ToldTask, None)])
def test_an_environment_gets_the_object_of_its_level(made: Any, option: str | None) -> None:
    env = LevelWrapper(made(), iter([2, 1]).__next__, level_option=option, level_set=TASKS, check=[0, 3])
    begun = [env.reset() for _ in range(2)]
    assert [(seen[0], info["level_id"]) for seen, info in begun] == [(7, 2), (2, 1)]
    told = env.unwrapped.options[-1]["level"] if option else env.unwrapped.level_id
    assert told is TASKS.level(1), "as it was given, without the id"
    with pytest.raises(IndexError, match="level 4 is none of the levels 0 to 3"):
        env.reset(options={"level_id": 4})


def test_vectors_and_other_wrappers_tell_it_the_ids() -> None:
    levels = LevelBuffer(TASKS, seed=0)
    make = partial(LevelWrapper, level_option="level", level_set=TASKS, check=False)
    envs = make_level_vector(lambda: make(AskedCorridor()), 3, levels, check=[0, 1])
    observations, infos = envs.reset(options={"level_id": [2, 0, 3]})
    assert observations[:, 0].tolist() == [7, 4, 5] and infos["level_id"].tolist() == [2, 0, 3]
    gymnasium.register("AskedCorridor-v0", entry_point=AskedCorridor)
    vector = gymnasium.make_vec(
        "AskedCorridor-v0",
        2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
        wrappers=[make],
    )
    envs = LevelVectorWrapper(vector, SequentialLevels(TASKS), check=[0, 1])
    assert envs.reset()[0][:, 0].tolist() == [4, 2]
    for _ in range(2):
        observations, *_, infos = envs.step(np.zeros(2, np.int64))
    assert infos["step_level_id"].tolist() == [0, 1] and infos["level_id"].tolist() == [0, 2]
    assert observations[:, 0].tolist() == [4, 7]


@pytest.mark.parametrize("made", [AskedCorridor, ToldTask])
def test_a_first_reset_that_fails_names_the_options_to_give(made: Any) -> None:
    gymnasium.register(name := f"{made.__name__}Fails-v0", entry_point=made)
    single = LevelWrapper(gymnasium.make(name), iter([1, 2]).__next__)
    for env in (single, make_level_vector(name, 2, SequentialLevels(9))):
        with pytest.raises(TypeError, match="not subscriptable") as raised:
            env.reset()
        (note,) = raised.value.__notes__
        assert "LevelWrapper(env, level_option=...) where reset reads the level from its options" in note
        assert "level_set=... where it takes an object" in note


def test_later_errors_are_left_to_the_environment() -> None:
    inner = ToldCorridor()
    env = LevelWrapper(inner, iter([1, 2]).__next__, check=False)
    env.reset()
    inner.choose_length = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError) as raised:
        env.reset()
    assert "__notes__" not in vars(raised.value)


def test_options_that_are_refused() -> None:
    with pytest.raises(
        TypeError, match="level_option is 3; it must be a key of the options of the environment's reset"
    ):
        LevelWrapper(AskedCorridor(), level_option=3)
    with pytest.raises(TypeError, match=r"level_set is \[1\]; it must be LevelSet\(...\), or None"):
        LevelWrapper(AskedCorridor(), level_option="level", level_set=[1])
    with pytest.raises(ValueError, match="level_set is given, and .*Corridor.* has no set_level; give level_option"):
        LevelWrapper(Corridor(), level_set=TASKS)

    class Deaf(StubbornCorridor):
        pass

    with pytest.raises(
        ValueError, match=r"Deaf.* ignores its level.*LevelWrapper\(env, level_option=...\).*level_set=..."
    ):
        LevelWrapper(Deaf(), iter([5]).__next__, level_option="lvl").reset()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_set_than_that_of_the_levels_is_refused(asynchronous: bool) -> None:
    make = partial(LevelWrapper, AskedCorridor(), level_option="level", check=False)
    others = LevelSet([{"length": length} for length in (4, 2, 7, 6)])
    for levels in (LevelBuffer(others, seed=0), SequentialLevels(others)):
        with pytest.raises(ValueError, match=r"has other objects than LevelSet\(4 levels\), .* give the same"):
            make_level_vector(partial(make, level_set=TASKS), 2, levels, asynchronous=asynchronous)
    for levels, given in (
        (LevelBuffer(others, seed=0), {"level_set": others}),
        (SequentialLevels(4), {"level_set": TASKS}),
    ):
        make_level_vector(partial(make, **given), 2, levels, asynchronous=asynchronous, check=False).close()
