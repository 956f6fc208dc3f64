# SPDX-License-Identifier: Apache-2.0
"""The observation of the half field: one vector in [-1, 1]."""

from __future__ import annotations

import math

import numpy as np

from lightning_replay.envs import soccer

NEAR = 10.0  # metres within which the ball's distance is also given at a finer scale
_DIAGONAL = math.hypot(soccer.FIELD_LENGTH, soccer.FIELD_WIDTH)
_CENTRE, _LEFT, _RIGHT = ((soccer.FIELD_LENGTH, y) for y in (0.0, soccer.HALF_GOAL, -soccer.HALF_GOAL))
_PLAYER_SPEED = soccer.PLAYER_SPEED_MAX * soccer.PLAYER_DECAY  # largest speed after a step
_BALL_SPEED = soccer.BALL_SPEED_MAX * soccer.BALL_DECAY


def observe(player: soccer.Body, heading: float, ball: soccer.Body, keeper: soccer.Body | None) -> np.ndarray:
    """Returns the observation; *seen* is distance, angle / 180, sine and cosine of the angle relative to the heading.

    Distances are scaled by the field's diagonal, speeds by the largest after a step.

    Returns:
        float32 ``[34]``, with a keeper ``[40]``: the player's position (0, 1), velocity (2, 3) and heading as sine and
        cosine (4, 5); the ball's position (6, 7), velocity (8, 9) and velocity relative to the heading (10, 11); the
        ball seen from the player (12 to 15), its distance up to 10 m (16), whether it can be kicked (17); the goal's
        centre seen from the ball (18 to 21), then seen from the player (22 to 25); the posts seen from the player
        (26 to 33); the keeper's position (34, 35), the keeper seen from the player (36 to 39).
    """
    sine, cosine = math.sin(heading), math.cos(heading)
    distance = math.hypot(ball.x - player.x, ball.y - player.y)
    velocity_x, velocity_y = ball.velocity_x / _BALL_SPEED, ball.velocity_y / _BALL_SPEED
    values = [
        *_scaled(player.x, player.y),
        *(player.velocity_x / _PLAYER_SPEED, player.velocity_y / _PLAYER_SPEED, sine, cosine),
        *_scaled(ball.x, ball.y),
        *(velocity_x, velocity_y, velocity_x * cosine + velocity_y * sine, velocity_y * cosine - velocity_x * sine),
        *_seen(player, heading, ball.x, ball.y),
        min(distance, NEAR) * 2.0 / NEAR - 1.0,
        1.0 if distance <= soccer.KICKABLE_DISTANCE else -1.0,
        *_seen(ball, heading, *_CENTRE),
        *_seen(player, heading, *_CENTRE),
        *_seen(player, heading, *_LEFT),
        *_seen(player, heading, *_RIGHT),
    ]
    if keeper is not None:
        values += (*_scaled(keeper.x, keeper.y), *_seen(player, heading, keeper.x, keeper.y))
    return np.array(values, np.float32).clip(-1.0, 1.0)


def _scaled(x: float, y: float) -> tuple[float, float]:
    return 2.0 * x / soccer.FIELD_LENGTH - 1.0, y / soccer.HALF_WIDTH


def _seen(viewer: soccer.Body, heading: float, x: float, y: float) -> tuple[float, float, float, float]:
    """Returns scaled distance, angle / 180, sine and cosine of a point, relative to a body and ``heading``."""
    to_x, to_y = x - viewer.x, y - viewer.y
    angle = math.remainder(math.atan2(to_y, to_x) - heading, 2.0 * math.pi)
    distance = math.sqrt(to_x * to_x + to_y * to_y)
    return 2.0 * distance / _DIAGONAL - 1.0, angle / math.pi, math.sin(angle), math.cos(angle)
