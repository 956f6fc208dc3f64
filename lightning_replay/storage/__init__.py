# SPDX-License-Identifier: Apache-2.0
"""Rows of transitions, packed in memory or in a file, frames stored once each, and the slots that hold a row."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_replay.storage.packed import PackedStorage, occupancy_of, read_columns

__all__ = ["PackedStorage", "occupancy_of", "read_columns"]

# imported at first use: the layout of rows, which `lightning-replay inspect` reads, needs no TorchRL
_MODULES = {"FrameStorage": "frames"} | dict.fromkeys(__all__, "packed")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
