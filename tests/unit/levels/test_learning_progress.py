# SPDX-License-Identifier: Apache-2.0
"""Teacher-student curriculum: slopes by hand, unseen levels first, save and resume."""

from __future__ import annotations

import math

import pytest

from lightning_replay.levels import Boltzmann, LearningProgress, LevelBuffer, tscl
from tests.level_steps import column, scored


def test_slopes_by_hand():
    progress = LearningProgress(window=3, step_size=0.5)
    assert progress.of_episode(7, 2, 1.0) == 1.0, "one return: slope 1, and Q began at 1"
    assert progress.of_episode(7, 4, 0.0) == 0.25, "slope -1/2, Q = (1 - 1/2) / 2"
    # (2, 1), (4, 0), (6, 2): slope 1/4, Q = (1/4 + 1/4) / 2
    assert progress.of_episode(7, 6, 2.0) == pytest.approx(0.25)
    # (4, 0), (6, 2), (8, 0): slope 0
    assert progress.of_episode(7, 8, 0.0) == pytest.approx(0.125)


def test_the_initial_value_counts_in_the_first_average_and_keeps_its_sign():
    """Steps of 1/2 from -3: one return, slope 1, Q = (1 - 3) / 2; a fall by 2, Q = (-2 - 1) / 2; none, Q = -3/4."""
    progress = LearningProgress(window=2, step_size=0.5, initial_value=-3.0)
    assert progress.initial_score == 3.0 and progress.values() == {}
    assert progress.of_episode(7, 1, 5.0) == 1.0 and progress.values() == {7: -1.0}
    assert progress.of_episode(7, 2, 3.0) == 1.5 and progress.values() == {7: -1.5}
    assert progress.of_episode(7, 3, 3.0) == 0.75 and progress.values() == {7: -0.75}
    progress.values().clear()
    again = LearningProgress(window=2, step_size=0.5)
    again.load_state_dict(progress.state_dict())
    assert again.values() == {7: -0.75}
    assert again.of_episode(8, 4, 1.0) == 1.0, "the option of the constructor, for levels that were not played"


def test_before_their_first_episode_levels_have_the_initial_score():
    levels = tscl(3, epsilon=0.0, seed=0, initial_value=-0.25)
    assert column(levels, "score") == {0: 0.25, 1: 0.25, 2: 0.25}
    first = levels.next_level(0)
    levels.update(0, first, scored(0.5), episode_done=True)
    assert levels.score.values() == {first: 1.0}
    assert levels.next_level(0) == first, "slope 1 is more than 1/4"
    assert column(tscl(3), "score") == {0: 1.0, 1: 1.0, 2: 1.0}


def test_unseen_levels_come_first_and_falling_returns_count_as_progress():
    levels = tscl(4, window=2, epsilon=0.0, seed=0)
    assert len(levels) == 4, "every level has a score from the start"
    seen = []
    for _ in range(8):  # a level whose return was the same twice has slope 0, after one episode it still has 1
        seen.append(levels.next_level(0))
        levels.update(0, seen[-1], scored(0.5), episode_done=True)
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    levels.start(0, 2)
    levels.update(0, 2, scored(0.5), episode_done=True)
    levels.start(0, 2)
    before = dict(zip(*(levels.probabilities()[name].tolist() for name in ("level_id", "score")), strict=True))
    score = levels.update(0, 2, scored(-3.5), episode_done=True)
    assert score > before[2]
    assert score > 0.0
    levels = LevelBuffer(
        3, score=LearningProgress(), prioritization=Boltzmann(), score_temperature=1.0, staleness_weight=0.3, seed=0
    )
    played = {levels.next_level(actor) for actor in range(200)}
    assert played == {0, 1, 2}


def test_the_state_holds_the_windows():
    levels = tscl(3, seed=1)
    for _ in range(12):
        levels.update(0, levels.next_level(0), scored(0.25), episode_done=True)
    other = tscl(3, seed=2)
    other.load_state_dict(levels.state_dict())
    for _ in range(10):
        level_id = levels.next_level(0)
        assert other.next_level(0) == level_id
        assert other.update(0, level_id, scored(0.5), episode_done=True) == levels.update(
            0, level_id, scored(0.5), episode_done=True
        )


class GivenScores:
    """Scores of episodes, given by the test, one after the other."""

    initial_score = 1.0

    def __init__(self, *answers: float) -> None:
        self._answers = iter(answers)

    def of_episode(self, level_id: int, episode: int, episode_return: float) -> float:
        assert episode_return == 0.25, "a retry counts the rewards once"
        return next(self._answers)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        assert not state


def test_scores_of_episodes_that_are_no_numbers_and_others_states_are_refused():
    levels = LevelBuffer(2, score=GivenScores(math.nan, 0.5), seed=0)
    levels.start(0, 1)
    with pytest.raises(ValueError, match="the score of level 1 is nan"):
        levels.update(0, 1, scored(0.25), episode_done=True)
    assert levels.update(0, 1, scored(0.25), episode_done=True) == 0.5
    with pytest.raises(ValueError, match="it must be finite"):
        LearningProgress().of_episode(0, 1, math.inf)
    with pytest.raises(ValueError, match="known set of levels"):
        LevelBuffer(capacity=3, score=LearningProgress())
    with pytest.raises(ValueError, match="scored by segments and these by episodes"):
        tscl(3).load_state_dict(LevelBuffer(3).state_dict())
