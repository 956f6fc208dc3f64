# SPDX-License-Identifier: Apache-2.0
"""Actions of the half field, and a field with ball and player where a test needs them."""

from __future__ import annotations

import numpy as np

from lightning_replay.envs.half_field import DASH, KICK, TURN, HalfField

NOTHING = np.zeros(2, np.float32)


def dash(power: float, direction: float) -> tuple:
    return DASH, np.array([power, direction]), NOTHING[:1], NOTHING


def turn(angle: float) -> tuple:
    return TURN, NOTHING, np.array([angle]), NOTHING


def kick(power: float, direction: float) -> tuple:
    return KICK, NOTHING, NOTHING[:1], np.array([power, direction])


def placed(ball: tuple[float, float], player: tuple[float, float] = (10.0, 0.0), **options: object) -> HalfField:
    env = HalfField(**options)  # type: ignore[arg-type]
    env.reset(seed=0)
    env.player.place(*player)
    env.ball.place(*ball)
    env.heading = 0.0
    return env
