# SPDX-License-Identifier: Apache-2.0
"""Draws in proportion to priorities that are divided over several replays."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.draw_parts import DividedRows, DrawPart, GroupTotals, PartDraw
from lightning_replay.samplers.torchrl_compat import TorchRLNames
from lightning_replay.storage.access import empty_storage, occupancy_of


class DividedPriorities(TorchRLNames):
    """A sampler of one priority tree, whose values are one group."""

    normalize_over_batch: bool

    @abstractmethod
    def _attach_storage(self, storage: Storage | None) -> None:
        """Gives rows that were stored before the sampler was attached a priority."""

    def without_mass(self, stored: int) -> RuntimeError:
        """Returns the error for a draw from ``stored`` rows, all of priority 0."""
        return RuntimeError(
            f"every one of the {stored} stored rows has priority 0 and priority_offset is {self.priority_offset}, "
            "so none can be drawn; give at least one a positive priority or use a positive priority_offset"
        )

    def group_totals(self, storage: Storage) -> GroupTotals:
        """Returns the sum of the priorities as they are drawn by, of one group."""
        self._attach_storage(storage)
        total, least = self._tree.bounds()
        rows = np.array([occupancy_of(storage).count])
        return GroupTotals(["rows"], np.array([total]), rows, np.array([least]), float(self._largest))

    def sample_part(self, storage: Storage, part: DrawPart) -> tuple[Tensor, dict[str, Any], PartDraw]:
        """Draws the rows at the points, int64 ``[n]``.

        Raises:
            RuntimeError: the storage is empty, or every priority is zero.
        """
        totals, stored = self.group_totals(storage), len(storage)
        if stored == 0:
            raise empty_storage()
        if not totals.mass[0] > 0:
            raise self.without_mass(stored)
        index, probability = self._tree.draw_at(part.points)
        self._clocks["draws"] += 1
        return index, {}, PartDraw(probability, totals)

    def weigh(self, drawn: DividedRows) -> dict[str, np.ndarray]:
        """Returns ``priority_weight``, float32 ``[B]``, at most 1."""
        smallest = drawn.probability.min() if self.normalize_over_batch else drawn.least[0]
        weight = (drawn.probability / smallest) ** -self.beta
        self._clocks["draws"] += 1
        return {"priority_weight": weight.astype(np.float32)}
