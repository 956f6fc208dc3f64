# SPDX-License-Identifier: Apache-2.0
"""MiniGrid environments with the whole grid as observation and the difficulty of their level."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_replay.extras import missing_extra

try:
    from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX
    from minigrid.core.grid import Grid
    from minigrid.minigrid_env import MiniGridEnv
except ModuleNotFoundError as _error:
    raise missing_extra("a grid environment", "MiniGrid", "grids") from _error

_EMPTY = (OBJECT_TO_IDX["empty"], 0, 0)
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up; MiniGrid's numbering


class FullGrid(MiniGridEnv):
    """Mixin for the whole grid as observation, in place of MiniGrid's dictionary with the part ahead of the agent.

    The same cells as in MiniGrid's ``FullyObsWrapper``. An action changes no cell but the one ahead, so a step encodes
    only that one; a change from outside shows once the agent faces it.

    Attributes:
        difficulty: of the present level; also in every info.

    Observation: uint8 ``[width, height, 3]``: kind, colour and state of each cell in MiniGrid's numbers; the agent is
    red, with its direction.
    """

    metadata: dict[str, Any] = MiniGridEnv.metadata | {"render_modes": ["rgb_array"]}
    difficulty: int = 0
    _encoding: np.ndarray
    _encoded: Grid | None = None

    def grid_space(self) -> spaces.Box:
        """Returns the observation space for this grid's width and height."""
        return spaces.Box(0, 255, (self.width, self.height, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"difficulty": self.difficulty}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Steps MiniGrid; an episode that reaches its goal in the last step is not truncated too."""
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, float(reward), terminated, truncated and not terminated, {"difficulty": self.difficulty}

    def gen_obs(self) -> np.ndarray:
        x, y = self.agent_pos
        if self._encoded is None or self._encoded is not self.grid:
            self._encoded, self._encoding = self.grid, self.grid.encode()
        else:
            ahead = x + AHEAD[self.agent_dir][0], y + AHEAD[self.agent_dir][1]
            cell = self.grid.get(*ahead)
            self._encoding[ahead] = _EMPTY if cell is None else cell.encode()
        observation = self._encoding.copy()
        observation[x, y] = (OBJECT_TO_IDX["agent"], COLOR_TO_IDX["red"], self.agent_dir)
        return observation
