# SPDX-License-Identifier: Apache-2.0
"""Many MultiRoom environments as one, whose grids are copied from MiniGrid's and live on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lightning_replay.envs.multi_room import MultiRooms  # first: it names the extra where MiniGrid is missing

from minigrid.core.constants import COLOR_TO_IDX, DIR_TO_VEC, OBJECT_TO_IDX, STATE_TO_IDX  # isort: skip

LEFT, RIGHT, FORWARD, TOGGLE = range(4)
NUM_ACTIONS = 4
MINIGRID_ACTIONS = (0, 1, 2, 5)  # the numbers MiniGrid gives these four
SIDE, MAX_STEPS, MAX_ROOMS = 14, 80, 4
EMPTY, DOOR, GOAL, AGENT = (OBJECT_TO_IDX[name] for name in ("empty", "door", "goal", "agent"))
OPEN, CLOSED = STATE_TO_IDX["open"], STATE_TO_IDX["closed"]


@dataclass(frozen=True)
class Grids:
    """The first state of each level.

    Args:
        image: MiniGrid's encoding without the agent (object, colour, state), uint8 ``[L, 14, 14, 3]``, x before y.
        position: of the agent, int64 ``[L, 2]``.
        direction: of the agent, int64 ``[L]``: to the right, down, to the left, up.
        rooms: how many the level has, int64 ``[L]``.
    """

    image: Tensor
    position: Tensor
    direction: Tensor
    rooms: Tensor

    @classmethod
    def generate(cls, level_ids: Iterable[int]) -> Grids:
        """Those of ``MultiRoom-N4-Random-v0`` for these seeds, in this order."""
        env = MultiRooms()
        columns: tuple[list[Tensor], ...] = ([], [], [], [])
        for level_id in level_ids:
            env.reset(seed=level_id)
            row = (env.grid.encode(), env.agent_pos, env.agent_dir, env.difficulty)
            for column, value in zip(columns, row, strict=True):
                column.append(torch.as_tensor(value))
        return cls(*(torch.stack(column) for column in columns))

    def to(self, device: torch.device) -> Grids:
        """The same on a device."""
        return Grids(*(getattr(self, field.name).to(device) for field in fields(self)))


class VectorMultiRoom:
    """N environments that turn left, turn right, go forward or toggle a door; the other actions do nothing there.

    As in MiniGrid, reaching the goal at step t is worth ``1 - 0.9 t / 80`` and ends the episode; so do 80 steps.
    Nothing is reset by itself: :meth:`reset` gives every environment its first level, and the next one at an end.

    Args:
        grids: of the levels, on the device the environments shall be on.
        num_envs: N.
    """

    def __init__(self, grids: Grids, num_envs: int) -> None:
        self._grids = grids
        device = grids.image.device
        self._rows = torch.arange(num_envs, device=device)
        self._image = torch.zeros(num_envs, SIDE, SIDE, 3, dtype=torch.uint8, device=device)
        self._position = torch.ones(num_envs, 2, dtype=torch.int64, device=device)
        self.direction = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._ahead = torch.stack([torch.as_tensor(vector) for vector in DIR_TO_VEC]).to(device)

    def reset(self, rows: Tensor, levels: Tensor) -> None:
        """Puts environments ``rows`` at the start of levels, both int64 ``[R]``; a level is a row of the grids."""
        grids = self._grids
        self._image[rows] = grids.image[levels]
        self._position[rows] = grids.position[levels]
        self.direction[rows] = grids.direction[levels]
        self._steps[rows] = 0

    def observation(self) -> Tensor:
        """What all see, the agent's cell holding its direction, uint8 ``[N, 14, 14, 3]``."""
        image = self._image.clone()
        x, y = self._position.unbind(1)
        image[self._rows, x, y, 0] = AGENT
        image[self._rows, x, y, 1] = COLOR_TO_IDX["red"]
        image[self._rows, x, y, 2] = self.direction.to(torch.uint8)
        return image

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes one action ``[N]`` in each; returns reward, terminated, truncated, all ``[N]``."""
        self._steps += 1
        ahead = self._position + self._ahead[self.direction]
        x, y = ahead.unbind(1)
        cell = self._image[self._rows, x, y]
        thing, state = cell[:, 0], cell[:, 2]
        is_door, is_goal = thing == DOOR, thing == GOAL
        forward = action == FORWARD
        goes = forward & ((thing == EMPTY) | is_goal | (is_door & (state == OPEN)))
        self._position = torch.where(goes.unsqueeze(1), ahead, self._position)
        turn = (action == RIGHT).long() - (action == LEFT).long()
        self.direction = (self.direction + turn) % 4
        toggled = torch.where((action == TOGGLE) & is_door, OPEN + CLOSED - state, state)
        self._image[self._rows, x, y, 2] = toggled.to(torch.uint8)
        terminated = forward & is_goal
        reward = torch.where(terminated, 1.0 - 0.9 * self._steps / MAX_STEPS, 0.0)
        return reward, terminated, (self._steps >= MAX_STEPS) & ~terminated
