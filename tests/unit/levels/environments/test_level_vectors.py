# SPDX-License-Identifier: Apache-2.0
"""Vectors told their levels: timelines by hand, Gymnasium's own layout, what a buffer hears, the errors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_replay.levels import LevelBuffer, SequentialLevels
from lightning_replay.levels.environments import LevelVectorWrapper, make_level_vector, of_rows, overlaid
from tests.corridors import Corridor, PairCorridor, RestlessCorridor, StubbornCorridor, ToldCorridor, lengths_of


def test_the_check_finds_the_one_sub_environment_that_is_not_right() -> None:
    vector = SyncVectorEnv([Corridor, StubbornCorridor, Corridor], autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match=r"SyncVectorEnv\(num_envs=3\) ignores its level: the levels 0, 1, 2"):
        LevelVectorWrapper(vector, SequentialLevels(9)).reset()
    restless = SyncVectorEnv([Corridor, RestlessCorridor], autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match=r"does not follow its level: level 1, begun twice"):
        LevelVectorWrapper(restless, SequentialLevels(9)).reset()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_timeline_by_hand(asynchronous: bool) -> None:
    """Lengths are levels. Two sub-environments draw 2, 3, 4, 2, ... in turn; | is where an episode ends.

    step        reset  1    2    3    4    5
    first       2      2    2|3  3    3    3|2
    second      4      4    4    4    4|5  5
    """
    levels = SequentialLevels([2, 4, 3, 5, 6])
    envs = make_level_vector(PairCorridor, 2, levels, asynchronous=asynchronous, context="fork")
    observations, infos = envs.reset()
    assert observations["length"].tolist() == [2, 4] == infos["level_id"].tolist()
    assert "step_level_id" not in infos and "final_obs" not in infos
    drawn = [infos["level_id"]]
    timeline = []
    for _ in range(5):
        observations, rewards, terminated, truncated, infos = envs.step(np.array([0, 1]))
        assert infos["step_level_id"].tolist() == drawn[-1].tolist() and infos["_step_level_id"].all()
        assert infos["level_id"].dtype == infos["step_level_id"].dtype == np.int64
        assert observations["length"].tolist() == infos["level_id"].tolist() == envs.level_ids.tolist()
        drawn.append(infos["level_id"])
        done = infos.get("_final_obs", np.zeros(2, bool)).tolist()
        assert done == terminated.tolist() and not truncated.any()
        timeline.append((observations["place"][0].flatten().tolist(), rewards.tolist(), done))
        if any(done):
            first = done.index(True)
            assert infos["final_obs"][1 - first] is None
            played = int(infos["step_level_id"][first])
            assert infos["final_obs"][first]["length"] == played == infos["final_obs"][first]["place"][0][0]
            final = infos["final_info"]
            assert (final["place"][first], final["way"]["left"][first]) == (played, played)
            assert final["level_id"][first] == played and final["_level_id"].tolist() == done
            assert final["_place"].tolist() == infos["_final_info"].tolist() == done == infos["_begun"].tolist()
            assert infos["_place"].tolist() == [not one for one in done] == infos["way"]["_left"].tolist()
    assert [levels.tolist() for levels in drawn] == [[2, 4], [2, 4], [3, 4], [3, 4], [3, 5], [6, 5]]
    assert timeline == [
        ([1, 1], [1, 1], [False, False]),
        ([0, 2], [2, 2], [True, False]),
        ([1, 3], [1, 3], [False, False]),
        ([2, 0], [2, 4], [False, True]),
        ([0, 1], [3, 1], [True, False]),
    ]
    envs.close()


def test_what_is_returned_is_what_gymnasium_returns_where_it_resets_in_the_same_step() -> None:
    theirs = SyncVectorEnv([StubbornCorridor] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = LevelVectorWrapper(
        SyncVectorEnv([StubbornCorridor] * 3, autoreset_mode=AutoresetMode.DISABLED, copy=False),
        SequentialLevels(9),
        check=False,
    )
    assert data_equivalence(theirs.reset()[0], ours.reset()[0], exact=True)
    assert ours.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    for vector in (theirs.envs, ours.env.envs):
        vector[1].place = 1  # so that not all end at once
    for _ in range(6):
        *expected, expected_infos = theirs.step(np.zeros(3, np.int64))
        *given, infos = ours.step(np.zeros(3, np.int64))
        for key in ("level_id", "_level_id", "step_level_id", "_step_level_id"):
            del infos[key]
        assert data_equivalence(tuple(expected), tuple(given), exact=True)
        assert infos.keys() == expected_infos.keys()
        for key in infos:
            assert equal_where_masked(infos, expected_infos, key)


def equal_where_masked(infos: dict[str, Any], others: dict[str, Any], key: str) -> bool:
    """Equal where the mask is true, as Gymnasium promises nothing elsewhere."""
    if isinstance(infos[key], dict):
        return infos[key].keys() == others[key].keys() and all(
            equal_where_masked(infos[key], others[key], k) for k in infos[key]
        )
    mask = infos.get(f"_{key}", np.ones(3, bool))
    return data_equivalence(infos[key][mask], others[key][mask], exact=True)


def test_sub_environments_without_set_level_play_their_seed() -> None:
    vector = SyncVectorEnv([Corridor] * 2, autoreset_mode=AutoresetMode.DISABLED)
    observations, infos = LevelVectorWrapper(vector, SequentialLevels([5, 3])).reset()
    assert observations[:, 0].tolist() == lengths_of(5, 3) and infos["level_id"].tolist() == [5, 3]
    assert [env.seeds for env in vector.envs] == [[0, 0, 1, 5], [1, 1, 2, 3]]


def test_a_buffer_hears_of_every_episode_and_of_named_levels() -> None:
    levels = LevelBuffer(levels=range(20), seed=0)
    envs = make_level_vector(ToldCorridor, 3, levels, actors=["a", "b", "c"], check=False)
    _, infos = envs.reset(options={"level_id": [7, None, 9]})
    assert infos["level_id"][[0, 2]].tolist() == [7, 9] and levels.episodes == 3
    assert [levels.in_flight(actor) for actor in "abc"] == [[level_id] for level_id in infos["level_id"].tolist()]
    assert envs.reset(options={"level_id": [1, 2, 3]})[1]["level_id"].tolist() == [1, 2, 3]
    assert [levels.in_flight(actor) for actor in "abc"] == [[1], [2], [3]]  # unfinished ones are forgotten
    envs.step(np.zeros(3, np.int64))
    assert levels.in_flight("a")[0] == 1 and len(levels.in_flight("a")) == 2 and levels.in_flight("b") == [2]
    with pytest.raises(ValueError, match="level 20 is none of the 20 levels"):
        envs.reset(options={"level_id": [18, 19, 20]})


def test_a_masked_reset_begins_only_some() -> None:
    levels = SequentialLevels(range(3, 30))
    envs = make_level_vector(ToldCorridor, 3, levels, check=False)
    envs.reset()
    envs.step(np.zeros(3, np.int64))
    mask = np.array([False, True, False])
    options = {"reset_mask": mask}
    observations, infos = envs.reset(options=options)
    assert observations.tolist() == [[3, 1], [6, 0], [5, 1]] and infos["level_id"].tolist() == [3, 6, 5]
    assert options == {"reset_mask": mask} and [levels.in_flight(actor) for actor in range(3)] == [[3], [6], [5]]


def test_after_a_resume_the_levels_are_those_of_a_run_without_a_break() -> None:
    levels = LevelBuffer(levels=range(40), seed=3)
    envs = make_level_vector(ToldCorridor, 4, levels)
    envs.reset()
    for _ in range(30):
        envs.step(np.zeros(4, np.int64))
    resumed = LevelBuffer(levels=range(40), seed=5)
    resumed.load_state_dict(levels.state_dict())
    expected = [levels.next_level(actor) for actor in range(4)]
    assert make_level_vector(ToldCorridor, 4, resumed).reset()[1]["level_id"].tolist() == expected
    assert [resumed.in_flight(actor) for actor in range(4)] == [[level_id] for level_id in expected]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_vector_that_resets_itself_is_refused(mode: AutoresetMode) -> None:
    vector = SyncVectorEnv([Corridor], autoreset_mode=mode)
    SyncVectorEnv([Corridor], autoreset_mode=AutoresetMode.DISABLED)  # changes the metadata the two share
    with pytest.raises(ValueError, match=rf"autoreset_mode is {mode}.*AutoresetMode.DISABLED.*make_level_vector"):
        LevelVectorWrapper(vector, SequentialLevels(9))


def test_set_level_that_a_seed_does_not_reach_and_what_chooses_no_levels_are_refused() -> None:
    vector = SyncVectorEnv([Corridor, ToldCorridor], autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match=r"set_level, which a seed does not reach.*make_level_vector.*LevelWrapper"):
        LevelVectorWrapper(vector, SequentialLevels(9))
    vector = SyncVectorEnv([Corridor], autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(TypeError, match="levels is None; it must be LevelBuffer"):
        LevelVectorWrapper(vector, None)


def test_arguments_in_the_wrong_place_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"levels is \[1, 2, 3\]; it must be LevelBuffer\(...\), UniformLevels"):
        make_level_vector(Corridor, 2, [1, 2, 3])
    with pytest.raises(TypeError, match="env is <.*Corridor object.*; it must be a Gymnasium id, or a callable"):
        make_level_vector(Corridor(), 2, SequentialLevels(9))


def test_errors_of_numbers_and_names() -> None:
    for actors in ([1], [1, 1], [1, 2, 3]):
        with pytest.raises(ValueError, match="a different name for each of 2 sub-environments"):
            make_level_vector(Corridor, 2, SequentialLevels(9), actors=actors)
    envs = make_level_vector(Corridor, 2, SequentialLevels(9))
    with pytest.raises(gymnasium.error.ResetNeeded, match="no level is played before the first reset"):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(gymnasium.error.ResetNeeded, match="call it once without reset_mask"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset()
    for mask in ([True, False], np.array([1, 0]), np.array([True])):
        with pytest.raises(ValueError, match=r"reset_mask is .*; a boolean array \[2\] is accepted"):
            envs.reset(options={"reset_mask": mask})
    for named in ([1, 2, 3], 4):
        with pytest.raises(ValueError, match=r"options\['level_id'\] is .*; name 2 levels, one for each"):
            envs.reset(options={"level_id": named})
    with pytest.raises(ValueError, match="level_id is -1"):
        envs.reset(options={"level_id": [-1, 2]})


def test_infos_cut_and_laid_over_each_other() -> None:
    first, second = np.array([True, False]), np.array([False, True])
    step = {"a": np.array([1, 2]), "_a": first | second, "deep": {"b": np.array([3, 4]), "_b": second}, "_deep": second}
    assert str(of_rows(step, first)) == str({"a": np.array([1, 2]), "_a": first})
    merged = overlaid(of_rows(step, second), {"a": np.array([9, 0]), "_a": first, "whole": "unmasked"})
    assert merged["a"].tolist() == [9, 2] and merged["_a"].all() and step["a"].tolist() == [1, 2]
    assert merged["deep"]["_b"].tolist() == [False, True] and merged["whole"] == "unmasked"
    deeper = overlaid(step, {"deep": {"b": np.array([7, 0]), "_b": first}, "_deep": first})
    assert deeper["deep"]["b"].tolist() == [7, 4] and deeper["deep"]["_b"].all() and deeper["_deep"].all()
