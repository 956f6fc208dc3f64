# SPDX-License-Identifier: Apache-2.0
"""Grids on MiniGrid: rooms of the event-table paper, MultiRoom and ObstructedMazeGamut of the level-replay paper."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_replay.options import (
    check_option,
    checked_choice,
    checked_count,
    checked_flag,
    checked_number,
    checked_optional_count,
    missing_extra,
)

try:
    from minigrid.core.constants import COLOR_NAMES, COLOR_TO_IDX, OBJECT_TO_IDX
    from minigrid.core.grid import Grid
    from minigrid.core.mission import MissionSpace
    from minigrid.core.roomgrid import RoomGrid
    from minigrid.core.world_object import Ball, Goal, Wall
    from minigrid.envs import MultiRoomEnv
    from minigrid.envs.obstructedmaze import ObstructedMazeEnv
    from minigrid.envs.obstructedmaze_v1 import ObstructedMaze_Full_V1
    from minigrid.minigrid_env import MiniGridEnv
except ModuleNotFoundError as _error:
    raise missing_extra("a grid environment", "MiniGrid", "grids") from _error

_EMPTY = (OBJECT_TO_IDX["empty"], 0, 0)
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))  # MiniGrid numbers right, down, left, and up.


class FullGrid(MiniGridEnv):
    """A mixin that observes the whole grid, in place of MiniGrid's dictionary with the part ahead of the agent.

    The cells are the cells of MiniGrid's ``FullyObsWrapper``. A change from outside shows once the agent faces it. The
    ``difficulty`` of the present level is in every info.

    Observation: uint8 ``[width, height, 3]``: kind, color, and state of each cell in MiniGrid's numbers. The agent is
    red, and its state is its direction.
    """

    metadata: dict[str, Any] = MiniGridEnv.metadata | {"render_modes": ["rgb_array"]}
    difficulty: int = 0
    _encoding: np.ndarray
    _encoded: Any = None  # The grid that the encoding belongs to.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode. A seed is a level."""
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"difficulty": self.difficulty}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Takes one step. An episode that ends in its last step is terminated, and not truncated as in MiniGrid."""
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, float(reward), terminated, truncated and not terminated, {"difficulty": self.difficulty}

    def cells(self) -> np.ndarray:
        """Returns kind, color, and state of each cell, ``[width, height, 3]``, which you must not write to."""
        if self._encoded is not self.grid:  # The level is new.
            self._encoded = self.grid
            self._encoding = self.grid.encode()
        else:
            # An action changes only the cell ahead. Encoding all cells takes longer than the step.
            ahead = _cell_ahead(self)
            cell = self.grid.get(*ahead)
            self._encoding[ahead] = _EMPTY if cell is None else cell.encode()
        return self._encoding

    def gen_obs(self) -> np.ndarray:
        """Returns the cells with the agent among them."""
        observation = self.cells().copy()
        x, y = self.agent_pos
        observation[x, y] = (OBJECT_TO_IDX["agent"], COLOR_TO_IDX["red"], self.agent_dir)
        return observation


def _cell_ahead(env: MiniGridEnv) -> tuple[int, int]:
    # MiniGrid's front_pos adds two arrays, which takes several times as long.
    across, down = AHEAD[env.agent_dir]
    return env.agent_pos[0] + across, env.agent_pos[1] + down


LEFT, RIGHT, FORWARD = range(3)
GOAL_REWARD = 1.0


class TabularGrid(MiniGridEnv):
    """A fixed grid: turn left, turn right, or go forward to the goal. Reward 1 there, else ``step_reward``.

    An episode terminates at the goal and is truncated after ``max_steps``.

    Args:
        max_steps: Steps after which an episode is truncated.
        step_reward: Reward of every step except the step to the goal, -0.1 in the paper.
        one_hot: Whether x, y, and direction are observed as one-hot vectors, from which small networks learn sooner.
        render_mode: ``None`` or ``"rgb_array"``.

    Attributes:
        MAP: Rows of cells, ``#`` for a wall and ``.`` for floor. The agent starts in the upper left corner, facing
            right.
        GAPS: Floor cells in the walls between rooms, from start to goal, as (x, y).
        START, GOAL: Coordinates (x, y) of the first and of the rewarded cell.

    Action: ``Discrete(3)``: turn left, turn right, forward.

    Observation: float32 ``[6]``: x, y, and whether the agent faces right, down, left, up. With ``one_hot`` float32
    ``[width + height + 4]``: one-hot vectors of x, of y, and of the direction, side by side.

    Example:
        >>> observation, _ = ThreeRooms(one_hot=True).reset()  # The agent is in column 1 of 17, row 1 of 7.
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
        self.step_reward: float = checked_number("step_reward", step_reward)
        self.one_hot: bool = checked_flag("one_hot", one_hot)
        super().__init__(
            mission_space=MissionSpace(mission_func=reach_the_goal),
            width=len(self.MAP[0]),
            height=len(self.MAP),
            max_steps=checked_count("max_steps", max_steps),
            render_mode=checked_choice("render_mode", render_mode, (None, "rgb_array")),
            highlight=False,
        )
        self.action_space: spaces.Discrete[Any] = spaces.Discrete(3)
        high = [self.width - 1, self.height - 1, 1, 1, 1, 1]
        if one_hot:
            high = [1] * (self.width + self.height + 4)
        self.observation_space: spaces.Box = spaces.Box(np.zeros(len(high), np.float32), np.array(high, np.float32))

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Turns, or goes one cell forward if there is no wall."""
        self.step_count += 1
        reward = self.step_reward
        terminated = False
        if action == FORWARD:
            ahead = _cell_ahead(self)
            cell = self.grid.get(*ahead)
            if cell is None or cell.can_overlap():
                self.agent_pos = ahead
                terminated = cell is not None  # Only the goal is an object that can be entered.
                if ahead == self.GOAL:
                    reward = GOAL_REWARD
        elif action == RIGHT:
            self.agent_dir = (self.agent_dir + 1) % 4
        elif action == LEFT:
            self.agent_dir = (self.agent_dir - 1) % 4
        else:
            raise ValueError(f"action is {action!r}; accepted are 0 (turn left), 1 (turn right) and 2 (forward)")
        return self.gen_obs(), reward, terminated, self.step_count >= self.max_steps and not terminated, {}

    def gen_obs(self) -> np.ndarray:
        """Returns position and direction of the agent, float32."""
        observation = np.zeros(self.observation_space.shape, np.float32)
        if self.one_hot:
            x, y = self.agent_pos
            observation[[x, self.width + y, self.width + self.height + self.agent_dir]] = 1.0
        else:
            observation[:2] = self.agent_pos
            observation[2 + self.agent_dir] = 1.0
        return observation

    def _gen_grid(self, width: int, height: int) -> None:
        self.grid: Grid = Grid(width, height)
        for y, row in enumerate(self.MAP):
            for x, mark in enumerate(row):
                if mark == "#":
                    self.grid.set(x, y, Wall())
        self.put_obj(Goal(), *self.GOAL)
        self.agent_pos = self.START
        self.agent_dir = 0


class ThreeRooms(TabularGrid):
    """Three rooms in a row. The shortest way takes 23 steps (the mechanism experiment of event tables)."""

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


class TwoRooms(TabularGrid):
    """Two rooms with a gap far from the straight way to the goal. The shortest way takes 21 steps."""

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


def reach_the_goal() -> str:
    """Returns the mission of the grids, MiniGrid's text for the agent."""
    return "reach the goal"


MOST_ROOMS = 4
_ROOM_SIZE = 5


class MultiRooms(FullGrid, MultiRoomEnv):
    """Rooms of 4 or 5 cells a side, including walls, joined by closed doors, registered as ``MultiRoom-N4-Random-v0``.

    A level is a seed: ``reset(seed=level_id)``. Its ``difficulty`` is its number of rooms. Jiang et al. 2021,
    https://arxiv.org/abs/2010.03934, train on 4000 levels and test on all other levels.

    Args:
        min_rooms: Fewest rooms of a level.
        max_rooms: Most rooms of a level, at most 4.
        max_steps: Steps after which an episode is truncated, or ``None`` for 20 times ``max_rooms``.
        view_size: Side of the observed square ahead of the agent, an odd number of 3 or more, 7 in MiniGrid. With
            ``None``, the whole grid is observed, as in the paper.
        render_mode: ``None`` or ``"rgb_array"``.

    Raises:
        ValueError: Numbers of rooms that are not 1 <= min_rooms <= max_rooms <= 4, no steps, or a ``view_size`` that is
            even or below 3.

    Action: ``Discrete(7)``, as in MiniGrid: turn left, turn right, forward, pick up, drop, toggle (opens the door
    ahead), done. Pick up, drop, and done do nothing here.

    Observation: uint8 ``[14, 14, 3]``, the whole grid. See :class:`~lightning_replay.envs.grids.FullGrid`. With
    ``view_size`` uint8 ``[view_size, view_size, 3]``, as in MiniGrid. The view is turned so that the agent looks up
    from the middle of the last row. Cells that the agent cannot see are 0.

    Reward: ``1 - 0.9 * steps / max_steps`` at the goal, which terminates the episode, else 0.
    """

    def __init__(
        self,
        *,
        min_rooms: int = 1,
        max_rooms: int = MOST_ROOMS,
        max_steps: int | None = None,
        view_size: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.view_size: int | None = checked_optional_count("view_size", view_size, 3)
        if self.view_size is not None and self.view_size % 2 == 0:
            raise ValueError(f"view_size is {view_size}; it must be an odd number, as the agent is in the middle")
        if not 1 <= checked_count("min_rooms", min_rooms) <= checked_count("max_rooms", max_rooms) <= MOST_ROOMS:
            raise ValueError(
                f"min_rooms is {min_rooms} and max_rooms is {max_rooms}; 1 <= min_rooms <= max_rooms <= {MOST_ROOMS} "
                "is accepted"
            )
        super().__init__(
            minNumRooms=min_rooms,
            maxNumRooms=max_rooms,
            maxRoomSize=_ROOM_SIZE,
            width=14,
            height=14,
            max_steps=checked_optional_count("max_steps", max_steps) or 20 * max_rooms,
            render_mode=render_mode,
            highlight=False,
            agent_view_size=view_size or 7,
        )
        side = view_size or self.width
        self.observation_space: spaces.Box = spaces.Box(0, 255, (side, side, 3), np.uint8)

    def gen_obs(self) -> np.ndarray:
        """Returns the whole grid, or the square ahead of the agent.

        :meta private:
        """
        return super().gen_obs() if self.view_size is None else MiniGridEnv.gen_obs(self)["image"]

    def _gen_grid(self, width: int, height: int) -> None:
        super()._gen_grid(width, height)
        self.difficulty: int = len(self.rooms)


class Maze(NamedTuple):
    """One of MiniGrid's obstructed mazes.

    MiniGrid's name tells the number of locked doors (``Dl``) or quarters (``Q``). ``h`` says that the key is hidden in
    a box, and ``b`` that a ball obstructs the door.
    """

    name: str
    quarters: int  #: Quarters of the 3 x 3 rooms that have doors, 0 for two rooms with a door between them.
    agent_room: tuple[int, int]  #: Column and row of the room in which the agent starts.
    is_key_in_box: bool
    is_blocked: bool  #: Whether balls obstruct the locked doors.
    rooms_visited: int  #: The time limit allows visits to so many rooms.


MAZES = (
    Maze("1Dl", 0, (0, 0), False, False, 2),
    Maze("1Dlh", 0, (0, 0), True, False, 2),
    Maze("1Dlhb", 0, (0, 0), True, True, 2),
    Maze("2Dl", 1, (2, 1), False, False, 4),
    Maze("2Dlh", 1, (2, 1), True, False, 4),
    Maze("2Dlhb", 1, (2, 1), True, True, 4),
    Maze("1Q", 1, (1, 1), True, True, 5),
    Maze("2Q", 2, (1, 1), True, True, 11),  # The authors' code starts in (1, 1), and MiniGrid in (2, 1).
    Maze("Full", 4, (1, 1), True, True, 25),
)
_MAZE_ROOM_SIZE = 7


class ObstructedMazeGamut(FullGrid, ObstructedMaze_Full_V1):
    """Pick up the blue ball behind locked doors, registered as ``ObstructedMazeGamut-{Easy, Medium, Hard}-v0``.

    A level is a seed: ``reset(seed=level_id)`` plays maze ``level_id % num_mazes`` of :data:`MAZES`. The number of the
    maze is the ``difficulty`` of the level. All mazes have 3 x 3 rooms of 7 cells a side, including walls, and unused
    rooms are closed. Keys are placed after all balls, as in MiniGrid's ``-v1`` mazes, because a ball that replaces the
    box with the key leaves no solution. Jiang et al. 2021, https://arxiv.org/abs/2010.03934, train on 3000 easy and
    6000 medium levels. Their appendix calls the first six mazes hard, and their text calls them medium, so both ids
    have six mazes. Their code calls all nine mazes hard, and the paper has no run with nine.

    Args:
        num_mazes: Number of :data:`MAZES`, easiest first: 3 for easy, 6 for medium and hard, up to 9.
        render_mode: ``None`` or ``"rgb_array"``.

    Action: ``Discrete(7)``, as in MiniGrid: turn left, turn right, forward, pick up, drop, toggle (opens the door or
    the box ahead), done.

    Observation: uint8 ``[19, 19, 3]``, the whole grid, without the object that the agent carries. See
    :class:`~lightning_replay.envs.grids.FullGrid`.

    Reward: ``1 - 0.9 * steps / max_steps`` for the ball, which terminates the episode, else 0. The time limit is
    MiniGrid's, 4 x 49 steps for each room to visit: 392 steps in the first three mazes, 784, 980, 2156 and 4900.
    """

    def __init__(self, num_mazes: int, *, render_mode: str | None = None) -> None:
        check_option("num_mazes", num_mazes, Integral, f"a whole number from 1 to {len(MAZES)}", 1, len(MAZES))
        self.num_mazes = num_mazes
        mission = MissionSpace(self._gen_mission, ordered_placeholders=[[COLOR_NAMES[0]]])
        # ObstructedMazeEnv is skipped. Its rooms are 6 wide, and it has only the rooms of one maze.
        RoomGrid.__init__(
            self,
            room_size=_MAZE_ROOM_SIZE,
            num_rows=3,
            num_cols=3,
            mission_space=mission,
            render_mode=render_mode,
            highlight=False,
        )
        self._set_maze(0)
        self.observation_space: spaces.Box = spaces.Box(0, 255, (self.width, self.height, 3), np.uint8)

    @property
    def maze(self) -> Maze:
        """Maze of the present level, one of :data:`MAZES`."""
        return MAZES[self.difficulty]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode of the seed's maze, or without a seed of a random maze."""
        self._set_maze(int(self.np_random.integers(self.num_mazes)) if seed is None else seed % self.num_mazes)
        return super().reset(seed=seed, options=options)

    def _set_maze(self, difficulty: int) -> None:
        self.difficulty = difficulty
        maze = self.maze
        self.num_quarters: int = maze.quarters
        self.agent_room: tuple[int, int] = maze.agent_room
        self.key_in_box: bool = maze.is_key_in_box
        self.blocked: bool = maze.is_blocked
        self.max_steps: int = 4 * maze.rooms_visited * _MAZE_ROOM_SIZE**2

    def _gen_grid(self, width: int, height: int) -> None:
        if self.num_quarters:
            super()._gen_grid(width, height)
            return
        # The two rooms with a door between them lie in the upper left corner of the grid of the larger mazes.
        ObstructedMazeEnv._gen_grid(self, width, height)
        color = self.door_colors[0]
        self.add_locked_door(0, 0, color=color, blocked=self.blocked)
        self.add_key(0, 0, color=color, key_in_box=self.key_in_box)
        self.obj: Ball = Ball(self.ball_to_find_color)
        self.place_in_room(1, 0, self.obj)
        self.place_agent(*self.agent_room)


# MiniGrid has 11 kinds, 6 colors, and 4 states of a cell. The direction of the agent is a state.
_ONE_HOT = [np.eye(count, dtype=np.float32) for count in (11, 6, 4)]


def one_hot_grid(identifier: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Makes a grid of this package whose cells are observed as one-hot vectors, float32 ``[width, height, 21]``.

    The 21 numbers of a cell are its kind, its color, and its state. Convolutions of RLlib take floats only.
    """
    grid = gymnasium.make(f"lightning_replay.envs:{identifier}", **options)
    space = spaces.Box(0.0, 1.0, (*(grid.observation_space.shape or ())[:2], 21), np.float32)
    return gymnasium.wrappers.TransformObservation(grid, _one_hot, space)


def _one_hot(cells: np.ndarray) -> np.ndarray:
    return np.concatenate([rows[cells[..., place]] for place, rows in enumerate(_ONE_HOT)], axis=-1)
