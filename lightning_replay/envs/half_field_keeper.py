# SPDX-License-Identifier: Apache-2.0
"""The keeper of the half field: stays between ball and goal, intercepts shots, catches a near ball."""

from __future__ import annotations

import math

from lightning_replay.envs import soccer

CATCH_HALF_DEPTH = 0.5  # along x
CATCH_HALF_WIDTH = 1.0  # along y, the way it dives
LARGEST_ADVANCE = 3.0  # largest distance from the goal's centre, in metres
DASH_POWER = 40.0  # its strongest dash; with the players' 100 it reaches nearly every shot, with 40 not the well placed


class Keeper:
    """Moves with the players' dynamics and always catches a ball whose way crosses its 1 x 2 m area.

    It moves to the nearest point on the way of a shot on target, one that would cross the goal line between the posts
    by its own speed; otherwise to the line from the goal's centre to the ball, a third of the way, at most 3 m.

    Attributes:
        body: its position and velocity.
    """

    def __init__(self) -> None:
        self.body: soccer.Body = soccer.player()

    def start(self, draw: float) -> None:
        """Places the keeper one metre before the goal line, ``draw`` in [0, 1] between the posts."""
        self.body.place(soccer.FIELD_LENGTH - 1.0, soccer.HALF_GOAL * (2.0 * draw - 1.0) / 2.0)

    def act(self, ball: soccer.Body) -> None:
        """Dashes towards the keeper's target position, no more than needed."""
        body = self.body
        x, y = _meeting_point(body, ball) or _standing_point(ball)
        wish_x, wish_y = x - body.x - body.velocity_x, y - body.y - body.velocity_y
        wish = math.sqrt(wish_x * wish_x + wish_y * wish_y)
        scale = min(1.0, soccer.dash_acceleration(DASH_POWER) / wish) if wish > 0.0 else 0.0
        body.move(scale * wish_x, scale * wish_y)
        body.stay_on_the_field()

    def catches(self, from_x: float, from_y: float, to_x: float, to_y: float) -> bool:
        """Whether the ball's way of this step crosses the catch area."""
        enter, leave = 0.0, 1.0
        for start, end, centre, half in (
            (from_x, to_x, self.body.x, CATCH_HALF_DEPTH),
            (from_y, to_y, self.body.y, CATCH_HALF_WIDTH),
        ):
            way = end - start
            low, high = centre - half - start, centre + half - start
            if way == 0.0:
                if not low <= 0.0 <= high:
                    return False
                continue
            first, last = sorted((low / way, high / way))
            enter, leave = max(enter, first), min(leave, last)
        return enter <= leave


def _standing_point(ball: soccer.Body) -> tuple[float, float]:
    """Returns the keeper's point on the line from the goal's centre to the ball."""
    to_x, to_y = ball.x - soccer.FIELD_LENGTH, ball.y
    distance = math.sqrt(to_x * to_x + to_y * to_y)
    advance = min(1.0 / 3.0, LARGEST_ADVANCE / distance) if distance > 0.0 else 0.0
    return soccer.FIELD_LENGTH + advance * to_x, advance * to_y


def _meeting_point(body: soccer.Body, ball: soccer.Body) -> tuple[float, float] | None:
    """Returns the point of a shot's way nearest to the keeper; ``None`` if the ball is no shot on target."""
    reach = 1.0 / (1.0 - ball.decay)  # metres until the ball rests, per unit of speed
    way_x, way_y = reach * ball.velocity_x, reach * ball.velocity_y
    gap = soccer.FIELD_LENGTH - ball.x
    if not way_x > gap or abs(ball.y + way_y * gap / way_x) >= soccer.HALF_GOAL:
        return None
    along = ((body.x - ball.x) * way_x + (body.y - ball.y) * way_y) / (way_x * way_x + way_y * way_y)
    along = min(max(along, 0.0), gap / way_x)
    return ball.x + along * way_x, ball.y + along * way_y
