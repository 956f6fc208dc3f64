# SPDX-License-Identifier: Apache-2.0
"""A picture of the half field from above, drawn with NumPy."""

from __future__ import annotations

import math

import numpy as np

from lightning_replay.envs import soccer

PIXELS_PER_METRE = 6
MARGIN = 3.0  # metres around the half field
HEIGHT = round((soccer.FIELD_WIDTH + 2 * MARGIN) * PIXELS_PER_METRE)
WIDTH = round((soccer.FIELD_LENGTH + 2 * MARGIN) * PIXELS_PER_METRE)
_GRASS, _LINE, _GOAL = (58, 125, 68), (235, 235, 235), (250, 250, 140)
# orange and blue are distinguishable from green and from each other for colour-blind people
_PLAYER, _KEEPER, _BALL = (240, 170, 30), (50, 90, 220), (255, 255, 255)
_SIZE = 1.1  # radius of a drawn player in metres, more than its real 0.3


def draw(
    player: tuple[float, float], heading: float, ball: tuple[float, float], keeper: tuple[float, float] | None
) -> np.ndarray:
    """Returns the field, uint8 ``[444, 351, 3]``: goal on the right, y upwards, the player with its heading."""
    picture = np.full((HEIGHT, WIDTH, 3), _GRASS, np.uint8)
    half, goal = soccer.HALF_WIDTH, soccer.HALF_GOAL
    for x in (0.0, soccer.FIELD_LENGTH):
        _bar(picture, x, -half, x, half, _LINE)
    for y in (-half, half):
        _bar(picture, 0.0, y, soccer.FIELD_LENGTH, y, _LINE)
    _bar(picture, soccer.FIELD_LENGTH, -goal, soccer.FIELD_LENGTH + 2.0, goal, _GOAL)
    if keeper is not None:
        _disc(picture, keeper, _SIZE, _KEEPER)
    _disc(picture, player, _SIZE, _PLAYER)
    for part in np.linspace(0.0, 2.0 * _SIZE, 8).tolist():
        _disc(picture, (player[0] + part * math.cos(heading), player[1] + part * math.sin(heading)), 0.2, _PLAYER)
    _disc(picture, ball, 0.5, _BALL)
    return picture


def _pixel(x: float, y: float) -> tuple[int, int]:
    """Returns the row and column of a point in metres."""
    return round((soccer.HALF_WIDTH + MARGIN - y) * PIXELS_PER_METRE), round((x + MARGIN) * PIXELS_PER_METRE)


def _bar(picture: np.ndarray, left: float, bottom: float, right: float, top: float, colour: tuple[int, ...]) -> None:
    (first_row, first_column), (last_row, last_column) = _pixel(left, top), _pixel(right, bottom)
    picture[first_row : last_row + 2, first_column : last_column + 2] = colour


def _disc(picture: np.ndarray, centre: tuple[float, float], radius: float, colour: tuple[int, ...]) -> None:
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    row, column = _pixel(*centre)
    distance = np.hypot(rows - row, columns - column)
    picture[distance <= radius * PIXELS_PER_METRE] = colour
