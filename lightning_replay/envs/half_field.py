# SPDX-License-Identifier: Apache-2.0
"""Parameterized-action soccer on half a field, as in the RoboCup server, with tasks of growing distance to the goal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_replay.envs.building import TaskChoice
from lightning_replay.options import checked_choice, checked_count, checked_flag, checked_number, checked_optional_count

FIELD_LENGTH = 52.5  # The half field reaches from the midline at x = 0 to the goal line.
FIELD_WIDTH = 68.0  # y runs from -34 to 34.
GOAL_WIDTH = 14.02
PLAYER_DECAY = 0.4
PLAYER_SPEED_MAX = 1.05
PLAYER_ACCELERATION_MAX = 1.0
DASH_RATE = 0.006  # Power 100 accelerates by 0.6 meters per step and step.
TURN_INERTIA = 5.0  # A player at ``speed`` turns by turn / (1 + 5 speed).
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

    decay: float  #: Factor of the velocity after every step.
    speed_max: float  #: Largest way in one step, in meters.
    x: float = 0.0  #: Meters from the midline. The center of the goal is at (52.5, 0).
    y: float = 0.0
    velocity_x: float = 0.0  #: Meters per step left over from the last step.
    velocity_y: float = 0.0

    def place(self, x: float, y: float) -> None:
        """Puts the body at rest at a position."""
        self.x = x
        self.y = y
        self.velocity_x = self.velocity_y = 0.0

    def move(self, acceleration_x: float, acceleration_y: float) -> None:
        """Takes one step of the server: accelerates, caps the speed, moves, and slows down."""
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
        """Moves a body that left the half field back onto its edge, and removes the velocity across the edge."""
        if not 0.0 <= self.x <= FIELD_LENGTH:
            self.x = min(max(self.x, 0.0), FIELD_LENGTH)
            self.velocity_x = 0.0
        if not -HALF_WIDTH <= self.y <= HALF_WIDTH:
            self.y = min(max(self.y, -HALF_WIDTH), HALF_WIDTH)
            self.velocity_y = 0.0

    @property
    def speed(self) -> float:
        """Meters per step."""
        return math.hypot(self.velocity_x, self.velocity_y)


player: partial[Body] = partial(Body, PLAYER_DECAY, PLAYER_SPEED_MAX)
ball: partial[Body] = partial(Body, BALL_DECAY, BALL_SPEED_MAX)


def dash_acceleration(power: float) -> float:
    """Returns the acceleration of a dash with a power in [0, 100], in meters per step and step."""
    return min(DASH_RATE * power, PLAYER_ACCELERATION_MAX)


def kick_acceleration(power: float, distance: float, angle: float) -> float:
    """Returns the acceleration of the ball by a kick, in meters per step and step, or 0 if the ball is out of reach.

    The effective power is ``power * (1 - 0.25 * abs(angle) / pi - 0.25 * gap / 0.7)``. The angle between the player's
    heading and the ball is in radians, and the gap lies between their surfaces.
    """
    if distance > KICKABLE_DISTANCE:
        return 0.0
    gap = max(distance - TOUCHING_DISTANCE, 0.0)
    return KICK_RATE * power * (1.0 - 0.25 * abs(angle) / math.pi - 0.25 * gap / KICKABLE_MARGIN)


def first_exit(from_x: float, from_y: float, to_x: float, to_y: float) -> tuple[float, float] | None:
    """Returns the point at which a straight way leaves the half field, or ``None`` if the way ends on the field."""
    if 0.0 <= to_x <= FIELD_LENGTH and -HALF_WIDTH <= to_y <= HALF_WIDTH:
        return None
    fraction = 1.0  # The way is followed up to the line that it crosses first.
    for start, end, low, high in ((from_x, to_x, 0.0, FIELD_LENGTH), (from_y, to_y, -HALF_WIDTH, HALF_WIDTH)):
        if not low <= end <= high:
            fraction = min(fraction, (min(max(end, low), high) - start) / (end - start))
    # Rounding may put the point on a line off the field.
    x = from_x + fraction * (to_x - from_x)
    y = from_y + fraction * (to_y - from_y)
    return min(max(x, 0.0), FIELD_LENGTH), min(max(y, -HALF_WIDTH), HALF_WIDTH)


def in_the_goal(x: float, y: float) -> bool:
    """Returns whether a point on the edge of the field lies between the posts."""
    return x >= FIELD_LENGTH - 1e-9 and abs(y) < HALF_GOAL


CATCH_HALF_DEPTH = 0.5  # The area of a catch reaches this far along x,
CATCH_HALF_WIDTH = 1.0  # and this far along y, because the keeper dives along the goal line.
LARGEST_ADVANCE = 3.0  # The keeper stays within so many meters of the center of the goal.
DASH_POWER = 40.0  # With the players' 100, the keeper reaches nearly every shot. With 40, it misses well-placed ones.


class Keeper:
    """A player who always catches a ball whose way crosses the 1 x 2 m area around the keeper.

    The keeper moves with the dynamics of the players. A shot is on target if the ball would cross the goal line between
    the posts by its own speed. The keeper then moves to the nearest point on its way. Otherwise, it moves to a point
    between the center of the goal and the ball: a third of the way, at most 3 m from the center.
    """

    def __init__(self) -> None:
        self.body: Body = player()

    def start(self, draw: float) -> None:
        """Places the keeper one meter before the goal line. A draw from [0, 1) picks a point between the posts."""
        # Only the middle half between the posts is used.
        self.body.place(FIELD_LENGTH - 1.0, HALF_GOAL * (2.0 * draw - 1.0) / 2.0)

    def act(self, ball: Body) -> None:
        """Takes one step toward the way of a shot on target, or to a point between the ball and the goal."""
        body = self.body
        point = _meeting_point(body, ball)
        if point is None:
            to_x = ball.x - FIELD_LENGTH
            distance = math.sqrt(to_x * to_x + ball.y * ball.y)
            advance = min(1.0 / 3.0, LARGEST_ADVANCE / distance) if distance > 0.0 else 0.0
            point = FIELD_LENGTH + advance * to_x, advance * ball.y
        # The velocity left over covers part of the way. The keeper dashes no more than the rest needs.
        wish_x, wish_y = point[0] - body.x - body.velocity_x, point[1] - body.y - body.velocity_y
        wish = math.sqrt(wish_x * wish_x + wish_y * wish_y)
        scale = min(1.0, dash_acceleration(DASH_POWER) / wish) if wish > 0.0 else 0.0
        body.move(scale * wish_x, scale * wish_y)
        body.stay_on_the_field()

    def catches(self, from_x: float, from_y: float, to_x: float, to_y: float) -> bool:
        """Returns whether the straight way of the ball crosses the area of a catch."""
        # Each coordinate shortens the part of the way, from 0 to 1, that lies inside the area.
        enter = 0.0
        leave = 1.0
        for start, end, center, half in (
            (from_x, to_x, self.body.x, CATCH_HALF_DEPTH),
            (from_y, to_y, self.body.y, CATCH_HALF_WIDTH),
        ):
            way = end - start
            low, high = center - half - start, center + half - start
            if way:
                first, last = sorted((low / way, high / way))
                enter = max(enter, first)
                leave = min(leave, last)
            elif not low <= 0.0 <= high:  # The ball stays beside the area.
                return False
        return enter <= leave


def _meeting_point(body: Body, ball: Body) -> tuple[float, float] | None:
    reach = 1.0 / (1.0 - ball.decay)  # The ball rolls so many meters per unit of speed.
    way_x, way_y = reach * ball.velocity_x, reach * ball.velocity_y
    gap = FIELD_LENGTH - ball.x
    # A shot on target would cross the goal line between the posts by its own speed.
    if not way_x > gap or abs(ball.y + way_y * gap / way_x) >= HALF_GOAL:
        return None
    along = ((body.x - ball.x) * way_x + (body.y - ball.y) * way_y) / (way_x * way_x + way_y * way_y)
    along = min(max(along, 0.0), gap / way_x)  # The nearest point lies between the ball and the goal line.
    return ball.x + along * way_x, ball.y + along * way_y


NEAR = 10.0  # Within so many meters, the distance of the ball is also observed at a finer scale.
_DIAGONAL = math.hypot(FIELD_LENGTH, FIELD_WIDTH)
_CENTER, _LEFT, _RIGHT = ((FIELD_LENGTH, y) for y in (0.0, HALF_GOAL, -HALF_GOAL))
_PLAYER_SPEED = PLAYER_SPEED_MAX * PLAYER_DECAY  # The player is no faster after a step.
_BALL_SPEED = BALL_SPEED_MAX * BALL_DECAY


def observe(player: Body, heading: float, ball: Body, keeper: Body | None) -> np.ndarray:
    """Returns the observation. A *seen* point has a distance, angle / 180, and sine and cosine of the angle.

    Angles are relative to the heading of the player. Distances are scaled by the diagonal of the field, and speeds by
    the largest speed after a step.

    Returns:
        float32 ``[34]``, with a keeper ``[40]``. First come the player's position (0, 1), velocity (2, 3), and heading
        as sine and cosine (4, 5). Then come the ball's position (6, 7), velocity (8, 9), and velocity relative to the
        heading (10, 11). The ball seen from the player (12 to 15) is followed by its distance up to 10 m (16) and
        whether it can be kicked (17). The center of the goal is seen from the ball (18 to 21), then seen from the
        player (22 to 25). The posts are seen from the player (26 to 33). Last come the keeper's position (34, 35), and
        the keeper seen from the player (36 to 39).
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
        1.0 if distance <= KICKABLE_DISTANCE else -1.0,
        *_seen(ball, heading, *_CENTER),
        *_seen(player, heading, *_CENTER),
        *_seen(player, heading, *_LEFT),
        *_seen(player, heading, *_RIGHT),
    ]
    if keeper is not None:
        values += (*_scaled(keeper.x, keeper.y), *_seen(player, heading, keeper.x, keeper.y))
    return np.array(values, np.float32).clip(-1.0, 1.0)


def _scaled(x: float, y: float) -> tuple[float, float]:
    return 2.0 * x / FIELD_LENGTH - 1.0, y / HALF_WIDTH


def _seen(viewer: Body, heading: float, x: float, y: float) -> tuple[float, float, float, float]:
    to_x, to_y = x - viewer.x, y - viewer.y
    angle = math.remainder(math.atan2(to_y, to_x) - heading, 2.0 * math.pi)
    distance = math.sqrt(to_x * to_x + to_y * to_y)
    # The angle jumps behind the viewer. Its sine and cosine do not.
    return 2.0 * distance / _DIAGONAL - 1.0, angle / math.pi, math.sin(angle), math.cos(angle)


PIXELS_PER_METER = 6
MARGIN = 3.0  # So many meters around the half field are drawn.
HEIGHT = round((FIELD_WIDTH + 2 * MARGIN) * PIXELS_PER_METER)
WIDTH = round((FIELD_LENGTH + 2 * MARGIN) * PIXELS_PER_METER)
_GRASS = (58, 125, 68)
_LINE = (235, 235, 235)
_GOAL = (250, 250, 140)
# Color-blind people distinguish orange and blue from green and from each other.
_PLAYER = (240, 170, 30)
_KEEPER = (50, 90, 220)
_BALL = (255, 255, 255)
_SIZE = 1.1  # A player is drawn with this radius in meters, because the real 0.3 would hardly be seen.


def draw(
    player: tuple[float, float], heading: float, ball: tuple[float, float], keeper: tuple[float, float] | None
) -> np.ndarray:
    """Draws the field from above with the bodies at these positions, uint8 ``[HEIGHT, WIDTH, 3]``."""
    picture = np.full((HEIGHT, WIDTH, 3), _GRASS, np.uint8)
    for x in (0.0, FIELD_LENGTH):
        _bar(picture, x, -HALF_WIDTH, x, HALF_WIDTH, _LINE)
    for y in (-HALF_WIDTH, HALF_WIDTH):
        _bar(picture, 0.0, y, FIELD_LENGTH, y, _LINE)
    _bar(picture, FIELD_LENGTH, -HALF_GOAL, FIELD_LENGTH + 2.0, HALF_GOAL, _GOAL)
    if keeper is not None:
        _disc(picture, keeper, _SIZE, _KEEPER)
    _disc(picture, player, _SIZE, _PLAYER)
    for part in np.linspace(0.0, 2.0 * _SIZE, 8).tolist():
        _disc(picture, (player[0] + part * math.cos(heading), player[1] + part * math.sin(heading)), 0.2, _PLAYER)
    _disc(picture, ball, 0.5, _BALL)
    return picture


def _pixel(x: float, y: float) -> tuple[int, int]:
    return round((HALF_WIDTH + MARGIN - y) * PIXELS_PER_METER), round((x + MARGIN) * PIXELS_PER_METER)


def _bar(picture: np.ndarray, left: float, bottom: float, right: float, top: float, color: tuple[int, ...]) -> None:
    first_row, first_column = _pixel(left, top)
    last_row, last_column = _pixel(right, bottom)
    picture[first_row : last_row + 2, first_column : last_column + 2] = color


def _disc(picture: np.ndarray, center: tuple[float, float], radius: float, color: tuple[int, ...]) -> None:
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    row, column = _pixel(*center)
    picture[np.hypot(rows - row, columns - column) <= radius * PIXELS_PER_METER] = color


DASH, TURN, KICK = range(3)
GOAL_REWARD = 5.0


class Start(NamedTuple):
    """Start positions of a task, in meters, drawn uniformly."""

    x_low: float  #: Smallest distance of the ball from the midline.
    x_high: float
    y_limit: float  #: The ball starts within ±y_limit.
    behind: float  #: Largest distance of the player from the ball, on the side away from the goal.


STARTS = {
    "target": Start(0.0, 0.2 * FIELD_LENGTH, 0.8 * HALF_WIDTH, 10.0),
    "far": Start(20.0, 28.0, 20.0, 6.0),
    "near": Start(34.0, 40.0, 14.0, 3.0),
    "goal_mouth": Start(44.0, 48.0, 7.0, 1.5),
}


class HalfField(TaskChoice, gymnasium.Env[Any, Any]):
    """One player, a ball, and a goal on 52.5 x 68 meters, with reward 5 for a goal, else 0.

    Speeds, decays, dash, turn with inertia, and kick with its effective power are as in the RoboCup server.
    There is no stamina and no collision, and sideways dashes are not weaker. The tasks differ only in the start of an
    episode. ``"target"`` is the task of Half Field Offense (Hausknecht et al. 2016). It replaces the game of Li and Ji
    2021, which has no release on PyPI.

    An episode terminates when the ball enters the goal, leaves the half field, or is caught by the keeper. An episode
    runs out of time after ``max_steps``, or after ``untouched_limit`` steps without a kick that reached the ball. It is
    then truncated, or terminated with ``time_outs_terminate``.

    Args:
        task: One of :attr:`TASKS`. ``None`` is the target. See :class:`~lightning_replay.envs.building.TaskChoice`.
        keeper: Whether a keeper guards the goal (``HalfField-1v1``).
        max_steps: Cycles of the server after which an episode is truncated.
        untouched_limit: Cycles in a row without a kick, or ``None`` for no limit.
        frame_skip: Cycles for which each action is repeated.
        time_outs_terminate: Whether episodes terminate when they run out of time, as agents of Half Field Offense
            assume. Otherwise, no target lowers the values of a policy that walks in circles.
        player_noise: Noise of the player's movement and turn, as a share of its speed and of the turn (RoboCup: 0.1).
        ball_noise: Noise of the ball's movement, as a share of its speed (RoboCup: 0.05).
        kick_noise: Noise of a kick with power 100, in meters per step (RoboCup: 0.1).
        render_mode: ``None`` or ``"rgb_array"``.

    Action: ``Tuple(Discrete(3), Box[2], Box[1], Box[2])``: the choice of dash, turn, or kick, then the parameters. Dash
    has power in [0, 100] and direction, turn has an angle, and kick has power and direction. Angles are in degrees in
    [-180, 180], relative to the player's heading. Values outside are clipped. NaN is refused.

    Observation: float32 ``[34]`` in [-1, 1], with a keeper ``[40]``. See
        :func:`~lightning_replay.envs.half_field.observe`.

    Info: ``task`` (index), ``goal``, ``caught`` and ``kicked`` (bool), ``ball_distance`` (of the player from the
        ball) and ``goal_distance`` (of the ball from the center of the goal) in meters.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as Gymnasium declares it)
    TASKS = tuple(STARTS)

    def __init__(
        self,
        task: str | None = None,
        *,
        keeper: bool = False,
        max_steps: int = 200,
        untouched_limit: int | None = 100,
        frame_skip: int = 1,
        time_outs_terminate: bool = False,
        player_noise: float = 0.0,
        ball_noise: float = 0.0,
        kick_noise: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(task)
        self.max_steps: int = checked_count("max_steps", max_steps)
        self.untouched_limit: int | None = checked_optional_count("untouched_limit", untouched_limit)
        self.frame_skip: int = checked_count("frame_skip", frame_skip)
        self.time_outs_terminate: bool = checked_flag("time_outs_terminate", time_outs_terminate)
        self.player_noise: float = checked_number("player_noise", player_noise, 0.0)
        self.ball_noise: float = checked_number("ball_noise", ball_noise, 0.0)
        self.kick_noise: float = checked_number("kick_noise", kick_noise, 0.0)
        self.render_mode: str | None = checked_choice("render_mode", render_mode, (None, "rgb_array"))
        self.player: Body = player()
        self.ball: Body = ball()
        self.keeper: Keeper | None = Keeper() if checked_flag("keeper", keeper) else None
        self.heading: float = 0.0
        self.observation_space: spaces.Box = spaces.Box(-1.0, 1.0, self._observation().shape, np.float32)
        dash_or_kick = (np.array([0.0, -180.0], np.float32), np.array([100.0, 180.0], np.float32))
        self.action_space: spaces.Tuple = spaces.Tuple(
            (spaces.Discrete(3), spaces.Box(*dash_or_kick), spaces.Box(-180.0, 180.0, (1,)), spaces.Box(*dash_or_kick))
        )
        self._steps = self._untouched = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Places ball and player by the task, or by ``options={"task": name}``. The player's heading is drawn."""
        super().reset(seed=seed)
        self._begin_task(options)
        start = STARTS[self.task]
        # Six numbers are always drawn, so that a seed gives the same start with and without a keeper.
        draw_x, draw_y, draw_distance, draw_side, draw_heading, draw_keeper = self.np_random.random(6).tolist()
        x = start.x_low + (start.x_high - start.x_low) * draw_x
        y = start.y_limit * (2.0 * draw_y - 1.0)
        distance = start.behind * draw_distance
        # The player stands on the side of the ball away from the goal.
        away = math.atan2(y, x - FIELD_LENGTH) + math.pi * (draw_side - 0.5)
        self.ball.place(x, y)
        self.player.place(x + distance * math.cos(away), y + distance * math.sin(away))
        self.player.stay_on_the_field()
        self.heading = math.pi * (2.0 * draw_heading - 1.0)
        if self.keeper is not None:
            self.keeper.start(draw_keeper)
        self._steps = self._untouched = 0
        return self._observation(), self._info(goal=False, caught=False, kicked=False)

    def step(
        self, action: tuple[int, np.ndarray, np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Takes ``frame_skip`` cycles. ``kicked`` is whether any of the kicks reached the ball."""
        kicked = False
        for _ in range(self.frame_skip):
            goal, caught, outside, touched = self._cycle(*action)
            kicked |= touched
            terminated = goal or caught or outside
            timed_out = self._steps >= self.max_steps or self._untouched == self.untouched_limit
            if terminated or timed_out:
                break
        terminated |= timed_out and self.time_outs_terminate
        truncated = timed_out and not terminated
        return self._observation(), GOAL_REWARD * goal, terminated, truncated, self._info(goal, caught, kicked)

    def render(self) -> np.ndarray | None:  # type: ignore[override]  # Gymnasium returns a type variable that nothing binds
        """Returns the field from above, uint8 ``[height, width, 3]``, or ``None`` without a render mode."""
        if self.render_mode is None:
            return None
        keeper = None if self.keeper is None else (self.keeper.body.x, self.keeper.body.y)
        return draw((self.player.x, self.player.y), self.heading, (self.ball.x, self.ball.y), keeper)

    def _cycle(self, choice: int, dash: np.ndarray, turn: np.ndarray, kick: np.ndarray) -> tuple[bool, ...]:
        # In one cycle of the server, the player acts before everything moves.
        player = self.player
        ball = self.ball
        push_x = push_y = flight_x = flight_y = 0.0
        kicked = False
        if choice == DASH:
            push_x, push_y = _toward(dash_acceleration(_power(dash[0])), self.heading + _angle(dash[1]))
        elif choice == TURN:
            angle = _angle(turn[0])
            if self.player_noise:
                angle *= 1.0 + self.player_noise * self.np_random.uniform(-1.0, 1.0)
            turned = angle / (1.0 + TURN_INERTIA * player.speed)
            self.heading = math.remainder(self.heading + turned, 2.0 * math.pi)
        elif choice == KICK:
            power = _power(kick[0])
            direction = self.heading + _angle(kick[1])
            to_x, to_y = ball.x - player.x, ball.y - player.y
            distance = math.sqrt(to_x * to_x + to_y * to_y)
            kicked = distance <= KICKABLE_DISTANCE
            if kicked:
                angle = math.remainder(math.atan2(to_y, to_x) - self.heading, 2.0 * math.pi)
                flight = kick_acceleration(power, distance, angle)
                flight_x, flight_y = self._noisy(*_toward(flight, direction), self.kick_noise * power / 100.0)
        else:
            raise ValueError(f"the action's choice is {choice!r}; accepted are 0 (dash), 1 (turn) and 2 (kick)")
        self._move(player, push_x, push_y, self.player_noise)
        player.stay_on_the_field()
        from_x, from_y = ball.x, ball.y
        self._move(ball, flight_x, flight_y, self.ball_noise)
        exit_point = first_exit(from_x, from_y, ball.x, ball.y)
        if exit_point is not None:
            ball.x, ball.y = exit_point  # The episode ends on the line.
        caught = False
        if self.keeper is not None:
            self.keeper.act(ball)
            caught = self.keeper.catches(from_x, from_y, ball.x, ball.y)
        # The keeper catches a ball on its way to the line, before it is a goal or out.
        goal = exit_point is not None and not caught and in_the_goal(*exit_point)
        self._steps += 1
        self._untouched = 0 if kicked else self._untouched + 1
        return goal, caught, exit_point is not None and not caught and not goal, kicked

    def _move(self, body: Body, x: float, y: float, noise: float) -> None:
        # The noise is a share of the new speed.
        body.move(*self._noisy(x, y, noise and noise * math.hypot(body.velocity_x + x, body.velocity_y + y)))

    def _noisy(self, x: float, y: float, noise: float) -> tuple[float, float]:
        if not noise:
            return x, y
        noise_x, noise_y = self.np_random.uniform(-noise, noise, 2).tolist()
        return x + noise_x, y + noise_y

    def _info(self, goal: bool, caught: bool, kicked: bool) -> dict[str, Any]:
        ball = self.ball
        return {
            "task": self._running_task,
            "goal": goal,
            "caught": caught,
            "kicked": kicked,
            "ball_distance": math.hypot(ball.x - self.player.x, ball.y - self.player.y),
            "goal_distance": math.hypot(FIELD_LENGTH - ball.x, ball.y),
        }

    def _observation(self) -> np.ndarray:
        return observe(self.player, self.heading, self.ball, None if self.keeper is None else self.keeper.body)


def _toward(length: float, direction: float) -> tuple[float, float]:
    return length * math.cos(direction), length * math.sin(direction)


def _power(power: float) -> float:
    return _clipped(power, 0.0, 100.0, "power", "numbers in [0, 100]")


def _angle(degrees: float) -> float:
    return math.radians(_clipped(degrees, -180.0, 180.0, "angle", "degrees in [-180, 180]"))


def _clipped(parameter: float, low: float, high: float, name: str, accepted: str) -> float:
    parameter = float(parameter)  # NumPy's numbers are slower.
    if not math.isfinite(parameter):
        raise ValueError(f"the action's {name} is {parameter}; accepted are {accepted}")
    return min(max(parameter, low), high)
