# SPDX-License-Identifier: Apache-2.0
"""Stacks of frames stored frame by frame, each once, however many transitions refer to it."""

from __future__ import annotations

from lightning_replay.storage.frames.storage import FrameStorage

__all__ = ["FrameStorage"]
