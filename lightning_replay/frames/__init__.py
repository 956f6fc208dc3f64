# SPDX-License-Identifier: Apache-2.0
"""Stacks of frames stored frame by frame, each once, however many transitions refer to it."""

from __future__ import annotations

from lightning_replay.frames.options import frames_at_worst, frames_in_order, storage_for
from lightning_replay.frames.storage import FrameStorage

__all__ = ["FrameStorage", "frames_at_worst", "frames_in_order", "storage_for"]
