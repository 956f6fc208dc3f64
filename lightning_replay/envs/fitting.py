# SPDX-License-Identifier: Apache-2.0
"""Whether stored columns are those of an environment's spaces, and their values within the bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

_ROUNDING = 1e-5  # how far float32 values may be out of bounds, relative to the bound


def parts_of(space: Space[Any], key: tuple[str, ...]) -> dict[tuple[str, ...], Space[Any]]:
    """Returns the spaces of the columns that values of a space are stored in, by key; Dict and Tuple are nested.

    Example:
        >>> parts_of(Dict(camera=Box(0, 255, (8, 8, 3), np.uint8), state=Box(-1, 1, (2,))), ("observation",)).keys()
        dict_keys([('observation', 'camera'), ('observation', 'state')])
    """
    if not isinstance(space, Dict | Tuple):
        return {key: space}
    named: Iterable[tuple[Any, Space[Any]]] = (
        space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
    )
    return {leaf: part for name, each in named for leaf, part in parts_of(each, (*key, str(name))).items()}


def bounds_of(space: Space[Any]) -> tuple[Any, Any]:
    """Returns the smallest and the largest value of a space, as numbers or arrays of its shape."""
    if isinstance(space, Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, MultiDiscrete):
        low = space.start.astype(np.int64)
        return low, low + space.nvec.astype(np.int64) - 1
    if isinstance(space, MultiBinary):
        return 0, 1
    if isinstance(space, Box):
        wide = np.float64 if space.low.dtype.kind == "f" else np.int64
        return space.low.astype(wide), space.high.astype(wide)
    raise ValueError(
        f"actions of the space {space} are not supported; Box, Discrete, MultiDiscrete, MultiBinary, and Dict and "
        "Tuple of them are"
    )


def outside_bounds(column: np.ndarray, space: Space[Any], name: str) -> str:
    """Returns a clause on the rows of a column ``[N, ...]`` that are no values of the space; empty where all are."""
    low, high = bounds_of(space)
    if column.dtype.kind == "f":
        low, high = low - _ROUNDING * np.abs(low), high + _ROUNDING * np.abs(high)
    inside = (column >= low) & (column <= high)  # NaN is not inside
    if inside.all():
        return ""
    rows = len(inside) - int(inside.reshape(len(inside), -1).all(1).sum())
    return (
        f"{name} is out of the bounds of {space} in {rows} of {len(column)} rows: the values go from {column.min()} to "
        f"{column.max()}"
    )
