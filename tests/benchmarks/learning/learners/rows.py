# SPDX-License-Identifier: Apache-2.0
"""Blocks of steps for a buffer, written a step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict


class Rows:
    """The last few steps, in columns that a buffer copies from; written by NumPy, so that a step costs little.

    Args:
        count: how many steps.
        observation_shape: of one observation.
        dtype: of observations.
        is_numbered: whether rows have a column ``number``, after the action.
    """

    def __init__(
        self, count: int, observation_shape: Sequence[int], dtype: torch.dtype, is_numbered: bool = False
    ) -> None:
        observation, following = (torch.zeros(count, *observation_shape, dtype=dtype) for _ in range(2))
        integers = ("action", "number") if is_numbered else ("action",)
        columns = {"observation": observation} | {name: torch.zeros(count, dtype=torch.int64) for name in integers}
        flags = {name: torch.zeros(count, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
        after = {"observation": following, "reward": torch.zeros(count, 1), **flags}
        self.steps = TensorDict({**columns, "next": after}, [count])
        self._columns = [column.numpy() for column in (*columns.values(), *after.values())]

    def write(self, row: int, *values: Any) -> None:
        """Writes a step: observation, action, number, next observation, reward, terminated, truncated and done."""
        for column, value in zip(self._columns, values, strict=True):
            column[row] = value
