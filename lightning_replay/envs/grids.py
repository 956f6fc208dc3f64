# SPDX-License-Identifier: Apache-2.0
"""Grids of the event-table paper on MiniGrid: rooms joined by single gaps, one rewarded cell far from the start."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_replay.envs.full_grid import AHEAD  # first: it names the extra if MiniGrid is missing
from lightning_replay.validation import checked_choice, checked_count, checked_flag, checked_number

from minigrid.core.grid import Grid  # isort: skip
from minigrid.core.mission import MissionSpace  # isort: skip
from minigrid.core.world_object import Goal, Lava, Wall  # isort: skip
from minigrid.minigrid_env import MiniGridEnv  # isort: skip

LEFT, RIGHT, FORWARD = range(3)
GOAL_REWARD = 1.0


class RoomGrid(MiniGridEnv):
    """A fixed grid: turn left, turn right or go forward to the goal; reward 1 there, else ``step_reward``.

    An episode terminates at the goal or on lava and is truncated after ``max_steps``.

    Args:
        max_steps: steps after which an episode is truncated.
        step_reward: added to every step, also the last; -0.1 in the paper.
        one_hot: observe x, y and direction as one-hot vectors, from which small networks learn sooner.
        render_mode: ``None`` or ``"rgb_array"``.

    Attributes:
        MAP: ``#`` wall, ``.`` floor, ``L`` lava; the agent starts in the upper left corner facing right.
        GAPS: the floor cells in the walls between rooms, from start to goal, as (x, y).
        START, GOAL: (x, y) of the first and of the rewarded cell.

    Action: ``Discrete(3)``: turn left, turn right, forward.

    Observation: float32 ``[6]``: x, y, and whether the agent faces right, down, left, up. With ``one_hot`` float32
    ``[width + height + 4]``: one-hot vectors of x, of y and of the direction, side by side.

    Example:
        >>> observation, _ = ThreeRooms(one_hot=True).reset()  # in column 1 of 17, row 1 of 7, facing right
        >>> observation.nonzero()[0].tolist()
        [1, 18, 24]
    """

    metadata: dict[str, Any] = MiniGridEnv.metadata | {"render_modes": ["rgb_array"]}
    MAP: tuple[str, ...]
    GAPS: tuple[tuple[int, int], ...]
    START: tuple[int, int] = (1, 1)
    GOAL: tuple[int, int]
    agent_pos: tuple[int, int]
    agent_dir: int

    def __init__(
        self,
        *,
        max_steps: int = 500,
        step_reward: float = 0.0,
        one_hot: bool = False,
        render_mode: str | None = None,
    ) -> None:
        checked_count("max_steps", max_steps)
        checked_number("step_reward", step_reward)
        checked_flag("one_hot", one_hot)
        checked_choice("render_mode", render_mode, (None, "rgb_array"))
        width, height = len(self.MAP[0]), len(self.MAP)
        super().__init__(
            mission_space=MissionSpace(mission_func=_mission),
            width=width,
            height=height,
            max_steps=max_steps,
            render_mode=render_mode,
            highlight=False,
        )
        self.step_reward = step_reward
        self.action_space: spaces.Discrete[Any] = spaces.Discrete(3)
        self.one_hot = one_hot
        high = np.ones(width + height + 4) if one_hot else np.array([width - 1, height - 1, 1, 1, 1, 1])
        self.observation_space: spaces.Box = spaces.Box(np.zeros(len(high), np.float32), high.astype(np.float32))

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Turns, or goes one cell forward if there is no wall."""
        self.step_count += 1
        reward, terminated = self.step_reward, False
        if action == FORWARD:
            x, y = self.agent_pos[0] + AHEAD[self.agent_dir][0], self.agent_pos[1] + AHEAD[self.agent_dir][1]
            cell = self.grid.get(x, y)
            if cell is None or cell.can_overlap():
                self.agent_pos = (x, y)
                terminated = cell is not None
                if (x, y) == self.GOAL:
                    reward += GOAL_REWARD
        elif action in (LEFT, RIGHT):
            self.agent_dir = (self.agent_dir + (1 if action == RIGHT else -1)) % 4
        else:
            raise ValueError(f"action is {action!r}; accepted are 0 (turn left), 1 (turn right) and 2 (forward)")
        return self.gen_obs(), reward, terminated, self.step_count >= self.max_steps and not terminated, {}

    def gen_obs(self) -> np.ndarray:
        observation = np.zeros(self.observation_space.shape, np.float32)
        x, y = self.agent_pos
        if self.one_hot:
            observation[[x, self.width + y, self.width + self.height + self.agent_dir]] = 1.0
        else:
            observation[0], observation[1], observation[2 + self.agent_dir] = x, y, 1.0
        return observation

    def _gen_grid(self, width: int, height: int) -> None:
        self.grid: Grid = Grid(width, height)
        things = {"#": Wall, "L": Lava}
        for y, row in enumerate(self.MAP):
            for x, mark in enumerate(row):
                if mark in things:
                    self.grid.set(x, y, things[mark]())
        self.put_obj(Goal(), *self.GOAL)
        self.agent_pos = self.START
        self.agent_dir = 0


class ThreeRooms(RoomGrid):
    """Three rooms in a row; the shortest way takes 23 steps (the mechanism experiment of event tables)."""

    MAP: tuple[str, ...] = (
        "#################",
        "#.....#....#....#",
        "#..........#....#",
        "#.....#....#....#",
        "#.....#.........#",
        "#.....#....#....#",
        "#################",
    )
    GAPS: tuple[tuple[int, int], ...] = ((6, 2), (11, 4))
    GOAL: tuple[int, int] = (15, 5)


class TwoRooms(RoomGrid):
    """Two rooms, the gap far from the straight way to the goal; the shortest way takes 21 steps."""

    MAP: tuple[str, ...] = (
        "#############",
        "#.....#.....#",
        "#.....#.....#",
        "#.....#.....#",
        "#.....#.....#",
        "#...........#",
        "#############",
    )
    GAPS: tuple[tuple[int, int], ...] = ((6, 5),)
    GOAL: tuple[int, int] = (11, 1)


class ObstacleCourse(RoomGrid):
    """Walls with gaps, lava beside the way and a last obstacle; the shortest way takes 25 steps.

    The paper does not print its map; this one is within the history of 50 steps that it used. ``GAPS`` are those of the
    two whole walls.
    """

    MAP: tuple[str, ...] = (
        "###############",
        "#...#...#.....#",
        "#...#.........#",
        "#...#.L.#.#...#",
        "#.......#.#...#",
        "#...#...#.#...#",
        "###############",
    )
    GAPS: tuple[tuple[int, int], ...] = ((4, 4), (8, 2))
    GOAL: tuple[int, int] = (13, 5)


def _mission() -> str:
    return "reach the goal"
