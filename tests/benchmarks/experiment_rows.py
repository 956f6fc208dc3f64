# SPDX-License-Identifier: Apache-2.0
"""The last few steps as the experiments hand them to a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict


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
