# SPDX-License-Identifier: Apache-2.0
"""PointMaze with one goal and tasks that differ in the distance at which an episode starts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_replay.options import missing_extra

try:
    from gymnasium_robotics.envs.maze import maps
    from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv
except ModuleNotFoundError as _error:
    raise missing_extra("a maze environment", "gymnasium-robotics", "mazes") from _error

from lightning_replay.envs.building import TaskChoice
from lightning_replay.options import checked_choice, checked_count, checked_optional_count

Cell = tuple[int, int]


class Maze(NamedTuple):
    """A map: rows of cells, with 1 for a wall, (row, column) of the goal, and steps until an episode is truncated."""

    walls: Sequence[Sequence[int]]
    goal: Cell
    max_steps: int


MAZES = {"UMaze": Maze(maps.U_MAZE, (1, 1), 300), "Medium": Maze(maps.MEDIUM_MAZE, (6, 6), 600)}
# Each task starts at this share of the longest way to the goal.
_SHARES = {"target": 1.0, "far": 2.0 / 3.0, "near": 1.0 / 3.0, "nearest": 0.0}


class PointMazeTasks(TaskChoice, gymnasium.Env[Any, Any]):
    """A ball is pushed through a maze to the goal. Reward 1 there, which terminates the episode, else 0.

    The mazes are ``PointMaze_UMaze-v3`` and ``PointMaze_Medium-v3`` of gymnasium-robotics, with their sparse reward and
    random positions within the cells of start and goal. ``"target"`` starts in the cell with the longest way to the
    goal. ``"far"`` and ``"near"`` start at two thirds and one third of that way, and ``"nearest"`` next to the goal. If
    several cells fit, one of them is drawn.

    Args:
        task: One of :attr:`TASKS`. ``None`` is the target. See :class:`~lightning_replay.envs.building.TaskChoice`.
        maze: ``"UMaze"`` or ``"Medium"``.
        max_steps: Steps of 0.01 seconds after which an episode is truncated. ``None`` is 300 (UMaze) or 600 (Medium).
        frame_skip: Steps of 0.01 seconds for which each action is repeated.
        render_mode: ``None`` or ``"rgb_array"``.

    Action: float32 ``[2]`` in [-1, 1], the force along x and y.

    Observation: float32 ``[6]``: position, velocity, position of the goal.

    Info: ``task`` (index), ``success`` (bool), ``goal_distance`` (straight, in meters).
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (as Gymnasium declares it)
    TASKS = tuple(_SHARES)

    def __init__(
        self,
        task: str | None = None,
        *,
        maze: str = "UMaze",
        max_steps: int | None = None,
        frame_skip: int = 1,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(task)
        self.maze: Maze = MAZES[checked_choice("maze", maze, tuple(MAZES))]
        self.max_steps: int = checked_optional_count("max_steps", max_steps) or self.maze.max_steps
        self.frame_skip: int = checked_count("frame_skip", frame_skip)
        self.render_mode: str | None = checked_choice("render_mode", render_mode, (None, "rgb_array"))
        self._simulation = PointMazeEnv(
            maze_map=self.maze.walls, reward_type="sparse", continuing_task=False, render_mode=render_mode
        )
        os.remove(self._simulation.tmp_xml_file_path)  # Otherwise, every maze would leave a temporary file.
        self.action_space: spaces.Space[Any] = self._simulation.action_space
        self.observation_space: spaces.Box = spaces.Box(-np.inf, np.inf, (6,), np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts in a cell of the task. The seed draws the cell and the positions within the cells.

        ``options`` may have ``task``, a name that becomes :attr:`task`. ``goal_cell`` and ``reset_cell``, (row,
        column), count only for this episode. Distances are then measured from this goal.
        """
        super().reset(seed=seed)
        self._begin_task(options)
        options = options or {}
        goal = self._cell("goal_cell", options) or self.maze.goal
        cells = start_cells(self.maze.walls, goal, self.task)
        start = self._cell("reset_cell", options) or cells[int(self.np_random.integers(len(cells)))]
        # If only one cell were given, the simulation would draw the other cell.
        cells_of_both = {"goal_cell": np.array(goal), "reset_cell": np.array(start)}
        seen, info = self._simulation.reset(seed=seed, options=cells_of_both)
        self._steps = 0
        return _flat(seen), self._info(seen, info["success"])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Pushes the ball for ``frame_skip`` steps of 0.01 seconds, or until the episode ends."""
        for _ in range(self.frame_skip):
            seen, reward, terminated, _, info = self._simulation.step(action)
            self._steps += 1  # The simulation has no limit.
            truncated = self._steps >= self.max_steps and not terminated
            if terminated or truncated:
                break
        return _flat(seen), float(reward), terminated, truncated, self._info(seen, info["success"])

    def render(self) -> np.ndarray | None:  # type: ignore[override]  # Gymnasium returns a type variable that nothing binds
        """Returns the maze from above, uint8 ``[height, width, 3]``, or ``None`` without a render mode."""
        return None if self.render_mode is None else self._simulation.render()

    def close(self) -> None:
        """Closes the simulation."""
        self._simulation.close()

    def _info(self, seen: dict[str, np.ndarray], success: bool) -> dict[str, Any]:
        distance = np.linalg.norm(seen["achieved_goal"] - seen["desired_goal"])
        return {"task": self._running_task, "success": success, "goal_distance": float(distance)}

    def _cell(self, name: str, options: dict[str, Any]) -> Cell | None:
        if options.get(name) is None:
            return None
        row, column = (int(number) for number in options[name])
        walls = self.maze.walls
        if not (0 <= row < len(walls) and 0 <= column < len(walls[0])) or walls[row][column] == 1:
            raise ValueError(f"{name} is {(row, column)}; it must be (row, column) of a cell without a wall")
        return row, column


def path_lengths(walls: Sequence[Sequence[int]], goal: Cell) -> dict[Cell, int]:
    """Returns the number of cells on the shortest way to the goal, from every cell that has one."""
    lengths = {goal: 0}
    waiting = deque([goal])  # The search is breadth first, so that a cell is reached on its shortest way.
    while waiting:
        row, column = waiting.popleft()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if walls[cell[0]][cell[1]] != 1 and cell not in lengths:
                lengths[cell] = lengths[row, column] + 1
                waiting.append(cell)
    return lengths


def start_cells(walls: Sequence[Sequence[int]], goal: Cell, task: str) -> list[Cell]:
    """Returns the cells in which a task may start: those at its share of the longest way to the goal."""
    lengths = path_lengths(walls, goal)
    # The nearest task starts in a cell next to the goal, not in it.
    length = max(1, round(_SHARES[task] * max(lengths.values())))
    return [cell for cell, cells in lengths.items() if cells == length]


def _flat(seen: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate((seen["observation"], seen["desired_goal"])).astype(np.float32)
