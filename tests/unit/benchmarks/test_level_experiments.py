# SPDX-License-Identifier: Apache-2.0
"""What the experiments on levels stand on: copied grids step as MiniGrid's do, locks open as stated, PPO's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_replay.envs.multi_room import MultiRooms
from lightning_replay.levels import LevelBuffer, UniformLevels, scores
from tests.benchmarks.learning.experiments import lock_temperatures, locks
from tests.benchmarks.learning.learners import combination_lock
from tests.benchmarks.learning.learners.multi_room_ppo import PPO, Collector, Settings, advantages, score, test_returns
from tests.benchmarks.learning.learners.vector_multi_room import MINIGRID_ACTIONS, Grids, VectorMultiRoom

test_returns.__test__ = False  # a function of the experiment, not a test
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def grids() -> Grids:
    return Grids.generate(range(24))


def test_copied_grids_step_as_minigrid_does(grids) -> None:
    count = len(grids.rooms)
    vector = VectorMultiRoom(grids, count)
    vector.reset(torch.arange(count), torch.arange(count))
    envs = [MultiRooms() for _ in range(count)]
    seen = [env.reset(seed=level)[0] for level, env in enumerate(envs)]
    generator = torch.Generator().manual_seed(0)
    playing, opened, goals, limits = set(range(count)), 0, 0, 0
    for _ in range(80):
        action = torch.multinomial(torch.tensor([0.15, 0.15, 0.4, 0.3]), count, True, generator=generator)
        reward, terminated, truncated = vector.step(action)
        image = vector.observation().numpy()
        for row in sorted(playing):
            following, paid, done, late, _ = envs[row].step(MINIGRID_ACTIONS[action[row]])
            assert np.array_equal(image[row], following)
            assert (reward[row].item(), terminated[row].item(), truncated[row].item()) == (
                pytest.approx(paid),
                done,
                late,
            )
            opened += int((following[..., 2] != seen[row][..., 2]).any() and action[row] == 3)
            goals, limits = goals + done, limits + late
            seen[row] = following
            if done or late:
                playing.remove(row)
    assert not playing and opened and goals and limits  # it saw doors, goals and time limits


def test_the_goal_reached_at_the_last_moment_is_no_time_limit() -> None:
    image = torch.tensor([1, 0, 0], dtype=torch.uint8).expand(1, 14, 14, 3).clone()
    image[0, 2, 1, 0] = 8
    one = Grids(image, torch.tensor([[1, 1]]), torch.tensor([3]), torch.tensor([1]))
    vector = VectorMultiRoom(one, 1)
    vector.reset(torch.tensor([0]), torch.tensor([0]))
    for _ in range(79):
        vector.step(torch.tensor([0]))
    reward, terminated, truncated = vector.step(torch.tensor([2]))
    assert (reward.item(), terminated.item(), truncated.item()) == (pytest.approx(0.1), True, False)


def test_resetting_one_environment_leaves_the_others(grids) -> None:
    vector = VectorMultiRoom(grids, 3)
    vector.reset(torch.arange(3), torch.tensor([0, 1, 2]))
    vector.step(torch.tensor([0, 1, 0]))
    before = vector.observation()
    vector.reset(torch.tensor([1]), torch.tensor([7]))
    after = vector.observation()
    assert np.array_equal(after[1].numpy(), MultiRooms().reset(seed=7)[0])
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_rollouts_name_the_level_of_each_step_and_give_every_level_its_score(grids) -> None:
    levels = LevelBuffer(range(24), seed=0)
    env = VectorMultiRoom(grids, 4)
    collector, learner = Collector(env, 4, levels, 0, CPU), PPO(Settings(envs=4, rollout_steps=60), 0, CPU)
    begun = torch.ones(4, dtype=torch.bool)
    for _ in range(3):
        rollout = collector.rollout(learner.network, 60)
        for step in range(60):
            first, level = rollout["image"][begun, step], rollout["level_id"][begun, step]
            starts = VectorMultiRoom(grids, len(level))
            starts.reset(torch.arange(len(level)), level)
            assert torch.equal(first, starts.observation())
            begun = rollout["next", "done"][:, step]
        score(levels, rollout)
    assert len(collector.returns) == levels.episodes - 4 > 4
    assert [len(levels.in_flight(actor)) for actor in range(4)] == [1] * 4
    learner.learn(rollout)


def test_a_time_limit_ends_the_task(grids) -> None:
    learner = PPO(Settings(envs=2, rollout_steps=1), 0, CPU)
    learner.network.policy.bias.data[:] = torch.tensor([1e6, 0.0, 0.0, 0.0])  # it turns for ever
    rollout = Collector(VectorMultiRoom(grids, 2), 2, UniformLevels(24, seed=0), 0, CPU).rollout(learner.network, 85)
    following = rollout["next"]
    assert following["terminated"].nonzero().tolist() == [[0, 79], [1, 79]]
    assert torch.equal(following["done"], following["terminated"]) and not following["truncated"].any()
    assert torch.equal(following["state_value"][:, :-1], rollout["state_value"][:, 1:])


def test_advantages_are_those_the_scores_are_made_of(grids) -> None:
    settings = Settings(envs=3, rollout_steps=100)
    learner = PPO(settings, 0, CPU)
    env = VectorMultiRoom(grids, 3)
    rollout = Collector(env, 3, UniformLevels(24, seed=0), 0, CPU).rollout(learner.network, 100)
    assert rollout["next", "done"].any()
    ours = advantages(rollout, settings)
    for row in range(3):
        steps = rollout[row]
        expected = scores.generalized_advantages(
            *(steps["next", "reward"], steps["state_value"], steps["next", "state_value"]),
            *(steps["next", "terminated"], steps["next", "done"]),
            discount=settings.discount,
            gae_lambda=settings.gae_lambda,
        )
        assert torch.allclose(ours[row], expected.float(), atol=1e-5)


def test_returns_of_a_policy_that_only_turns_are_nothing(grids) -> None:
    learner = PPO(Settings(envs=1, rollout_steps=1), 0, CPU)
    learner.network.policy.bias.data[:] = torch.tensor([1e6, 0.0, 0.0, 0.0])
    assert test_returns(learner.network, grids, 0).tolist() == [0.0] * 24


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
