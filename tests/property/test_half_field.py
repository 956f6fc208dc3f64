# SPDX-License-Identifier: Apache-2.0
"""Whatever is played on the half field: bodies on it, numbers finite, reward 5 with a goal that ends the episode."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.envs import half_field as soccer
from lightning_replay.envs.half_field import HalfField

POWERS = st.floats(0.0, 100.0, width=32) | st.sampled_from([0.0, 100.0])
ANGLES = st.floats(-180.0, 180.0, width=32) | st.sampled_from([0.0, 90.0, -180.0, 180.0])
CHOICES = st.sampled_from(["dash", "turn", "kick", "to the ball", "at the goal"])
ACTIONS = st.lists(st.tuples(CHOICES, POWERS, ANGLES), min_size=1, max_size=60)


def _action(env: HalfField, choice: str, power: float, angle: float) -> tuple:
    """A random action, or one that a player who knows the game would take, so that goals happen."""
    player, ball = env.player, env.ball
    if choice == "to the ball":
        angle = math.degrees(math.remainder(math.atan2(ball.y - player.y, ball.x - player.x) - env.heading, math.tau))
    if choice == "at the goal":
        angle = math.degrees(math.remainder(math.atan2(-ball.y, 52.5 - ball.x) - env.heading, math.tau))
        power = 100.0
    pair = np.array([power, angle], np.float32)
    index = {"dash": 0, "to the ball": 0, "turn": 1}.get(choice, 2)
    return index, pair, pair[1:], pair


@settings(max_examples=100)
@given(
    task=st.sampled_from(HalfField.TASKS),
    keeper=st.booleans(),
    noise=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**31 - 1),
    actions=ACTIONS,
)
def test_the_state_stays_in_bounds_and_only_goals_pay(task, keeper, noise, seed, actions) -> None:
    env = HalfField(task, keeper=keeper, player_noise=noise, ball_noise=noise, kick_noise=noise, max_steps=50)
    observation, info = env.reset(seed=seed)
    assert env.observation_space.contains(observation) and not info["goal"]
    for number, (choice, power, angle) in enumerate(actions, start=1):
        at_rest = env.ball.speed == 0.0
        before = (env.ball.x, env.ball.y)
        observation, reward, terminated, truncated, info = env.step(_action(env, choice, power, angle))
        assert env.observation_space.contains(observation)
        bodies = [env.player, env.ball] + ([env.keeper.body] if env.keeper else [])
        for body in bodies:
            assert 0.0 <= body.x <= soccer.FIELD_LENGTH and abs(body.y) <= soccer.HALF_WIDTH
            assert body.speed <= body.speed_max * body.decay + 1e-9
        assert abs(env.heading) <= math.pi
        assert math.dist(before, (env.ball.x, env.ball.y)) <= soccer.BALL_SPEED_MAX + 1e-9
        assert info["kicked"] or not at_rest or (env.ball.x, env.ball.y) == before
        assert (reward, info["goal"]) in {(0.0, False), (5.0, True)}
        assert not info["goal"] or (terminated and env.ball.x == soccer.FIELD_LENGTH and abs(env.ball.y) < 7.01)
        assert not (terminated and truncated) and not (info["caught"] and (info["goal"] or not keeper))
        on_a_line = env.ball.x in (0.0, soccer.FIELD_LENGTH) or abs(env.ball.y) == soccer.HALF_WIDTH
        assert terminated == (info["caught"] or (on_a_line and (env.ball.x, env.ball.y) != before))
        if terminated or truncated:
            assert terminated or number == 50
            break
