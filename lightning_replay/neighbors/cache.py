# SPDX-License-Identifier: Apache-2.0
"""The neighbour list of every slot, updated as rows arrive and leave."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_replay.neighbors.search import PointTable, blocks_of

_BLOCK = 4096  # lists worked on at once
NO_LIST = -1.0  # radius of a slot whose list rows may not enter


class NeighborCache:
    """For every slot of a table its ``num_candidates`` nearest other rows, a multiple of 8, some of them spare.

    A list holds *every* stored row nearer than the slot's ``radius``, nearest first. An arriving row enters the
    lists whose radius reaches it; the last row of a full one leaves, and the radius shrinks. A row that is overwritten
    leaves the radius as it is. So a list is exact as long as it has ``num_neighbors`` rows, those that are drawn from.
    """

    def __init__(self, table: PointTable, num_neighbors: int, num_candidates: int) -> None:
        capacity, device = table.capacity, table.rows.device
        self.table = table
        self.num_neighbors = num_neighbors
        self.num_candidates = num_candidates
        self.slot: Tensor = torch.full((capacity, num_candidates), capacity, dtype=torch.int32, device=device)
        self.distance: Tensor = torch.full((capacity, num_candidates), torch.inf, device=device)
        self.radius: Tensor = torch.full((capacity,), NO_LIST, device=device)
        # Rows to draw from; a float because it multiplies the uniform draw.
        self.choices: Tensor = torch.zeros(capacity, device=device)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns().values())

    def pick(self, index: Tensor, uniform: Tensor) -> Tensor:
        """Returns a nearest row of each of ``index`` ``[B]`` by numbers in [0, 1); ``capacity`` for none."""
        position = (uniform * self.choices.index_select(0, index)).long().add_(index, alpha=self.num_candidates)
        return self.slot.view(-1).index_select(0, position).long()

    def put(self, slots: Tensor, distance: Tensor, slot: Tensor) -> None:
        """Replaces the lists of ``slots`` ``[n]`` by sorted ones ``[n, M]``; the radius is left alone."""
        stored = distance.isfinite()
        self.distance[slots] = distance
        self.slot[slots] = slot.masked_fill(~stored, self.table.capacity).int()
        self.choices[slots] = stored.sum(1).clamp_(max=self.num_neighbors).float()

    def drop(self, leaving: Tensor, limit: int) -> None:
        """Removes the slots marked in ``leaving`` (bool ``[capacity + 1]``) from the lists below ``limit``."""
        hit = leaving.index_select(0, self.slot[:limit].flatten())
        # Eight marks at a time: of two million bytes all but a thousand are 0.
        slots = (hit.view(torch.int64).nonzero().squeeze(1) // (self.num_candidates // 8)).unique_consecutive()
        for block in blocks_of(slots, _BLOCK):
            kept = self.slot[block]
            distance = self.distance[block].masked_fill(leaving[kept.long()], torch.inf)
            distance, order = distance.sort(dim=1, stable=True)
            self.put(block, distance, kept.gather(1, order))

    def enter(self, arriving: Tensor, closest: Tensor) -> None:
        """Enters the rows ``arriving`` ``[q]``, in no list but each other's, into the lists whose radius reaches them.

        ``closest`` ``[limit]`` is the squared distance of each slot to the closest of them.
        """
        reached = closest.clamp_(min=0) < self.radius[: len(closest)]
        for block in blocks_of(reached.nonzero().squeeze(1), _BLOCK):
            radius = self.radius[block]
            distance = self.table.cross_distances(block, arriving)
            distance = distance.masked_fill_(distance >= radius.unsqueeze(1), torch.inf)
            distance = torch.cat([self.distance[block], distance], 1)
            slot = torch.cat([self.slot[block], arriving.int().expand(len(block), -1)], 1)
            kept, position = distance.topk(self.num_candidates, dim=1, largest=False)
            pushed_out = distance.isfinite().sum(1) > self.num_candidates
            self.put(block, kept, slot.gather(1, position))
            self.radius[block] = torch.where(pushed_out, kept[:, -1], radius)

    def rerank(self, slots: Tensor) -> None:
        """Recomputes the distances in lists after a restandardisation and scales each radius by its own list."""
        for block in blocks_of(slots, _BLOCK):
            slot, old = self.slot[block].long(), self.distance[block]
            new = self.table.distances(block, slot)
            growth = new.nan_to_num(posinf=0.0).sum(1) / old.nan_to_num(posinf=0.0).sum(1)
            new, order = new.sort(dim=1)
            self.put(block, new, slot.gather(1, order))
            # Bounded, and 1 where a list is empty: an infinite radius, of a list that holds all rows, stays infinite.
            self.radius[block] *= growth.nan_to_num(nan=1.0).clamp_(1e-6, 1e6)

    def short(self, limit: int, required: int) -> Tensor:
        """Returns slots below ``limit`` that have a list, with fewer than ``required`` rows to draw from."""
        return ((self.choices[:limit] < required) & (self.radius[:limit] >= 0)).nonzero().squeeze(1)

    def state_dict(self, limit: int) -> dict[str, Tensor]:
        """Returns the lists below ``limit``."""
        return {name: column[:limit].clone() for name, column in self._columns().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        columns = self._columns()
        for name, saved in state.items():
            columns[name][: len(saved)] = saved

    def _columns(self) -> dict[str, Tensor]:
        return {"slot": self.slot, "distance": self.distance, "radius": self.radius, "choices": self.choices}
