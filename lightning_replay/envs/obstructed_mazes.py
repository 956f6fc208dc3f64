# SPDX-License-Identifier: Apache-2.0
"""ObstructedMazeGamut of the level-replay paper on MiniGrid: mazes of locked doors, chosen by the level's seed."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

from gymnasium import spaces

from lightning_replay.envs.full_grid import FullGrid  # first: it names the extra if MiniGrid is missing
from lightning_replay.validation import check_option

from minigrid.core.constants import COLOR_NAMES  # isort: skip
from minigrid.core.mission import MissionSpace  # isort: skip
from minigrid.core.roomgrid import RoomGrid  # isort: skip
from minigrid.core.world_object import Ball  # isort: skip
from minigrid.envs.obstructedmaze import ObstructedMazeEnv  # isort: skip
from minigrid.envs.obstructedmaze_v1 import ObstructedMaze_Full_V1  # isort: skip


class Maze(NamedTuple):
    """One of MiniGrid's obstructed mazes.

    Its name is MiniGrid's: number of locked doors (``Dl``) or quarters (``Q``); ``h``: the key is hidden in a box;
    ``b``: a ball obstructs the door.
    """

    name: str
    quarters: int  # of the 3 x 3 rooms that have doors; 0 for two rooms with a door between them
    agent_room: tuple[int, int]  # column and row of the room where the agent starts
    is_key_in_box: bool
    is_blocked: bool  # whether balls obstruct the locked doors
    rooms_visited: int  # that the time limit is made for


MAZES = (
    Maze("1Dl", 0, (0, 0), False, False, 2),
    Maze("1Dlh", 0, (0, 0), True, False, 2),
    Maze("1Dlhb", 0, (0, 0), True, True, 2),
    Maze("2Dl", 1, (2, 1), False, False, 4),
    Maze("2Dlh", 1, (2, 1), True, False, 4),
    Maze("2Dlhb", 1, (2, 1), True, True, 4),
    Maze("1Q", 1, (1, 1), True, True, 5),
    Maze("2Q", 2, (2, 1), True, True, 11),
    Maze("Full", 4, (1, 1), True, True, 25),
)
_ROOM_SIZE, _ROOMS = 7, 3


class ObstructedMazeGamut(FullGrid, ObstructedMaze_Full_V1):
    """Pick up the blue ball behind locked doors; as ``ObstructedMazeGamut-Easy-v0``, ``-Medium-v0`` and ``-Hard-v0``.

    A level is a seed: ``reset(seed=level_id)`` plays maze ``level_id % num_mazes`` of :data:`MAZES`, whose number is
    the level's ``difficulty``. All have 3 x 3 rooms of 7 cells a side, walls included; unused rooms are closed. Keys
    are placed after all balls, as in MiniGrid's ``-v1`` mazes, because a ball that replaces the box with the key leaves
    no solution. Jiang et al. 2021, https://arxiv.org/abs/2010.03934, train on 3000 easy and 6000 medium levels.

    Args:
        num_mazes: number of :data:`MAZES`, easiest first: 3 for easy, 6 for medium, 9 for hard.
        render_mode: ``None`` or ``"rgb_array"``.

    Action: ``Discrete(7)``, MiniGrid's own: turn left, turn right, forward, pick up, drop, toggle (opens the door or
    the box ahead), done.

    Observation: uint8 ``[19, 19, 3]``, the whole grid, without the object that the agent carries; see
    :class:`~lightning_replay.envs.full_grid.FullGrid`.

    Reward: ``1 - 0.9 * steps / max_steps`` for the ball, which terminates the episode; else 0. The time limit is
    MiniGrid's, 4 x 49 steps for each room to visit: 392 steps in the first three mazes, 784, 980, 2156 and 4900.
    """

    def __init__(self, num_mazes: int, *, render_mode: str | None = None) -> None:
        check_option("num_mazes", num_mazes, Integral, f"a whole number from 1 to {len(MAZES)}", 1, len(MAZES))
        self.num_mazes = num_mazes
        mission = MissionSpace(self._gen_mission, ordered_placeholders=[[COLOR_NAMES[0]]])
        # skips ObstructedMazeEnv, whose rooms are 6 wide and only as many as one maze needs
        RoomGrid.__init__(
            self,
            room_size=_ROOM_SIZE,
            num_rows=_ROOMS,
            num_cols=_ROOMS,
            mission_space=mission,
            render_mode=render_mode,
            highlight=False,
        )
        self._set_maze(0)
        self.observation_space: spaces.Box = self.grid_space()

    @property
    def maze(self) -> Maze:
        """Maze of the present level."""
        return MAZES[self.difficulty]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode of the seed's maze; without a seed, of a random one."""
        self._set_maze(int(self.np_random.integers(self.num_mazes)) if seed is None else seed % self.num_mazes)
        return super().reset(seed=seed, options=options)

    def _set_maze(self, difficulty: int) -> None:
        self.difficulty = difficulty
        _, self.num_quarters, self.agent_room, self.key_in_box, self.blocked, rooms_visited = self.maze
        self.max_steps: int = 4 * rooms_visited * _ROOM_SIZE**2

    def _gen_grid(self, width: int, height: int) -> None:
        if self.num_quarters:
            super()._gen_grid(width, height)
            return
        ObstructedMazeEnv._gen_grid(self, width, height)
        color = self.door_colors[0]
        self.add_locked_door(0, 0, color=color, blocked=self.blocked)
        self.add_key(0, 0, color=color, key_in_box=self.key_in_box)
        self.obj: Ball = Ball(self.ball_to_find_color)
        self.place_in_room(1, 0, self.obj)
        self.place_agent(*self.agent_room)
