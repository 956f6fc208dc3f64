# SPDX-License-Identifier: Apache-2.0
"""Conditions as a user writes them, to be named by import path."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor

NOT_CALLABLE = 3


def first_number_is_even(steps: TensorDictBase) -> Tensor:
    """Whether the first number of the next observation is even, bool ``[N]``."""
    return steps["next", "observation"][:, 0].remainder(2) == 0
