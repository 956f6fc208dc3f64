# SPDX-License-Identifier: Apache-2.0
"""The keeper of the half field: where it stands, what it catches, and shots that beat it."""

from __future__ import annotations

import math

import pytest

from lightning_replay.envs import half_field as soccer
from lightning_replay.envs.half_field import HalfField, Keeper
from tests.half_field_actions import dash, kick, placed, turn


@pytest.mark.parametrize(
    ("start", "end", "caught"),
    [
        ((48.0, 0.0), (49.4, 0.0), False),
        ((48.0, 0.0), (49.6, 0.0), True),
        ((48.0, 0.0), (52.0, 0.0), True),  # past the keeper within the step
        ((48.0, 0.9), (52.0, 0.9), True),
        ((48.0, 1.1), (52.0, 1.1), False),
        ((48.0, -2.0), (52.0, 1.0), True),  # slanting through it
        ((48.0, -3.0), (50.0, 3.0), False),  # slanting past its corner
        ((50.2, 0.3), (50.2, 0.3), True),  # lying in it
        ((50.2, 1.3), (50.2, 1.3), False),
    ],
)
def test_what_a_keeper_catches(start: tuple[float, float], end: tuple[float, float], caught: bool) -> None:
    keeper = Keeper()
    keeper.body.place(50.0, 0.0)
    assert keeper.catches(*start, *end) is caught
    assert keeper.catches(*end, *start) is caught


def test_the_keeper_walks_to_the_line_between_ball_and_goal() -> None:
    keeper, ball = Keeper(), soccer.ball()
    keeper.start(1.0)
    assert (keeper.body.x, keeper.body.y) == pytest.approx((51.5, 3.505))
    ball.place(22.5, -40.0 * 0.5)
    keeper.act(ball)
    assert math.hypot(keeper.body.x - 51.5, keeper.body.y - 3.505) == pytest.approx(0.24)
    for _ in range(30):
        keeper.act(ball)
    distance = math.hypot(30.0, 20.0)
    assert (keeper.body.x, keeper.body.y) == pytest.approx((52.5 - 3.0 * 30.0 / distance, -3.0 * 20.0 / distance))
    ball.place(49.5, 0.0)
    for _ in range(30):
        keeper.act(ball)
    assert (keeper.body.x, keeper.body.y) == pytest.approx((51.5, 0.0))


def test_the_keeper_meets_shots_on_target_alone() -> None:
    keeper, ball = Keeper(), soccer.ball()
    ball.place(40.0, 0.0)
    ball.velocity_x, ball.velocity_y = 2.5, 1.0  # would cross the line at y = 5
    keeper.body.place(52.5, 0.0)
    keeper.act(ball)
    nearest = 12.5 * 2.5**2 / (2.5**2 + 1.0)  # x of the point of the way nearest to the keeper
    assert keeper.body.y / (52.5 - keeper.body.x) == pytest.approx((nearest * 0.4) / (12.5 - nearest))
    ball.velocity_x, ball.velocity_y = 0.5, 0.1  # rolls 8.3 m, not as far as the line
    keeper.body.place(51.5, 0.0)
    keeper.act(ball)
    assert keeper.body.y == 0.0 and keeper.body.x < 51.5


def test_a_caught_ball_ends_the_episode_without_reward() -> None:
    env = placed(ball=(48.0, 0.0), player=(47.5, 0.0), keeper=True)
    assert env.keeper is not None
    env.keeper.body.place(51.0, 0.0)
    env.step(kick(100.0, 0.0))
    observation, reward, terminated, truncated, info = env.step(turn(0.0))
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["caught"] and not info["goal"] and env.observation_space.contains(observation)


def test_a_shot_into_the_corner_beats_the_keeper() -> None:
    env = placed(ball=(46.0, 4.0), player=(45.5, 4.0), keeper=True)
    assert env.keeper is not None
    env.keeper.body.place(51.0, 0.0)
    angle = math.degrees(math.atan2(2.5, 6.5))
    outcomes = [env.step(kick(100.0, angle)), env.step(turn(0.0)), env.step(turn(0.0))]
    assert [outcome[1] for outcome in outcomes] == [0.0, 0.0, 5.0]


def test_shots_at_the_keeper_are_caught_and_a_dribble_with_a_shot_past_it_scores() -> None:
    assert _goals(shoot_within=60.0, aim=0.0) == 0
    assert _goals(shoot_within=12.0, aim=6.3) >= 20


def _goals(shoot_within: float, aim: float) -> int:
    """Goals of 25 episodes: run to the ball, push it towards the goal, then shoot to the side the keeper is not on."""
    env, goals = HalfField("target", keeper=True), 0
    for seed in range(25):
        _, info = env.reset(seed=seed)
        reward, done = 0.0, False
        while not done:
            player, ball = env.player, env.ball
            assert env.keeper is not None
            if info["ball_distance"] > soccer.KICKABLE_DISTANCE:
                x, y = ball.x + 2 * ball.velocity_x - player.x, ball.y + 2 * ball.velocity_y - player.y
                action = dash(100.0, _degrees(math.atan2(y, x) - env.heading))
            else:
                near = info["goal_distance"] < shoot_within
                keeper_side = (52.5 - ball.x) * (env.keeper.body.y - ball.y) + ball.y * (env.keeper.body.x - ball.x)
                to = math.copysign(aim, -keeper_side) if near else 0.0
                action = kick(100.0 if near else 5.0, _degrees(math.atan2(to - ball.y, 52.5 - ball.x) - env.heading))
            _, reward, terminated, truncated, info = env.step(action)
            done = terminated or truncated
        goals += reward == 5.0
    return goals


def _degrees(angle: float) -> float:
    return math.degrees(math.remainder(angle, math.tau))
