# SPDX-License-Identifier: Apache-2.0
"""Whole replay buffers as state and as files."""

from __future__ import annotations

from lightning_replay.checkpoint.replay import SavedSize, save_replay, verify_replay

__all__ = ["SavedSize", "save_replay", "verify_replay"]
