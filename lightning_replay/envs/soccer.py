# SPDX-License-Identifier: Apache-2.0
"""Soccer on half a field after the RoboCup server: constants, moving bodies, and the effects of turns and kicks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

FIELD_LENGTH = 52.5  # of the half field, from the midline at x = 0 to the goal line
FIELD_WIDTH = 68.0  # y runs from -34 to 34
GOAL_WIDTH = 14.02
PLAYER_DECAY = 0.4
PLAYER_SPEED_MAX = 1.05
PLAYER_ACCELERATION_MAX = 1.0
DASH_RATE = 0.006  # power 100 accelerates by 0.6 metres per step and step
TURN_INERTIA = 5.0  # a player at ``speed`` turns by turn / (1 + 5 speed)
BALL_DECAY = 0.94
BALL_SPEED_MAX = 2.7
KICK_RATE = 0.027
KICKABLE_MARGIN = 0.7
TOUCHING_DISTANCE = 0.3 + 0.085  # the radii of player and ball
KICKABLE_DISTANCE = TOUCHING_DISTANCE + KICKABLE_MARGIN

HALF_WIDTH = FIELD_WIDTH / 2
HALF_GOAL = GOAL_WIDTH / 2


@dataclass(slots=True)
class Body:
    """A player or the ball: a position, a velocity, and how fast it moves and slows down."""

    decay: float  # factor of the velocity after every step
    speed_max: float  # largest way in one step, in metres
    x: float = 0.0  # in metres, the goal's centre at (52.5, 0)
    y: float = 0.0
    velocity_x: float = 0.0  # metres per step left over from the last step
    velocity_y: float = 0.0

    def place(self, x: float, y: float) -> None:
        """Places the body at rest."""
        self.x, self.y, self.velocity_x, self.velocity_y = x, y, 0.0, 0.0

    def move(self, acceleration_x: float, acceleration_y: float) -> None:
        """Computes one step of the server: accelerate, cap the speed, move, slow down."""
        velocity_x = self.velocity_x + acceleration_x
        velocity_y = self.velocity_y + acceleration_y
        speed = math.sqrt(velocity_x * velocity_x + velocity_y * velocity_y)
        if speed > self.speed_max:
            velocity_x *= self.speed_max / speed
            velocity_y *= self.speed_max / speed
        self.x += velocity_x
        self.y += velocity_y
        self.velocity_x = velocity_x * self.decay
        self.velocity_y = velocity_y * self.decay

    def stay_on_the_field(self) -> None:
        """Stops the body at the lines of the half field."""
        if not 0.0 <= self.x <= FIELD_LENGTH:
            self.x = min(max(self.x, 0.0), FIELD_LENGTH)
            self.velocity_x = 0.0
        if not -HALF_WIDTH <= self.y <= HALF_WIDTH:
            self.y = min(max(self.y, -HALF_WIDTH), HALF_WIDTH)
            self.velocity_y = 0.0

    @property
    def speed(self) -> float:
        """Metres per step left over from the last step."""
        return math.hypot(self.velocity_x, self.velocity_y)


player = partial(Body, PLAYER_DECAY, PLAYER_SPEED_MAX)
ball = partial(Body, BALL_DECAY, BALL_SPEED_MAX)


def dash_acceleration(power: float) -> float:
    """Returns the acceleration of a dash with ``power`` in [0, 100], the same in every direction."""
    return min(DASH_RATE * power, PLAYER_ACCELERATION_MAX)


def kick_acceleration(power: float, distance: float, angle: float) -> float:
    """Returns the acceleration of the ball by a kick; 0 if the ball is out of reach.

    The effective power is ``power * (1 - 0.25 |angle| / pi - 0.25 gap / 0.7)``, with the gap between player and ball.

    Args:
        power: in [0, 100].
        distance: of the ball's centre from the player's, in metres.
        angle: between the player's heading and the ball, in radians in [-π, π].
    """
    if distance > KICKABLE_DISTANCE:
        return 0.0
    gap = max(distance - TOUCHING_DISTANCE, 0.0)
    return KICK_RATE * power * (1.0 - 0.25 * abs(angle) / math.pi - 0.25 * gap / KICKABLE_MARGIN)


def first_exit(from_x: float, from_y: float, to_x: float, to_y: float) -> tuple[float, float] | None:
    """Returns the point where a straight way from a point on the field first leaves it; ``None`` if it does not."""
    if 0.0 <= to_x <= FIELD_LENGTH and -HALF_WIDTH <= to_y <= HALF_WIDTH:
        return None
    fraction = 1.0
    for start, end, low, high in ((from_x, to_x, 0.0, FIELD_LENGTH), (from_y, to_y, -HALF_WIDTH, HALF_WIDTH)):
        if not low <= end <= high:
            fraction = min(fraction, ((high if end > high else low) - start) / (end - start))
    x = from_x + fraction * (to_x - from_x)
    y = from_y + fraction * (to_y - from_y)
    return min(max(x, 0.0), FIELD_LENGTH), min(max(y, -HALF_WIDTH), HALF_WIDTH)


def in_the_goal(x: float, y: float) -> bool:
    """Whether a ball that left the field at this point went between the posts."""
    return x >= FIELD_LENGTH - 1e-9 and abs(y) < HALF_GOAL
