# SPDX-License-Identifier: Apache-2.0
"""Whole replay buffers as state and as files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_replay.checkpoint.replay import SavedSize, save_replay, verify_replay
from lightning_replay.moved import former_names

__all__ = ["SavedSize", "save_replay", "verify_replay"]

__getattr__: Callable[[str], Any] = former_names(__name__)
