# SPDX-License-Identifier: Apache-2.0
"""Columns of a packed storage as they are written: where each goes, and whether new rows have them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
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


def collect_leaves(data: TensorDictBase, tree: dict[str, Any], by_key: dict[Key, Tensor]) -> bool:
    """Fills ``by_key`` from ``data``; whether its keys are exactly those of ``tree``, a ``generation`` apart."""
    entries = dict(data.items())
    if (tree.keys() ^ entries.keys()) - {GENERATION[0]}:
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
