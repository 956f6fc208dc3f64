# SPDX-License-Identifier: Apache-2.0
"""Atari's preprocessing on a game of known frames and lives, and on the real ones."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest

from lightning_replay.envs.atari import LifeEpisodes


@pytest.mark.parametrize(("module", "package"), [("ale_py", "ale-py"), ("cv2", "opencv-python-headless")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(module, package, monkeypatch) -> None:
    if module == "cv2":
        pytest.importorskip("ale_py")
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"an Atari game needs {package}, which is not installed: pip install 'lightning-replay\[atari\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        gymnasium.make("Atari-v0", game="Breakout")


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


def test_a_game_over_during_the_idle_step_begins_a_new_game() -> None:
    env = LifeEpisodes(Lives(dies_when_idle=True))
    env.reset()
    assert env.step(9)[2]
    assert env.reset()[0].tolist() == [2, 0]


def test_truncated_seeded_and_interrupted_games_begin_anew() -> None:
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


def test_idle_frames_at_the_start_differ_by_seed_and_a_seed_repeats_the_game() -> None:
    env = make(game="Pong")
    starts = [env.reset(seed=seed)[1]["episode_frame_number"] for seed in range(12)]
    assert len(set(starts)) > 5 and max(starts) - min(starts) < 30

    def play():
        images = [env.reset(seed=5)[0]]
        images += [env.step(action)[0] for action in (0, 2, 3, 2, 5, 1)]
        return np.stack(images)

    assert (play() == play()).all()
    env.close()


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
