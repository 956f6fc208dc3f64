# SPDX-License-Identifier: Apache-2.0
"""Columns of a packed storage as they are written: where each goes, and whether new rows have them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from lightning_replay.row_layout import Key

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

    def put(self, slots: slice | Tensor, value: Tensor) -> None:
        """Writes the values ``[N, ...]`` of this column into a slice or int64 ``[N]`` of slots."""
        if self.array is not None and value.device.type == "cpu":
            self.array[slots if isinstance(slots, slice) else slots.numpy()] = value.numpy()
        else:
            self.tensor[slots] = value.to(self.tensor.device)


def collect_leaves(data: TensorDictBase, tree: dict[str, Any], by_key: dict[Key, Tensor]) -> bool:
    """Fills ``by_key`` from ``data``; whether its keys are those of ``tree``, bar ``generation`` and empty branches."""
    entries = dict(data.items())
    different = (tree.keys() ^ entries.keys()) - {GENERATION[0]}
    if different and not all(_is_empty(entries.get(name)) for name in different):
        return False
    for name, node in tree.items():
        if node == GENERATION:
            continue
        value = entries[name]
        if isinstance(node, dict):
            if not isinstance(value, TensorDictBase) or not collect_leaves(value, node, by_key):
                return False
        elif not isinstance(value, Tensor):
            return False
        else:
            by_key[node] = value
    return True


def _is_empty(value: Any) -> bool:
    return isinstance(value, TensorDictBase) and not is_non_tensor(value) and value.is_empty()
