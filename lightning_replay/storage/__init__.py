# SPDX-License-Identifier: Apache-2.0
"""Rows of transitions, packed in memory or in a file, and storages that keep frames or observations once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

if TYPE_CHECKING:
    from lightning_replay.storage.packed import PackedStorage, occupancy_of, read_columns

__all__ = ["PackedStorage", "occupancy_of", "read_columns"]

# `lightning-replay inspect` reads the layout of rows from here without TorchRL. Saves find the other storages here.
__getattr__: Getter = lazy_names(
    __name__,
    {
        ".frames": ("FrameStorage",),
        ".observations_once": ("ObservationStorage",),
        ".ragged": ("RaggedStorage",),
        ".packed": ("PackedStorage", "occupancy_of", "read_columns"),
    },
)
