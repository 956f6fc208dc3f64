# SPDX-License-Identifier: Apache-2.0
"""What learners on small environments share: blocks of rows for a buffer, numbers of grid states, greedy episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from lightning_replay.envs.grids import RoomGrid


class Rows:
    """The last few steps, in columns that a buffer copies from; written by NumPy, so that a step costs little.

    Args:
        rows: how many steps.
        observation_shape: of one observation.
        dtype: of observations.
    """

    def __init__(self, rows: int, observation_shape: Sequence[int] = (6,), dtype: torch.dtype = torch.float32) -> None:
        flags = {name: torch.zeros(rows, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
        observations, followers = (torch.zeros(rows, *observation_shape, dtype=dtype) for _ in range(2))
        following = {"observation": followers, "reward": torch.zeros(rows, 1), **flags}
        actions = torch.zeros(rows, dtype=torch.int64)
        self.steps = TensorDict({"observation": observations, "action": actions, "next": following}, [rows])
        self._columns = [observations.numpy(), actions.numpy(), followers.numpy()]
        self._columns += [following[name].numpy() for name in ("reward", "terminated", "truncated", "done")]

    def write(self, row: int, *values: Any) -> None:
        """Observation, action, next observation, reward, terminated, truncated and done of one step."""
        for column, value in zip(self._columns, values, strict=True):
            column[row] = value


def state_of(env: RoomGrid) -> int:
    """The number of the state the environment is in: 4 * (height * x + y) + direction."""
    x, y = env.agent_pos
    return int(x * env.height + y) * 4 + env.agent_dir


def greedy_steps(action_of: Callable[[int], int], env: RoomGrid) -> int | None:
    """Steps of the episode to the goal; nothing where it comes back to a state, and so goes round for ever.

    Args:
        action_of: the action taken in each state, always the same.
        env: for this alone.
    """
    env.reset()
    seen: set[int] = set()
    while (state := state_of(env)) not in seen:
        seen.add(state)
        if env.step(action_of(state))[2]:
            return len(seen)
    return None
