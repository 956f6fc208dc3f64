# SPDX-License-Identifier: Apache-2.0
"""Columns of a packed storage, and new rows read column by column if they have the right ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from lightning_replay.storage.row_layout import Key, nest
from lightning_replay.storage.transition_check import ONE_EACH

GENERATION: Key = ("generation",)
INDEX: Key = ("index",)
NOT_STORED: frozenset[Key] = frozenset((GENERATION, INDEX))  # columns of batches, ignored in rows that are given

_WITHOUT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class StoredColumn:
    """One column of all rows, as a tensor and, where NumPy has the dtype, as an array: its small writes are cheaper."""

    def __init__(self, key: Key, tensor: Tensor) -> None:
        self.key: Key = key
        self.tensor: Tensor = tensor
        has_array = tensor.device.type == "cpu" and tensor.dtype not in _WITHOUT_NUMPY
        self.array: np.ndarray | None = tensor.numpy() if has_array else None
        self._vectors: np.ndarray | None = None  # each a single element of its bytes: many are copied in half the time
        if self.array is not None and self.array.ndim == 2 and self.array.shape[1] > 1:
            self._vectors = self.array.view(f"V{self.array.shape[1] * self.array.itemsize}")[:, 0]

    def write(self, slots: Any, values: Tensor | np.ndarray) -> None:
        """Writes values ``[N, ...]`` of the column's dtype into slots, a slice or int64 ``[N]``."""
        if self.array is None or type(values) is not np.ndarray:
            self.tensor[slots] = torch.as_tensor(values, device=self.tensor.device)
        elif self._vectors is None or len(values) == 1 or not values.flags.c_contiguous:
            self.array[slots] = values
        else:
            self._vectors[slots] = values.view(self._vectors.dtype)[:, 0]


def as_array(value: Tensor | np.ndarray) -> np.ndarray:
    """Returns a column as an array."""
    return value if type(value) is np.ndarray else torch.as_tensor(value, device="cpu").detach().numpy()


class RowReader:
    """Reads the columns of new rows, which must be those of the storage.

    Args:
        columns: dtype and shape per row by key.
        arrays: the columns that are taken as arrays where the rows are on the CPU.
    """

    def __init__(self, columns: Mapping[Key, tuple[torch.dtype, torch.Size]], arrays: Collection[Key]) -> None:
        self._may_be_flat = {
            place for place, (key, (_, shape)) in enumerate(columns.items()) if key in ONE_EACH and tuple(shape) == (1,)
        }
        self._kinds = [
            (dtype, tuple(shape), torch.empty(0, dtype=dtype, device="cpu").numpy().dtype if key in arrays else None)
            for key, (dtype, shape) in columns.items()
        ]
        place_of = {key: place for place, key in enumerate(columns)}
        self._tree = _places(nest(columns), place_of)
        # A single name may be given as a tuple too, as in a TensorDict.
        self._place_of: dict[Any, int] = place_of | {key[0]: place for key, place in place_of.items() if len(key) == 1}

    def read(self, rows: TensorDictBase | Mapping[Any, Any], device: torch.device) -> list[Tensor | np.ndarray] | None:
        """Returns the values ``[N, ...]`` on ``device`` in the order of the columns; ``None`` where rows have others.

        In a TensorDict ``[N]``, ``generation``, ``index`` and empty branches are ignored; rewards and flags may be
        ``[N]`` where ``[N, 1]`` is stored.

        Args:
            rows: a TensorDict, or arrays and tensors by key, a name or a tuple of names.
            device: of all values; arrays are on the CPU.
        """
        values: list[Any] = [None] * len(self._kinds)
        if type(rows) is dict or not isinstance(rows, TensorDictBase):
            if not self._collect_named(rows, values):
                return None
        elif rows.ndim != 1 or not _collect(rows, self._tree, values):
            return None
        on_cpu = device.type == "cpu"
        for place, (dtype, shape, array_dtype) in enumerate(self._kinds):
            value = values[place]
            if on_cpu and array_dtype is not None:  # the attributes of an array are cheaper to read than a tensor's
                if type(value) is not np.ndarray:
                    if not value.is_cpu:
                        return None
                    value = value.detach().numpy() if value.requires_grad else value.numpy()
                if value.shape[1:] != shape:
                    if value.ndim != 1 or place not in self._may_be_flat:
                        return None
                    value = value[:, None]
                if value.dtype is not array_dtype and value.dtype != array_dtype:  # equal where it was unpickled
                    return None
            else:
                if type(value) is np.ndarray:
                    return None
                if value.shape[1:] != shape and value.ndim == 1 and place in self._may_be_flat:
                    value = value[:, None]
                if value.dtype != dtype or value.shape[1:] != shape or value.device != device:
                    return None
                if value.requires_grad:
                    value = value.detach()
            values[place] = value
        return values

    def _collect_named(self, columns: Mapping[Any, Any], values: list[Any]) -> bool:
        """Fills ``values`` from columns by key; returns whether their keys fit, and all have one length."""
        if len(columns) != len(values):
            return False
        count = None
        for key, value in columns.items():
            place = self._place_of.get(key)
            if place is None or values[place] is not None:
                return False
            if type(value) is not np.ndarray and not isinstance(value, Tensor):
                return False
            length = value.shape[:1]  # none where it has no dimension
            if length != count:
                if count is not None or not length:
                    return False
                count = length
            values[place] = value
        return True


def _places(tree: dict[str, Any], place_of: Mapping[Key, int]) -> list[tuple[str, Any]]:
    """Returns a tree of :func:`nest` as lists of names with the place of a column or a branch."""
    return [
        (name, _places(node, place_of) if isinstance(node, dict) else place_of[node]) for name, node in tree.items()
    ]


def _collect(rows: TensorDictBase, tree: list[tuple[str, Any]], values: list[Any], is_whole: bool = True) -> bool:
    """Fills ``values`` from ``rows``, or a branch of them; returns whether their keys are those of the tree."""
    entries = dict(rows.items())
    for name, node in tree:
        value = entries.get(name)
        if type(node) is int:
            if not isinstance(value, Tensor):
                return False
            values[node] = value
        elif not isinstance(value, TensorDictBase) or not _collect(value, node, values, False):
            return False
    if len(entries) == len(tree):
        return True
    ignored = NOT_STORED if is_whole else ()
    others = [value for name, value in entries.items() if (name,) not in ignored and name not in dict(tree)]
    return all(isinstance(one, TensorDictBase) and not is_non_tensor(one) and one.is_empty() for one in others)
