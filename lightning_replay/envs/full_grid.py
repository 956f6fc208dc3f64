# SPDX-License-Identifier: Apache-2.0
"""MiniGrid environments that show the whole grid and say how difficult their level is."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_replay.extras import missing_extra

try:
    from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX
    from minigrid.core.grid import Grid
    from minigrid.minigrid_env import MiniGridEnv
except ModuleNotFoundError as error:
    raise missing_extra("a grid environment", "MiniGrid", "grids") from error

__all__ = ["FullGrid"]

_EMPTY = (OBJECT_TO_IDX["empty"], 0, 0)
_AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up; MiniGrid's numbering


class FullGrid(MiniGridEnv):
    """A grid seen whole, in place of MiniGrid's dictionary with the part before the agent; a base class to mix in.

    The same cells as MiniGrid's ``FullyObsWrapper`` shows. An action changes no cell but the one ahead, so a step
    encodes only that one: what is put into the grid from outside shows once the agent faces it.

    Attributes:
        difficulty: of the level being played, in every info too.

    Observation: uint8 ``[width, height, 3]``: kind, colour and state of each cell in MiniGrid's numbers; where the
    agent is, the agent in red with its direction.
    """

    metadata = MiniGridEnv.metadata | {"render_modes": ["rgb_array"]}
    difficulty: int = 0
    _encoding: np.ndarray
    _encoded: Grid | None = None

    def grid_space(self) -> spaces.Box:
        """The observation space for this grid's width and height."""
        return spaces.Box(0, 255, (self.width, self.height, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode; the same seed gives the same level, whatever was played before."""
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"difficulty": self.difficulty}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """A step of MiniGrid; an episode that ends at its goal in the last step is not truncated too."""
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, float(reward), terminated, truncated and not terminated, {"difficulty": self.difficulty}

    def gen_obs(self) -> np.ndarray:
        """The whole grid, uint8 ``[width, height, 3]``."""
        x, y = self.agent_pos
        if self._encoded is not self.grid:
            self._encoded, self._encoding = self.grid, self.grid.encode()
        else:
            ahead = _AHEAD[self.agent_dir]
            cell = self.grid.get(x + ahead[0], y + ahead[1])
            self._encoding[x + ahead[0], y + ahead[1]] = _EMPTY if cell is None else cell.encode()
        observation = self._encoding.copy()
        observation[x, y] = (OBJECT_TO_IDX["agent"], COLOR_TO_IDX["red"], self.agent_dir)
        return observation
