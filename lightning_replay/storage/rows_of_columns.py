# SPDX-License-Identifier: Apache-2.0
"""A TensorDict of transitions from arrays and tensors by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.storage.row_layout import Key, gather_branch, nest, shown

__all__ = ["as_rows", "rows_of_columns"]

_ACCEPTED = "extend_columns takes arrays or tensors [N, ...] by key, a name or a tuple such as ('next', 'reward')"


def as_rows(given: TensorDictBase | Mapping[Any, Any]) -> TensorDictBase:
    """Returns a TensorDict itself, and the rows of columns by key."""
    return given if isinstance(given, TensorDictBase) else rows_of_columns(given)


def rows_of_columns(columns: Mapping[Any, Any]) -> TensorDict:
    """Returns rows, TensorDict ``[N]``, whose columns are the arrays and tensors ``[N, ...]`` of a mapping.

    Raises:
        TypeError: no mapping, a key that is no name, or a value that is neither an array of numbers nor a tensor.
        ValueError: no columns, columns of several lengths, or a name that is both a column and a branch.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"{_ACCEPTED}; got {type(columns).__name__}. Give a TensorDict to extend")
    leaves: dict[Key, Tensor] = {}
    for given, value in columns.items():
        key = (given,) if isinstance(given, str) else given
        if not isinstance(key, tuple) or not key or not all(isinstance(name, str) for name in key):
            raise TypeError(f"{_ACCEPTED}; got the key {given!r}")
        if key in leaves:
            raise ValueError(f"{_ACCEPTED}; the column {shown(key)} is given twice")
        leaves[key] = _tensor(key, value)
    for key in leaves:
        branch = next((key[:end] for end in range(1, len(key)) if key[:end] in leaves), None)
        if branch is not None:
            raise ValueError(f"{_ACCEPTED}; {shown(branch)} is a column, and {shown(key)} is below it. Rename one")
    lengths = {key: len(value) for key, value in leaves.items()}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{shown(key)}: {length}" for key, length in lengths.items()) or "no columns"
        raise ValueError(f"{_ACCEPTED}, all with the same N >= 1; got {found}. Nothing was stored")
    devices = {value.device for value in leaves.values()}
    if len(devices) != 1:
        raise ValueError(f"{_ACCEPTED}, all on one device; got {sorted(map(str, devices))}. Nothing was stored")
    return gather_branch(nest(leaves), leaves, torch.Size([next(iter(lengths.values()))]), devices.pop())


def _tensor(key: Key, value: Any) -> Tensor:
    """Returns a column as a tensor of at least one dimension."""
    if isinstance(value, np.ndarray):
        try:
            # A copy where torch takes no view: read-only, or with negative strides.
            tensor = torch.from_numpy(value if value.flags.carray else np.array(value))
        except TypeError:
            tensor = None
    else:
        tensor = value if isinstance(value, Tensor) else None
    if tensor is None or not tensor.ndim:
        kind = f"an array of {value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)[:60]
        raise TypeError(f"{_ACCEPTED}; the column {shown(key)} is {kind}")
    return tensor
