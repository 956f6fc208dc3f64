# SPDX-License-Identifier: Apache-2.0
"""What the experiments on combination locks rest on: locks open as stated, scores are of what is learned from."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_replay.levels import scores
from tests.benchmarks.learning.experiments import lock_temperatures, locks
from tests.benchmarks.learning.learners import combination_lock


def test_a_lock_opens_as_often_as_is_stated() -> None:
    locks, player = combination_lock.CombinationLocks(0), combination_lock.TabularActorCritic()
    player.logits[np.arange(40), locks.opens] = 1.5
    chance = locks.success(player)
    assert chance[0] == pytest.approx(np.exp(1.5) / (np.exp(1.5) + 3))
    assert chance[2] == pytest.approx(chance[0] ** 3)
    episodes = locks.play(np.full(20_000, 2), player, np.random.default_rng(0))
    wins = episodes.reward.sum(1)
    assert wins.mean() == pytest.approx(chance[2], abs=5 * (chance[2] / 20_000) ** 0.5)
    assert (episodes.length[wins == 1] == 3).all() and (episodes.length[wins == 0] <= 3).all()


def test_scores_of_locks_are_made_of_the_advantages_that_are_learned_from() -> None:
    locks, player = combination_lock.CombinationLocks(0), combination_lock.TabularActorCritic()
    player.values[:] = np.random.default_rng(0).random(player.values.shape)
    player.logits[np.arange(40), locks.opens] = 3.0
    episodes = locks.play(np.arange(16), player, np.random.default_rng(1))
    expected = np.abs(combination_lock.advantages(episodes)).sum(1) / episodes.length
    score_of = scores.L1ValueLoss(combination_lock.DISCOUNT, combination_lock.GAE_LAMBDA)
    assert [float(score_of(steps)) for steps in episodes.segments()] == pytest.approx(expected.tolist())


def test_learning_from_a_lock_opens_it() -> None:
    locks, player = combination_lock.CombinationLocks(0), combination_lock.TabularActorCritic()
    generator = np.random.default_rng(0)
    before = locks.success(player)
    for _ in range(50):
        player.learn(locks.play(np.full(16, 1), player, generator))
    after = locks.success(player)
    assert after[1] > 0.9 > before[1]
    assert after.mean() > before.mean()  # other locks have its stages


def test_a_critic_that_does_not_see_the_end_values_a_stage_alike_in_every_lock() -> None:
    player = combination_lock.TabularActorCritic(sees_end=False)
    assert player.distance(np.array([8, 3, 1, 0])).tolist() == [1, 1, 1, 0]
    locks = combination_lock.CombinationLocks(0)
    for _ in range(20):
        player.learn(locks.play(np.arange(16), player, np.random.default_rng(0)))
    assert player.values[1].any() and not player.values[2:].any()
    value = locks.play(np.arange(16), player, np.random.default_rng(1)).state_value
    assert np.array_equal(value[:, 0], player.values[1, locks.stage[:16, 0]])


def test_no_level_is_started_twice_for_one_update() -> None:
    settings = {"score_temperature": 0.1, "staleness_weight": 0.1}
    levels, generator = locks.levels_of(settings, seed=0), np.random.default_rng(0)
    problem, player = combination_lock.CombinationLocks(0), combination_lock.TabularActorCritic()
    begun = 0
    for _ in range(30):
        playing: list[int] = []
        for actor in range(16):
            playing.append(lock_temperatures.start_idle_level(levels, actor, playing, generator))
        assert len(set(playing)) == 16
        begun += 16
        locks.update(playing, problem, player, levels, generator)
    assert levels.episodes == begun and 16 < len(levels) < begun, "some are new and some replayed"
