# SPDX-License-Identifier: Apache-2.0
"""The best return ever made on each level."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["BestReturns"]


class BestReturns:
    """Largest undiscounted return of a finished episode on each level."""

    def __init__(self) -> None:
        self._best: dict[int, float] = {}

    def of(self, level_id: int, so_far: float, is_done: bool) -> float:
        """The best return, that of a running episode included once it is done; before any was finished, that so far."""
        best = self._best.get(level_id, so_far)
        return max(best, so_far) if is_done else best

    def add(self, level_id: int, episode_return: float) -> None:
        """An episode is finished."""
        self._best[level_id] = max(self._best.get(level_id, episode_return), episode_return)

    def forget(self, level_id: int) -> None:
        """Of a level that is neither stored nor played."""
        self._best.pop(level_id, None)

    def state_dict(self) -> dict[str, Any]:
        """Tensors."""
        return {
            "level_id": torch.tensor(list(self._best), dtype=torch.int64),
            "best_return": torch.tensor(list(self._best.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._best = dict(zip(state["level_id"].tolist(), state["best_return"].tolist(), strict=True))
