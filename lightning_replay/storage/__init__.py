# SPDX-License-Identifier: Apache-2.0
"""Rows of transitions: packed arrays in memory or in a file, frames once each, which slots hold a row."""

from __future__ import annotations

from lightning_replay.storage.access import occupancy_of
from lightning_replay.storage.packed import PackedStorage

__all__ = ["PackedStorage", "occupancy_of"]
