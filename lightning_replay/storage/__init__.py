# SPDX-License-Identifier: Apache-2.0
"""Rows of transitions, packed in memory or in a file, frames stored once each, and the slots that hold a row."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_replay.moved import former_names

if TYPE_CHECKING:
    from lightning_replay.storage.access import occupancy_of
    from lightning_replay.storage.packed import PackedStorage

__all__ = ["PackedStorage", "occupancy_of"]

# imported at first use: the layout of rows, which `lightning-replay inspect` reads, needs no TorchRL
_MODULES = {"PackedStorage": "packed", "occupancy_of": "access"}
_former = former_names(__name__)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return _former(name)
