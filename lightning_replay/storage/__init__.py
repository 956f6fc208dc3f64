# SPDX-License-Identifier: Apache-2.0
"""Rows of transitions, packed in memory or in a file, frames stored once each, and the slots that hold a row."""

from __future__ import annotations

from lightning_replay.moved import former_names
from lightning_replay.storage.access import occupancy_of
from lightning_replay.storage.packed import PackedStorage

__all__ = ["PackedStorage", "occupancy_of"]

__getattr__ = former_names(__name__)
