# SPDX-License-Identifier: Apache-2.0
"""MinAtar's games as Gymnasium environments: images, seeds, ends."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lightning_replay.envs.atari import GAMES


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "minatar", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs MinAtar, .*pip install 'lightning-replay\[minatar\]'"):
        gymnasium.make("MinAtar-v0", game="breakout")


def make(game: str = "breakout", **options) -> gymnasium.Env:
    pytest.importorskip("minatar")
    return gymnasium.make("MinAtar-v0", game=game, **options)


@pytest.mark.parametrize("game", ["asterix", "breakout", "freeway", "seaquest", "space_invaders"])
def test_every_game_keeps_gymnasiums_rules(game) -> None:
    env = make(game)
    assert game in GAMES
    check_env(env.unwrapped, skip_render_check=True)
    assert env.observation_space.shape[1:] == (10, 10) and env.observation_space.dtype == np.uint8


def test_the_image_shows_paddle_ball_trail_and_bricks() -> None:
    env = make(sticky_action_probability=0.0)
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
    env = make(sticky_action_probability=0.5)
    first = play(env, 1)
    env.step(2)
    assert (play(env, 1) == first).all()  # whatever the last action was
    assert any((play(env, seed) != first).any() for seed in (2, 3, 4))


def test_actions_can_be_all_six_and_the_minimal_ones_mean_the_same() -> None:
    few, all_six = make(sticky_action_probability=0.0), make(sticky_action_probability=0.0, minimal_actions=False)
    assert few.action_space.n == 3 and all_six.action_space.n == 6
    few.reset(seed=0), all_six.reset(seed=0)
    # nothing, left, right are 0, 1 and 3 of nothing, left, up, right, down, fire
    for ours, theirs in ((1, 1), (2, 3), (0, 0), (2, 3)):
        assert (few.step(ours)[0] == all_six.step(theirs)[0]).all()


def test_an_episode_is_truncated_after_max_steps() -> None:
    env = make("freeway", max_steps=5)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(5)] == [(False, False)] * 4 + [(False, True)]
