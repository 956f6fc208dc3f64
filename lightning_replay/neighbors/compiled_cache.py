# SPDX-License-Identifier: Apache-2.0
"""Neighbour lists that compiled loops update."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_replay.neighbors import numba_kernels
from lightning_replay.neighbors.cache import NeighborCache


class CompiledNeighborCache(NeighborCache):
    """A :class:`~lightning_replay.neighbors.cache.NeighborCache` updated in one loop each."""

    def pick(self, index: Tensor, uniform: Tensor) -> Tensor:
        if uniform.dtype != torch.float32:
            return super().pick(index, uniform)
        picked = torch.empty_like(index)
        numba_kernels.pick(index.numpy(), uniform.numpy(), self.choices.numpy(), self.slot.numpy(), picked.numpy())
        return picked

    def drop(self, leaving: Tensor, limit: int) -> None:
        slots = leaving.numpy().nonzero()[0].astype(np.int32)
        lists = (self.slot.numpy()[:limit], self.distance.numpy()[:limit], self.choices.numpy()[:limit])
        if slots.size:
            numba_kernels.drop(*lists, leaving.numpy(), slots[0], slots[-1], self.num_neighbors)

    def enter(self, arriving: Tensor, closest: Tensor) -> None:
        limit = len(closest)
        columns = (self.slot, self.distance, self.choices, self.radius, self.table.rows)
        numba_kernels.enter(
            *(column.numpy()[:limit] for column in columns),
            closest.numpy(),
            arriving.int().numpy(),
            self.table.points(arriving).T.contiguous().numpy(),
            np.int32(self.table.capacity),
            self.num_neighbors,
        )
