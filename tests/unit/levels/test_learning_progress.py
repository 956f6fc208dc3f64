# SPDX-License-Identifier: Apache-2.0
"""Teacher-student curriculum: slopes by hand, unseen levels first, save and resume."""

from __future__ import annotations

import pytest

from lightning_replay.levels import Boltzmann, LearningProgress, LevelBuffer, tscl
from tests.level_steps import scored


def test_slopes_by_hand():
    progress = LearningProgress(window=3, step_size=0.5)
    assert progress.of_episode(7, 2, 1.0) == 1.0, "one return: slope 1, and Q began at 1"
    assert progress.of_episode(7, 4, 0.0) == 0.25, "slope -1/2, Q = (1 - 1/2) / 2"
    # (2, 1), (4, 0), (6, 2): slope 1/4, Q = (1/4 + 1/4) / 2
    assert progress.of_episode(7, 6, 2.0) == pytest.approx(0.25)
    # (4, 0), (6, 2), (8, 0): slope 0
    assert progress.of_episode(7, 8, 0.0) == pytest.approx(0.125)


def test_unseen_levels_come_first_and_falling_returns_count_as_progress():
    levels = tscl(4, window=2, epsilon=0.0, seed=0)
    assert len(levels) == 4, "every level has a score from the start"
    seen = []
    for episode_return in (0.5, 0.5, 0.5, 0.5):
        seen.append(levels.next_level(0))
        levels.update(0, seen[-1], scored(episode_return), episode_done=True)
    assert len(set(seen[:2])) == 2 or seen[0] == seen[1], "ties are broken at random"
    levels.start(0, 2)
    levels.update(0, 2, scored(0.5), episode_done=True)
    levels.start(0, 2)
    before = dict(zip(*(levels.probabilities()[name].tolist() for name in ("level_id", "score")), strict=True))
    score = levels.update(0, 2, scored(-3.5), episode_done=True)
    assert score > before[2]
    assert score > 0.0


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


def test_the_boltzmann_variant_is_put_together_by_hand():
    levels = LevelBuffer(
        3, score=LearningProgress(), prioritization=Boltzmann(), score_temperature=1.0, staleness_weight=0.3, seed=0
    )
    assert levels.next_level(0) in range(3)


def test_what_is_refused():
    with pytest.raises(ValueError, match="window is 1"):
        LearningProgress(window=1)
    with pytest.raises(ValueError, match="step_size is 0"):
        LearningProgress(step_size=0.0)
    with pytest.raises(ValueError, match="known set of levels"):
        LevelBuffer(capacity=3, score=LearningProgress())
    with pytest.raises(ValueError, match="scored by segments and these by episodes"):
        tscl(3).load_state_dict(LevelBuffer(3).state_dict())
