# SPDX-License-Identifier: Apache-2.0
"""Whether stored columns are those of an environment's spaces, and their values within the bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space

from lightning_replay.envs import building

_ROUNDING = 1e-5  # how far float32 values may be out of bounds, relative to the bound


def parts_of(space: Space[Any], key: tuple[str, ...]) -> dict[tuple[str, ...], Space[Any]]:
    """Returns the spaces of the columns that values of a space are stored in, by key; Dict and Tuple are nested."""
    parts = building.parts_of(space)
    if parts is None:
        return {key: space}
    return {leaf: part for name, each in parts.items() for leaf, part in parts_of(each, (*key, name)).items()}


def outside_bounds(column: np.ndarray, space: Space[Any], name: str) -> str:
    """Returns a clause on the rows of a column ``[N, ...]`` that are no values of the space; empty where all are."""
    low, high = building.bounds_of(space)
    if column.dtype.kind == "f":
        low, high = low - _ROUNDING * np.abs(low), high + _ROUNDING * np.abs(high)
    inside = (column >= low) & (column <= high)  # NaN is not inside
    if inside.all():
        return ""
    rows = len(inside) - int(inside.reshape(len(inside), -1).all(1).sum())
    return (
        f"{name} is out of the bounds of {space} in {rows} of {len(column)} rows: the values go from {column.min()} to "
        f"{column.max()} ({'rescale them' if column.dtype.kind == 'f' else 'number them as the space does'})"
    )
