# SPDX-License-Identifier: Apache-2.0
"""Many MultiRoom environments as one, whose levels are copied from MiniGrid's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from minigrid.core.actions import Actions
from minigrid.core.constants import OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.envs import MultiRoomEnv
from torch import Tensor

MAX_ROOMS, ROOM_SIZE, SIDE, MAX_STEPS = 6, 5, 18, 120
NUM_ACTIONS = len(Actions)
FLOOR, WALL, SHUT, OPEN, GOAL = range(5)  # kinds of cells
VIEW = 4  # cells that are seen in each direction
PADDED = SIDE + 2 * VIEW  # floor around the grid, so that every window lies inside
TIMES = 16  # observed parts of the time limit
NUM_FEATURES = 4 * (2 * VIEW + 1) ** 2 + 4 + TIMES


@dataclass(frozen=True)
class MultiRoomLevels:
    """The first state of each level.

    Args:
        cells: kinds, rows of the padded grid one after another, uint8 ``[L, 676]``.
        position: of the agent, its place in ``cells``, int64 ``[L]``.
        direction: of the agent, int64 ``[L]``: to the right, down, to the left, up.
        rooms: how many the level has, int64 ``[L]``.
    """

    cells: Tensor
    position: Tensor
    direction: Tensor
    rooms: Tensor

    @classmethod
    def generate(cls, level_ids: Iterable[int]) -> MultiRoomLevels:
        """Generates MiniGrid's levels of these seeds, in this order."""
        env = multi_room_env()
        columns: tuple[list[Tensor], ...] = ([], [], [], [])
        for level_id in level_ids:
            env.reset(seed=level_id)
            row = (cells_of(env), position_of(env), env.agent_dir, len(env.rooms))
            for column, value in zip(columns, row, strict=True):
                column.append(torch.as_tensor(value))
        return cls(*(torch.stack(column) for column in columns))

    def __len__(self) -> int:
        """Number of levels."""
        return len(self.rooms)

    def __getitem__(self, rows: Tensor) -> MultiRoomLevels:
        """Returns the levels of some rows."""
        return MultiRoomLevels(self.cells[rows], self.position[rows], self.direction[rows], self.rooms[rows])

    def first_states(self) -> list[bytes]:
        """Returns the first state of each level as bytes: cells, position and direction."""
        start = torch.stack([self.position, self.direction], dim=1).numpy()
        return [cells.tobytes() + row.tobytes() for cells, row in zip(self.cells.numpy(), start, strict=True)]


def training_and_held_out(training: int, held_out: int) -> tuple[MultiRoomLevels, MultiRoomLevels]:
    """Returns training levels 0, 1, 2, ..., and further ones for tests, whose first states no training level has."""
    levels = MultiRoomLevels.generate(range(training))
    seen = set(levels.first_states())
    further = MultiRoomLevels.generate(range(training, training + held_out + held_out // 10))
    new = [row for row, state in enumerate(further.first_states()) if state not in seen]
    if len(new) < held_out:
        raise RuntimeError(f"only {len(new)} of {len(further)} further levels are new; generate more for {held_out}.")
    return levels, further[torch.tensor(new[:held_out])]


def multi_room_env() -> MultiRoomEnv:
    """Returns MiniGrid's environment of these levels: 1 to 6 rooms, a limit of 120 steps."""
    return MultiRoomEnv(1, MAX_ROOMS, maxRoomSize=ROOM_SIZE, width=SIDE, height=SIDE, max_steps=MAX_STEPS)


def cells_of(env: MultiRoomEnv) -> np.ndarray:
    """Returns the present kinds of the cells of MiniGrid's environment, uint8 ``[676]``."""
    grid = env.grid.encode()  # x before y
    thing, state = grid[..., 0].T, grid[..., 2].T
    kinds = np.full(thing.shape, FLOOR, np.uint8)
    kinds[thing == OBJECT_TO_IDX["wall"]] = WALL
    kinds[thing == OBJECT_TO_IDX["goal"]] = GOAL
    is_door = thing == OBJECT_TO_IDX["door"]
    kinds[is_door] = np.where(state[is_door] == STATE_TO_IDX["open"], OPEN, SHUT)
    return np.pad(kinds, VIEW).reshape(-1)


def position_of(env: MultiRoomEnv) -> int:
    """Returns the place of the environment's agent in the padded grid."""
    x, y = (int(coordinate) + VIEW for coordinate in env.agent_pos)
    return y * PADDED + x


class VectorMultiRoom:
    """N environments with MiniGrid's seven actions, of which pick up, drop and done do nothing here.

    As in MiniGrid, reaching the goal at step t is worth ``1 - 0.9 t / 120`` and terminates the episode, and 120 steps
    truncate it. Nothing is reset by itself: :meth:`reset` gives every environment its first level, and the next one at
    an end.

    Args:
        levels: that are played.
        num_envs: N.
    """

    def __init__(self, levels: MultiRoomLevels, num_envs: int) -> None:
        self._levels = levels
        self._cells = torch.zeros(num_envs, PADDED * PADDED, dtype=torch.uint8)
        self._first_cell = torch.arange(num_envs) * PADDED * PADDED
        self.position, self.direction, self.steps = torch.zeros(3, num_envs, dtype=torch.int64)
        self._ahead = torch.tensor([1, PADDED, -1, -PADDED])
        offset = torch.arange(-VIEW, VIEW + 1)
        self._window = (offset.unsqueeze(1) * PADDED + offset).flatten()
        self._kinds = torch.tensor([[WALL], [SHUT], [OPEN], [GOAL]], dtype=torch.uint8)

    def reset(self, rows: Tensor, levels: Tensor) -> None:
        """Puts environments ``rows`` at the start of levels, both int64 ``[R]``; a level is a row of the levels."""
        self._cells[rows] = self._levels.cells[levels]
        self.position[rows] = self._levels.position[levels]
        self.direction[rows] = self._levels.direction[levels]
        self.steps[rows] = 0

    def observe(self) -> Tensor:
        """Returns the observations, float32 ``[N, 344]``.

        A plane of the 9 x 9 cells around the agent for each of wall, shut door, open door and goal, the directions, and
        the sixteenths of the time limit; all are 0 or 1. The cells do not turn with the agent.
        """
        place = (self._first_cell + self.position).unsqueeze(1) + self._window
        around = self._cells.view(-1)[place].unsqueeze(1)
        columns = (around == self._kinds).flatten(1), one_hot(self.direction, 4)
        return torch.cat([*columns, one_hot(TIMES * self.steps // MAX_STEPS, TIMES)], dim=1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes one action ``[N]`` in each; returns reward, terminated, truncated, all ``[N]``."""
        self.steps += 1
        ahead = self.position + self._ahead[self.direction]
        place = self._first_cell + ahead
        kind = self._cells.view(-1)[place]
        forward = action == Actions.forward
        terminated = forward & (kind == GOAL)
        goes = terminated | (forward & ((kind == FLOOR) | (kind == OPEN)))
        self.position = torch.where(goes, ahead, self.position)
        turn = (action == Actions.right).long() - (action == Actions.left).long()
        self.direction = (self.direction + turn) % 4
        is_door = (kind == SHUT) | (kind == OPEN)
        self._cells.view(-1)[place] = torch.where(is_door & (action == Actions.toggle), SHUT + OPEN - kind, kind)
        reward = torch.where(terminated, 1.0 - 0.9 * self.steps / MAX_STEPS, 0.0)
        return reward, terminated, (self.steps >= MAX_STEPS) & ~terminated

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state of all environments."""
        return {"cells": self._cells, "position": self.position, "direction": self.direction, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores :meth:`state_dict`."""
        self._cells = state["cells"]
        self.position, self.direction, self.steps = state["position"], state["direction"], state["steps"]


def one_hot(number: Tensor, count: int) -> Tensor:
    """Returns one-hot rows, bool ``[N, count]``, of numbers ``[N]``."""
    return number.unsqueeze(1) == torch.arange(count)
