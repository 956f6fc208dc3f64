# SPDX-License-Identifier: Apache-2.0
"""Atari's preprocessing on a game of known frames and lives and on the real ones, and MinAtar's games."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lightning_replay.envs.atari import GAMES, LifeEpisodes


class Lives(gymnasium.Env):
    """Observation: [game, step of the game]. Of two lives, one is lost by each step with action 9."""

    observation_space = gymnasium.spaces.Box(0, 99, (2,), np.uint8)
    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, dies_when_idle: bool = False, last_step: int = 99) -> None:
        self.game = 0
        self.dies_when_idle = dies_when_idle
        self.last_step = last_step

    def reset(self, *, seed=None, options=None):
        self.game, self.count, self.lives = self.game + 1, 0, 2
        return self.now()

    def now(self):
        return np.array([self.game, self.count], np.uint8), {"lives": self.lives}

    def step(self, action):
        self.count += 1
        self.lives -= action == 9 or (action == 0 and self.dies_when_idle)
        observation, info = self.now()
        return observation, 0.0, self.lives == 0, self.count >= self.last_step, info


def test_a_lost_life_ends_the_episode_and_only_the_last_the_game() -> None:
    env = LifeEpisodes(Lives())
    assert env.reset()[0].tolist() == [1, 0]
    assert env.step(1)[2:4] == (False, False)
    assert env.step(9)[2:4] == (True, False)
    assert env.reset()[0].tolist() == [1, 3]  # after one idle step of the same game
    assert env.step(1)[2:4] == (False, False)
    assert env.step(9)[2:4] == (True, False)
    assert env.reset()[0].tolist() == [2, 0]
    assert env.step(1)[2:4] == (False, False)  # its lives are counted anew
    env = LifeEpisodes(Lives(dies_when_idle=True))
    env.reset()
    assert env.step(9)[2]
    assert env.reset()[0].tolist() == [2, 0]
    env = LifeEpisodes(Lives(last_step=2))
    env.reset()
    env.step(1)
    assert env.step(9)[2:4] == (True, True)  # a life lost in the last step
    assert env.reset()[0].tolist() == [2, 0]
    env.step(9)
    assert env.reset(seed=3)[0].tolist() == [3, 0]
    env.step(9)
    assert env.reset(options={"any": 1})[0].tolist() == [4, 0]
    env.step(1)
    assert env.reset()[0].tolist() == [5, 0]


def make(**options) -> gymnasium.Env:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    return gymnasium.make("Atari-v0", **({"game": "Breakout"} | options))


def test_observations_are_the_last_four_images_of_every_fourth_frame() -> None:
    env = make(noops=0)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    first, info = env.reset(seed=0)
    assert first.dtype == np.uint8 and (first == first[0]).all() and first.max() > 0
    start = info["episode_frame_number"]
    second, _, _, _, info = env.step(1)
    assert info["episode_frame_number"] == start + 4
    third = env.step(3)[0]
    assert (second[:3] == first[0]).all() and (third[2] == second[3]).all() and (third[:2] == first[0]).all()
    assert (third[3] != third[2]).any()
    env.close()


@pytest.mark.slow
def test_idle_frames_at_the_start_differ_by_seed_and_a_seed_repeats_the_game() -> None:
    env = make(game="Pong")
    starts = [env.reset(seed=seed)[1]["episode_frame_number"] for seed in range(8)]
    assert len(set(starts)) > 4 and max(starts) - min(starts) < 30

    def play():
        images = [env.reset(seed=5)[0]]
        images += [env.step(action)[0] for action in (0, 2, 3, 2, 5, 1)]
        return np.stack(images)

    assert (play() == play()).all()
    env.close()


@pytest.mark.slow
def test_rewards_are_clipped_and_lives_end_episodes_only_to_learn_from() -> None:
    played = {}
    for learns in (True, False):
        env = make(game="SpaceInvaders", ends_with_life=learns, clips_rewards=learns)
        env.reset(seed=0)
        rewards, ends = [], []
        for step in range(900):
            _, reward, terminated, _, info = env.step([1, 2, 1, 3][step % 4])
            rewards.append(reward)
            if terminated:
                ends.append(info["lives"])
                env.reset()
        played[learns] = rewards, ends
        env.close()
    (clipped, life_ends), (whole, game_ends) = played[True], played[False]
    assert set(clipped) == {0.0, 1.0} and max(whole) >= 5.0
    assert life_ends[:3] == [2, 1, 0] and set(game_ends) == {0}


def test_a_game_is_truncated_after_so_many_frames() -> None:
    env = make(noops=0, max_frames=40)
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(10)]
    assert ends == [(False, False)] * 9 + [(False, True)]
    env.close()


def test_an_unknown_game_is_refused() -> None:
    with pytest.raises(ValueError, match=r"game is 'Breakot', which ale-py does not have.*Breakout.*ALE/NAME-v5"):
        make(game="Breakot")


def minatar(game: str = "breakout", **options) -> gymnasium.Env:
    pytest.importorskip("minatar")
    return gymnasium.make("MinAtar-v0", game=game, **options)


@pytest.mark.parametrize("game", ["asterix", "breakout", "freeway", "seaquest", "space_invaders"])
def test_every_game_keeps_gymnasiums_rules(game) -> None:
    env = minatar(game)
    assert game in GAMES
    check_env(env.unwrapped, skip_render_check=True)
    assert env.observation_space.shape[1:] == (10, 10) and env.observation_space.dtype == np.uint8


def test_the_image_shows_paddle_ball_trail_and_bricks() -> None:
    env = minatar(sticky_action_probability=0.0)
    image, _ = env.reset(seed=0)
    assert image.shape == (4, 10, 10) and image.flags["C_CONTIGUOUS"]
    paddle, ball, trail, bricks = image
    assert np.argwhere(paddle).tolist() == [[9, 4]]
    assert np.argwhere(ball).tolist() in ([[3, 0]], [[3, 9]]) and (trail == ball).all()
    assert bricks.sum() == 30 and bricks[1:4].all()
    image = env.step(1)[0]  # to the left
    assert np.argwhere(image[0]).tolist() == [[9, 3]]
    assert (image[2] == ball).all()


def play(env, seed, steps=60):
    images = [env.reset(seed=seed)[0]]
    for step in range(steps):
        image, _, terminated, _, _ = env.step(step % 3)
        images.append(env.reset()[0] if terminated else image)
    return np.stack(images)


def test_a_seed_repeats_the_games_and_seeds_differ() -> None:
    env = minatar(sticky_action_probability=0.5)
    first = play(env, 1)
    env.step(2)
    assert (play(env, 1) == first).all()  # whatever the last action was
    assert any((play(env, seed) != first).any() for seed in (2, 3, 4))


def test_actions_can_be_all_six_and_the_minimal_ones_mean_the_same() -> None:
    few, all_six = minatar(sticky_action_probability=0.0), minatar(sticky_action_probability=0.0, minimal_actions=False)
    assert few.action_space.n == 3 and all_six.action_space.n == 6
    few.reset(seed=0), all_six.reset(seed=0)
    # nothing, left, right are 0, 1 and 3 of nothing, left, up, right, down, fire
    for ours, theirs in ((1, 1), (2, 3), (0, 0), (2, 3)):
        assert (few.step(ours)[0] == all_six.step(theirs)[0]).all()


def test_an_episode_is_truncated_after_max_steps() -> None:
    env = minatar("freeway", max_steps=5)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(5)] == [(False, False)] * 4 + [(False, True)]
