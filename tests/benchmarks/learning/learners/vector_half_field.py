# SPDX-License-Identifier: Apache-2.0
"""Many :class:`~lightning_replay.envs.half_field.HalfField` without a keeper and without noise, stepped as one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lightning_replay.envs import half_field as soccer
from lightning_replay.envs.half_field import DASH, GOAL_REWARD, KICK, NEAR, STARTS, TURN

PARAMETER_LOW = np.array([0.0, -180.0, -180.0, 0.0, -180.0], np.float32)  # of dash (two), turn (one) and kick (two)
PARAMETER_HIGH = np.array([100.0, 180.0, 180.0, 100.0, 180.0], np.float32)
OBSERVATION_SIZE = 34
DRAWS = 5  # random numbers of a start
_STARTS = np.array(list(STARTS.values()))
_X, _Y, _VELOCITY_X, _VELOCITY_Y, _HEADING = range(5)  # columns of the state: the player's
_BALL_X, _BALL_Y, _BALL_VELOCITY_X, _BALL_VELOCITY_Y = range(5, 9)
_DIAGONAL = math.hypot(soccer.FIELD_LENGTH, soccer.FIELD_WIDTH)
_POINTS = [(soccer.FIELD_LENGTH, side * soccer.HALF_GOAL) for side in (0.0, 1.0, -1.0)]  # the goal's centre, its posts


class VectorHalfField:
    """N fields in lock-step; one whose episode ended waits for :meth:`reset`.

    Args:
        count: N.
        frame_skip: cycles for which each action is repeated.
        max_steps: cycles after which an episode is truncated.
        untouched_limit: cycles in a row without a kick after which it is truncated.

    Attributes:
        task: of each running episode, int64 ``[N]``, an index into ``HalfField.TASKS``.
        is_running: bool ``[N]``.
        observation: float32 ``[N, 34]``.
    """

    def __init__(self, count: int, frame_skip: int, max_steps: int = 200, untouched_limit: int = 100) -> None:
        self._frame_skip, self._max_steps, self._untouched_limit = frame_skip, max_steps, untouched_limit
        self._state = np.zeros((count, 9))
        self._steps, self._untouched = np.zeros((2, count), np.int64)
        self.task = np.zeros(count, np.int64)
        self.is_running = np.zeros(count, bool)
        self.observation = np.zeros((count, OBSERVATION_SIZE), np.float32)

    def reset(self, rows: np.ndarray, task: np.ndarray, draws: np.ndarray) -> None:
        """Begins episodes.

        Args:
            rows: of the fields, int64 ``[M]``.
            task: of each, int64 ``[M]``.
            draws: uniform in [0, 1), float64 ``[M, 5]``, used as ``HalfField.reset`` uses its random numbers.
        """
        x_low, x_high, y_limit, behind = _STARTS[task].T
        draw_x, draw_y, draw_distance, draw_side, draw_heading = draws.T
        x, y = x_low + (x_high - x_low) * draw_x, y_limit * (2.0 * draw_y - 1.0)
        away = np.arctan2(y, x - soccer.FIELD_LENGTH) + math.pi * (draw_side - 0.5)
        state = np.zeros((len(rows), 9))
        state[:, _BALL_X], state[:, _BALL_Y] = x, y
        state[:, _X], state[:, _Y] = (
            x + behind * draw_distance * np.cos(away),
            y + behind * draw_distance * np.sin(away),
        )
        state[:, _HEADING] = math.pi * (2.0 * draw_heading - 1.0)
        _keep_player_on_field(state)
        self._state[rows] = state
        self._steps[rows] = self._untouched[rows] = 0
        self.task[rows] = task
        self.is_running[rows] = True
        self.observation[rows] = _observe(state)

    def step(self, discrete: np.ndarray, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps the running fields ``frame_skip`` cycles.

        Args:
            discrete: choice of dash, turn or kick, int64 ``[N]``.
            parameters: of all actions, float32 ``[N, 5]``.

        Returns:
            Reward float32, terminated and truncated bool, all ``[N]``; 0 and false where no episode runs.
        """
        reward = np.zeros(len(self.task), np.float32)
        terminated, truncated = np.zeros((2, len(self.task)), bool)
        clipped = np.clip(parameters, PARAMETER_LOW, PARAMETER_HIGH).astype(np.float64)
        stepped = active = np.flatnonzero(self.is_running)
        for _ in range(self._frame_skip):
            state = self._state[active]
            goal, outside, kicked = _cycle(state, discrete[active], clipped[active])
            self._state[active] = state
            self._steps[active] += 1
            self._untouched[active] = np.where(kicked, 0, self._untouched[active] + 1)
            timed_out = (self._steps[active] >= self._max_steps) | (self._untouched[active] == self._untouched_limit)
            reward[active[goal]] = GOAL_REWARD
            terminated[active] = goal | outside
            truncated[active] = timed_out & ~(goal | outside)
            active = active[~(goal | outside | timed_out)]
        self.is_running &= ~(terminated | truncated)
        self.observation[stepped] = _observe(self._state[stepped])
        return reward, terminated, truncated

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all fields."""
        return {name: values.copy() for name, values in self._arrays().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        for name, values in self._arrays().items():
            values[:] = state[name]

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "_state": self._state,
            "_steps": self._steps,
            "_untouched": self._untouched,
            "task": self.task,
            "is_running": self.is_running,
            "observation": self.observation,
        }


def _cycle(state: np.ndarray, discrete: np.ndarray, parameters: np.ndarray) -> tuple[np.ndarray, ...]:
    """Computes a cycle of the server in place; returns goal, out of the field elsewhere, and kicked, bool ``[M]``."""
    x, y, _, _, heading, ball_x, ball_y = state.T[:7]
    dash_power, dash_angle, turn, kick_power, kick_angle = parameters.T
    dash = np.where(discrete == DASH, np.minimum(soccer.DASH_RATE * dash_power, soccer.PLAYER_ACCELERATION_MAX), 0.0)
    dash_direction = heading + np.radians(dash_angle)
    to_x, to_y = ball_x - x, ball_y - y
    distance = np.hypot(to_x, to_y)
    kicked = (discrete == KICK) & (distance <= soccer.KICKABLE_DISTANCE)
    angle = np.abs(_remainder(np.arctan2(to_y, to_x) - heading))
    gap = np.maximum(distance - soccer.TOUCHING_DISTANCE, 0.0)
    effect = 1.0 - 0.25 * angle / math.pi - 0.25 * gap / soccer.KICKABLE_MARGIN
    kick = np.where(kicked, soccer.KICK_RATE * kick_power * effect, 0.0)
    kick_direction = heading + np.radians(kick_angle)
    inertia = 1.0 + soccer.TURN_INERTIA * np.hypot(state[:, _VELOCITY_X], state[:, _VELOCITY_Y])
    turned = _remainder(heading + np.where(discrete == TURN, np.radians(turn), 0.0) / inertia)
    before = state[:, [_BALL_X, _BALL_Y]]
    dashed = dash * np.cos(dash_direction), dash * np.sin(dash_direction)
    shot = kick * np.cos(kick_direction), kick * np.sin(kick_direction)
    _move(state[:, _X : _VELOCITY_Y + 1], *dashed, soccer.PLAYER_SPEED_MAX, soccer.PLAYER_DECAY)
    _move(state[:, _BALL_X:], *shot, soccer.BALL_SPEED_MAX, soccer.BALL_DECAY)
    state[:, _HEADING] = turned
    _keep_player_on_field(state)
    goal, outside = np.zeros((2, len(state)), bool)
    after = state[:, [_BALL_X, _BALL_Y]]
    left = (after[:, 0] < 0.0) | (after[:, 0] > soccer.FIELD_LENGTH) | (np.abs(after[:, 1]) > soccer.HALF_WIDTH)
    for row in np.flatnonzero(left).tolist():
        point = soccer.first_exit(*before[row].tolist(), *after[row].tolist())
        assert point is not None
        state[row, [_BALL_X, _BALL_Y]] = point
        goal[row] = soccer.in_the_goal(*point)
        outside[row] = not goal[row]
    return goal, outside, kicked


def _move(body: np.ndarray, x: np.ndarray, y: np.ndarray, speed_max: float, decay: float) -> None:
    """Moves bodies ``[M, 4]``, their positions and velocities, by these accelerations."""
    velocity = body[:, 2:] + np.stack([x, y], 1)
    speed = np.hypot(*velocity.T)
    velocity *= (speed_max / np.maximum(speed, speed_max))[:, None]
    body[:, :2] += velocity
    body[:, 2:] = velocity * decay


def _keep_player_on_field(state: np.ndarray) -> None:
    for place, velocity, low, high in (
        (_X, _VELOCITY_X, 0.0, soccer.FIELD_LENGTH),
        (_Y, _VELOCITY_Y, -soccer.HALF_WIDTH, soccer.HALF_WIDTH),
    ):
        kept = state[:, place].clip(low, high)
        state[kept != state[:, place], velocity] = 0.0
        state[:, place] = kept


def _observe(state: np.ndarray) -> np.ndarray:
    """Returns what ``half_field_observation.observe`` returns for each row."""
    x, y, velocity_x, velocity_y, heading, ball_x, ball_y, ball_velocity_x, ball_velocity_y = state.T
    sine, cosine = np.sin(heading), np.cos(heading)
    distance = np.hypot(ball_x - x, ball_y - y)
    player_speed = soccer.PLAYER_SPEED_MAX * soccer.PLAYER_DECAY
    ball_speed = soccer.BALL_SPEED_MAX * soccer.BALL_DECAY
    ball_velocity_x, ball_velocity_y = ball_velocity_x / ball_speed, ball_velocity_y / ball_speed
    columns = [
        *(2.0 * x / soccer.FIELD_LENGTH - 1.0, y / soccer.HALF_WIDTH),
        *(velocity_x / player_speed, velocity_y / player_speed, sine, cosine),
        *(2.0 * ball_x / soccer.FIELD_LENGTH - 1.0, ball_y / soccer.HALF_WIDTH),
        *(ball_velocity_x, ball_velocity_y),
        ball_velocity_x * cosine + ball_velocity_y * sine,
        ball_velocity_y * cosine - ball_velocity_x * sine,
        *_seen(x, y, heading, ball_x, ball_y),
        np.minimum(distance, NEAR) * 2.0 / NEAR - 1.0,
        np.where(distance <= soccer.KICKABLE_DISTANCE, 1.0, -1.0),
        *_seen(ball_x, ball_y, heading, *_POINTS[0]),
    ]
    for point in _POINTS:
        columns += _seen(x, y, heading, *point)
    return np.stack(columns, 1).astype(np.float32).clip(-1.0, 1.0)


def _seen(x: np.ndarray, y: np.ndarray, heading: np.ndarray, to_x: Any, to_y: Any) -> tuple[np.ndarray, ...]:
    """Returns scaled distance, angle / 180, sine and cosine of points, relative to bodies and headings."""
    to_x, to_y = to_x - x, to_y - y
    angle = _remainder(np.arctan2(to_y, to_x) - heading)
    return 2.0 * np.hypot(to_x, to_y) / _DIAGONAL - 1.0, angle / math.pi, np.sin(angle), np.cos(angle)


def _remainder(angle: np.ndarray) -> np.ndarray:
    """Returns angles in [-π, π]."""
    return angle - 2.0 * math.pi * np.rint(angle / (2.0 * math.pi))
