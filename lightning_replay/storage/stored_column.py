# SPDX-License-Identifier: Apache-2.0
"""Columns of a packed storage as they are written: where each goes, and whether new rows have them all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from lightning_replay.storage.row_layout import Key

GENERATION: Key = ("generation",)

_WITHOUT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class StoredColumn:
    """One column of all rows, as a tensor and, where NumPy has the dtype, as an array: its small writes are cheaper."""

    def __init__(self, key: Key, dtype: torch.dtype, shape: torch.Size, tensor: Tensor) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.tensor = tensor
        has_array = tensor.device.type == "cpu" and dtype not in _WITHOUT_NUMPY
        self.array: np.ndarray | None = tensor.numpy() if has_array else None

    def put(self, slots: slice | Tensor, value: Tensor | np.ndarray) -> None:
        """Writes the values ``[N, ...]`` of this column into a slice or int64 ``[N]`` of slots."""
        if self.array is None or isinstance(value, Tensor):
            self.tensor[slots] = torch.as_tensor(value, device=self.tensor.device)
        else:
            self.array[slots if isinstance(slots, slice) else slots.numpy()] = value


class RowReader:
    """Takes the columns out of new rows, if these are the columns they must have.

    Args:
        columns: dtype and shape per row by key.
        arrays: the columns that are taken as arrays where the rows are on the CPU.
    """

    def __init__(self, columns: Mapping[Key, tuple[torch.dtype, torch.Size]], arrays: Collection[Key]) -> None:
        self._kinds = [
            (dtype, shape, _array_dtype(dtype) if key in arrays else None) for key, (dtype, shape) in columns.items()
        ]
        self._tree = _places({key: place for place, key in enumerate(columns)})

    def read(self, rows: TensorDictBase, device: torch.device | None) -> list[Tensor | np.ndarray] | None:
        """Returns the values ``[N, ...]`` in the order of the columns; ``None`` where rows have others.

        Args:
            rows: TensorDict ``[N]``; ``generation`` and empty branches are passed over.
            device: where the values must be.
        """
        values: list[Any] = [None] * len(self._kinds)
        if not _collect(rows, self._tree, values):
            return None
        takes_arrays = device is not None and device.type == "cpu"
        for place, (dtype, shape, array_dtype) in enumerate(self._kinds):
            value: Tensor = values[place]
            if takes_arrays and array_dtype is not None and value.is_cpu:
                array = value.detach().numpy() if value.requires_grad else value.numpy()
                # Cheaper to look at than the tensor's own.
                if array.dtype is not array_dtype or array.shape[1:] != shape:
                    return None
                values[place] = array
            elif value.dtype != dtype or value.shape[1:] != shape or value.device != device:
                return None
            elif value.requires_grad:
                values[place] = value.detach()
        return values


def _array_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _places(columns: Mapping[Key, int]) -> list[tuple[str, Any]]:
    """Returns the tree of keys, each branch as a list of names with a place or a branch."""
    branches: dict[str, Any] = {}
    for key, place in columns.items():
        if len(key) == 1:
            branches[key[0]] = place
        else:
            branches.setdefault(key[0], {})[key[1:]] = place
    return [(name, node if isinstance(node, int) else _places(node)) for name, node in branches.items()]


def _collect(rows: TensorDictBase, tree: list[tuple[str, Any]], values: list[Any]) -> bool:
    """Fills ``values`` from ``rows``; returns whether their keys are those of the tree."""
    entries = dict(rows.items())
    for name, node in tree:
        value = entries.get(name)
        if type(node) is int:
            if not isinstance(value, Tensor):
                return False
            values[node] = value
        elif not isinstance(value, TensorDictBase) or not _collect(value, node, values):
            return False
    if len(entries) == len(tree):
        return True
    names = {name for name, _ in tree}
    return all(name in names or name == GENERATION[0] or _is_empty(value) for name, value in entries.items())


def _is_empty(value: Any) -> bool:
    return isinstance(value, TensorDictBase) and not is_non_tensor(value) and value.is_empty()
