# SPDX-License-Identifier: Apache-2.0
"""Stored columns as values of a Gymnasium space, in the form of RLlib's modules."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

_ROUNDING = 1e-5  # how far float32 actions may be out of bounds, relative to the bound


def fit_observation(column: np.ndarray, space: gym.Space[Any], name: str) -> np.ndarray:
    """Returns observations ``[N, ...]`` in the dtype of their space, which is not Dict and not Tuple.

    Example:
        >>> fit_observation(np.zeros((5, 3), np.float32), gym.spaces.Box(-1, 1, (3,), np.float64), "observation").dtype
        dtype('float64')
    """
    _check_shape(column, space, name)
    return column.astype(space.dtype, copy=False)


def fit_action(column: np.ndarray, space: gym.Space[Any], name: str, *, normalized: bool) -> np.ndarray:
    """Returns actions of the environment as the module would have computed them: float32 or int64, ``[N, ...]``.

    Args:
        column: as stored; Discrete actions may be one-hot, ``[N, n]``.
        space: of the environment's actions; not Dict and not Tuple.
        name: of the column, for messages.
        normalized: whether the module computes bounded actions as fractions of the bounds (``normalize_actions``):
            floats between -1 and 1, integers from 0 on.

    Example:
        >>> fit_action(np.array([[-2.0], [1.0]]), gym.spaces.Box(-2, 2, (1,)), "action", normalized=True).tolist()
        [[-1.0], [0.5]]
        >>> fit_action(np.array([[0, 0, 1], [1, 0, 0]]), gym.spaces.Discrete(3), "action", normalized=True).tolist()
        [2, 0]
    """
    if isinstance(space, gym.spaces.Discrete):
        if space.start != 0:
            raise ValueError(f"{name} is of {space}; RLlib's modules compute actions from 0 on. Wrap the environment")
        if column.shape[1:] == (space.n,) and np.isin(column, (0, 1)).all() and (column.sum(1) == 1).all():
            column = column.argmax(1)  # one-hot
    _check_shape(column, space, name)
    low, high = _bounds(space)
    _check_bounds(column, low, high, space, name)
    floats = column.dtype.kind == "f"
    if normalized and isinstance(space, gym.spaces.Box) and space.is_bounded("both"):
        if floats:
            width = np.where(high > low, high - low, 1.0)
            column = np.clip((column - low) * 2.0 / width - 1.0, -1.0, 1.0)
        else:
            column = column - low
    return column.astype(np.float32 if floats else np.int64)


def _check_shape(column: np.ndarray, space: gym.Space[Any], name: str) -> None:
    if space.dtype is None or column.shape[1:] != space.shape:
        raise ValueError(
            f"{name} has rows of shape {column.shape[1:]}; the algorithm's space is {space}, of shape {space.shape}. "
            "Fill with rows collected in the same environment"
        )
    fits = np.can_cast(column.dtype, space.dtype, "same_kind")
    if not fits or (column.dtype.kind == "f") != (space.dtype.kind == "f"):
        raise ValueError(
            f"{name} has dtype {column.dtype}; the algorithm's space is {space}, of dtype {space.dtype}. "
            "Convert the column before the rows are stored"
        )


def _bounds(space: Any) -> tuple[Any, Any]:
    """Returns the least and the largest value of each entry; float64, or int64 for integer spaces."""
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiBinary):
        return 0, 1 if isinstance(space, gym.spaces.MultiBinary) else int(space.n) - 1
    if isinstance(space, gym.spaces.MultiDiscrete):
        return 0, space.nvec.astype(np.int64) - 1
    if isinstance(space, gym.spaces.Box):
        wide = np.float64 if space.low.dtype.kind == "f" else np.int64
        return space.low.astype(wide), space.high.astype(wide)
    raise ValueError(
        f"actions of the space {space} are not supported; Box, Discrete, MultiDiscrete, MultiBinary, and Dict and "
        "Tuple of them are"
    )


def _check_bounds(column: np.ndarray, low: Any, high: Any, space: gym.Space[Any], name: str) -> None:
    if column.dtype.kind == "f":
        low, high = low - _ROUNDING * np.abs(low), high + _ROUNDING * np.abs(high)
    inside = (column >= low) & (column <= high)  # NaN is not inside
    if not inside.all():
        rows = len(inside) - int(inside.reshape(len(inside), -1).all(1).sum())
        raise ValueError(
            f"{name} is out of the bounds of {space} in {rows} of {len(column)} rows: the values go from "
            f"{column.min()} to {column.max()}. Actions are stored as the environment got them; were these collected "
            "in another one?"
        )
