# SPDX-License-Identifier: Apache-2.0
"""Edited levels of ACCEL that wait to be played."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

__all__ = ["EditedLevels", "LevelEditor"]

LevelEditor = Callable[[int, torch.Generator], int]


class EditedLevels:
    """Queue of levels that an editor made from replayed ones; a full queue drops its oldest.

    Args:
        capacity: most levels in the queue.
        is_known: whether a level has a score or is being played; such levels are not queued, and skipped when they
            became known while they waited.
    """

    def __init__(self, capacity: int, is_known: Callable[[int], bool]) -> None:
        self._is_known = is_known
        self._queue: deque[int] = deque(maxlen=capacity)

    @property
    def is_empty(self) -> bool:
        """Whether no level waits that is still unknown."""
        return all(map(self._is_known, self._queue))

    def put(self, level_id: int) -> None:
        """Queues a level unless it is known or in the queue."""
        if not self._is_known(level_id) and level_id not in self._queue:
            self._queue.append(level_id)

    def pop(self) -> int | None:
        """Removes and returns the oldest unknown level; ``None`` if there is none."""
        while self._queue:
            level_id = self._queue.popleft()
            if not self._is_known(level_id):
                return level_id
        return None

    def state_dict(self) -> list[int]:
        """Ids in the queue, oldest first."""
        return list(self._queue)

    def load_state_dict(self, state: Iterable[int]) -> None:
        """Restores :meth:`state_dict`."""
        self._queue = deque(state, maxlen=self._queue.maxlen)
