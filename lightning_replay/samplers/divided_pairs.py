# SPDX-License-Identifier: Apache-2.0
"""Draws of pairs that are divided over several replays: those of the first rows."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from torch import Tensor
from torchrl.data.replay_buffers import Sampler, Storage

from lightning_replay.declared import declared_sampler
from lightning_replay.draw_parts import DividedRows, DrawPart, GroupRows, GroupTotals, PartDraw
from lightning_replay.parts import ReplaySampler


class DividedPairs(ReplaySampler):
    """A sampler of pairs: ``first`` divides the first rows, and a partner is in the same replay."""

    first: Sampler

    @abstractmethod
    def paired(self, first: Tensor, storage: Storage) -> Tensor:
        """Returns rows ``[B]`` with their partners, int64 ``[B, 2]``."""

    def check_divisible(self) -> None:
        """Refuses to have draws divided where those of ``first`` cannot be."""
        super().check_divisible()
        declared_sampler(self.first).check_divisible()

    def group_totals(self, storage: Storage) -> GroupTotals:
        """Returns those of ``first``."""
        return declared_sampler(self.first).group_totals(storage)

    def sample_part(self, storage: Storage, part: DrawPart) -> tuple[Tensor, dict[str, Any], PartDraw]:
        """Draws the first of each pair at the points by ``first``; partners are found among the rows of this replay."""
        first, info, reply = declared_sampler(self.first).sample_part(storage, part)
        return self.paired(first, storage), info, reply

    def rows_of_groups(self, batch_size: int, totals: GroupTotals) -> GroupRows:
        """Divides a batch over the groups as ``first`` does."""
        return declared_sampler(self.first).rows_of_groups(batch_size, totals)

    def weigh(self, drawn: DividedRows) -> dict[str, np.ndarray]:
        """Returns the columns that ``first`` makes of its rows."""
        return declared_sampler(self.first).weigh(drawn)

    def raise_largest_priority(self, priority: float) -> None:
        """Passes the largest priority of other replays on to ``first``."""
        declared_sampler(self.first).raise_largest_priority(priority)
