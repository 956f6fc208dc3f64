# SPDX-License-Identifier: Apache-2.0
"""Parameterised-action soccer on half a field, with tasks that differ in the start's distance from the goal."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_replay.envs import soccer
from lightning_replay.envs.half_field_drawing import draw
from lightning_replay.envs.half_field_keeper import Keeper
from lightning_replay.envs.half_field_observation import observe
from lightning_replay.envs.tasks import TaskChoice
from lightning_replay.validation import checked_choice, checked_count, checked_flag, checked_number

DASH, TURN, KICK = range(3)
GOAL_REWARD = 5.0


class Start(NamedTuple):
    """Start positions of a task, in metres, drawn uniformly."""

    x_low: float  # of the ball's distance from the midline
    x_high: float
    y_limit: float  # the ball starts within ±y_limit
    behind: float  # largest distance of the player from the ball, on the side away from the goal


STARTS = {
    "target": Start(0.0, 0.2 * soccer.FIELD_LENGTH, 0.8 * soccer.HALF_WIDTH, 10.0),
    "far": Start(20.0, 28.0, 20.0, 6.0),
    "near": Start(34.0, 40.0, 14.0, 3.0),
    "goal_mouth": Start(44.0, 48.0, 7.0, 1.5),
}


class HalfField(TaskChoice, gymnasium.Env[Any, Any]):
    """One player, a ball and a goal on 52.5 x 68 metres; reward 5 for a goal, else 0.

    The dynamics are the RoboCup server's: speeds, decays, dash, turn with inertia and kick with its effective power
    (:mod:`~lightning_replay.envs.soccer`), without stamina, collisions and weaker sideways dashes. The tasks differ
    only in the start of an episode; ``"target"`` is that of Half Field Offense (Hausknecht et al. 2016), in place of
    the game of Li & Ji 2021, which has no release on PyPI.

    An episode terminates when the ball enters the goal, leaves the half field or is caught by the keeper; it is
    truncated after ``max_steps``, or after ``untouched_limit`` steps without a kick that reached the ball.

    Args:
        task: one of :attr:`TASKS`; ``None`` is the target. See :class:`~lightning_replay.envs.tasks.TaskChoice`.
        keeper: whether a keeper guards the goal (``HalfField-1v1``).
        max_steps: cycles of the server after which an episode is truncated.
        untouched_limit: cycles in a row without a kick; ``None`` for no limit.
        frame_skip: cycles for which each action is repeated.
        player_noise: of the player's movement and turn, as a share of its speed and of the turn (RoboCup: 0.1).
        ball_noise: of the ball's movement, as a share of its speed (RoboCup: 0.05).
        kick_noise: of a kick with power 100, in metres per step (RoboCup: 0.1).
        render_mode: ``None`` or ``"rgb_array"``.

    Action: ``Tuple(Discrete(3), Box[2], Box[1], Box[2])``: the choice of dash, turn or kick, then the parameters of
        dash (power in [0, 100], direction), of turn (angle) and of kick (power, direction); angles in degrees in
        [-180, 180], relative to the player's heading. Values outside are clipped; NaN is refused.

    Observation: float32 ``[34]`` in [-1, 1], with a keeper ``[40]``; see
        :func:`~lightning_replay.envs.half_field_observation.observe`.

    Info: ``task`` (index), ``goal``, ``caught`` and ``kicked`` (bool), ``ball_distance`` (of the player from the
        ball) and ``goal_distance`` (of the ball from the goal's centre) in metres.
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
        player_noise: float = 0.0,
        ball_noise: float = 0.0,
        kick_noise: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(task)
        self.max_steps: int = checked_count("max_steps", max_steps)
        self.untouched_limit: int | None = (
            None if untouched_limit is None else checked_count("untouched_limit", untouched_limit)
        )
        self.frame_skip: int = checked_count("frame_skip", frame_skip)
        self.player_noise: float = checked_number("player_noise", player_noise, 0.0)
        self.ball_noise: float = checked_number("ball_noise", ball_noise, 0.0)
        self.kick_noise: float = checked_number("kick_noise", kick_noise, 0.0)
        self.render_mode: str | None = checked_choice("render_mode", render_mode, (None, "rgb_array"))
        self.player: soccer.Body = soccer.player()
        self.ball: soccer.Body = soccer.ball()
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
        """Places ball and player by the task, or by ``options={"task": name}``, the player with a random heading."""
        super().reset(seed=seed)
        self._begin_task(options)
        start = STARTS[self.task]
        draw_x, draw_y, draw_distance, draw_side, draw_heading, draw_keeper = self.np_random.random(6).tolist()
        x = start.x_low + (start.x_high - start.x_low) * draw_x
        y = start.y_limit * (2.0 * draw_y - 1.0)
        distance = start.behind * draw_distance
        away = math.atan2(y, x - soccer.FIELD_LENGTH) + math.pi * (draw_side - 0.5)
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
        """Steps ``frame_skip`` cycles; ``kicked`` is whether any of the kicks reached the ball."""
        kicked = False
        for _ in range(self.frame_skip):
            goal, caught, outside, touched = self._cycle(*action)
            kicked |= touched
            terminated = goal or caught or outside
            timed_out = self._steps >= self.max_steps or self._untouched == self.untouched_limit
            if terminated or timed_out:
                break
        reward, truncated = GOAL_REWARD if goal else 0.0, timed_out and not terminated
        return self._observation(), reward, terminated, truncated, self._info(goal, caught, kicked)

    def render(self) -> np.ndarray | None:  # type: ignore[override]  # Gymnasium returns a type variable that nothing binds
        """Returns the field from above, uint8 ``[height, width, 3]``; ``None`` without a render mode."""
        if self.render_mode is None:
            return None
        keeper = None if self.keeper is None else (self.keeper.body.x, self.keeper.body.y)
        return draw((self.player.x, self.player.y), self.heading, (self.ball.x, self.ball.y), keeper)

    def _cycle(self, choice: int, dash: np.ndarray, turn: np.ndarray, kick: np.ndarray) -> tuple[bool, ...]:
        """Computes one cycle of the server: the player acts, then everything moves.

        Returns whether the ball entered the goal, was caught, left the field elsewhere, and was kicked.
        """
        player, ball = self.player, self.ball
        push_x = push_y = flight_x = flight_y = 0.0
        kicked = False
        if choice == DASH:
            push, direction = soccer.dash_acceleration(_power(dash[0])), self.heading + _angle(dash[1])
            push_x, push_y = push * math.cos(direction), push * math.sin(direction)
        elif choice == TURN:
            angle = _angle(turn[0])
            if self.player_noise:
                angle *= 1.0 + self.player_noise * self.np_random.uniform(-1.0, 1.0)
            turned = angle / (1.0 + soccer.TURN_INERTIA * player.speed)
            self.heading = math.remainder(self.heading + turned, 2.0 * math.pi)
        elif choice == KICK:
            power, direction = _power(kick[0]), self.heading + _angle(kick[1])
            to_x, to_y = ball.x - player.x, ball.y - player.y
            distance = math.sqrt(to_x * to_x + to_y * to_y)
            kicked = distance <= soccer.KICKABLE_DISTANCE
            if kicked:
                angle = math.remainder(math.atan2(to_y, to_x) - self.heading, 2.0 * math.pi)
                flight = soccer.kick_acceleration(power, distance, angle)
                flight_x, flight_y = flight * math.cos(direction), flight * math.sin(direction)
                flight_x, flight_y = self._noisy(flight_x, flight_y, self.kick_noise * power / 100.0)
        else:
            raise ValueError(f"the action's choice is {choice!r}; accepted are 0 (dash), 1 (turn) and 2 (kick)")
        self._move(player, push_x, push_y, self.player_noise)
        player.stay_on_the_field()
        from_x, from_y = ball.x, ball.y
        self._move(ball, flight_x, flight_y, self.ball_noise)
        exit_point = soccer.first_exit(from_x, from_y, ball.x, ball.y)
        if exit_point is not None:
            ball.x, ball.y = exit_point
        caught = False
        if self.keeper is not None:
            self.keeper.act(ball)
            caught = self.keeper.catches(from_x, from_y, ball.x, ball.y)
        goal = exit_point is not None and not caught and soccer.in_the_goal(*exit_point)
        self._steps += 1
        self._untouched = 0 if kicked else self._untouched + 1
        return goal, caught, exit_point is not None and not caught and not goal, kicked

    def _move(self, body: soccer.Body, x: float, y: float, noise: float) -> None:
        if noise:  # a share of its new speed
            x, y = self._noisy(x, y, noise * math.hypot(body.velocity_x + x, body.velocity_y + y))
        body.move(x, y)

    def _noisy(self, x: float, y: float, noise: float) -> tuple[float, float]:
        if not noise:
            return x, y
        noise_x, noise_y = self.np_random.uniform(-noise, noise, 2).tolist()
        return x + noise_x, y + noise_y

    def _info(self, goal: bool, caught: bool, kicked: bool) -> dict[str, Any]:
        ball, player = self.ball, self.player
        return {
            "task": self._running_task,
            "goal": goal,
            "caught": caught,
            "kicked": kicked,
            "ball_distance": math.hypot(ball.x - player.x, ball.y - player.y),
            "goal_distance": math.hypot(soccer.FIELD_LENGTH - ball.x, ball.y),
        }

    def _observation(self) -> np.ndarray:
        return observe(self.player, self.heading, self.ball, None if self.keeper is None else self.keeper.body)


def _power(power: float) -> float:
    power = float(power)  # NumPy's numbers are slower
    if not math.isfinite(power):
        raise ValueError(f"the action's power is {power}; accepted are numbers in [0, 100]")
    return min(max(power, 0.0), 100.0)


def _angle(degrees: float) -> float:
    """Returns an angle in radians."""
    degrees = float(degrees)
    if not math.isfinite(degrees):
        raise ValueError(f"the action's angle is {degrees}; accepted are degrees in [-180, 180]")
    return math.radians(min(max(degrees, -180.0), 180.0))
