# SPDX-License-Identifier: Apache-2.0
"""Cached lists of neighbors, searched and kept up by compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replay.jit import compiled
from lightning_replay.neighbors.search import PointTable, blocks_of

# This many lists are updated at once.
_BLOCK = 4096
_COLUMNS = ("slot", "distance", "radius", "choices")
# The radius of a slot whose list rows may not enter.
NO_LIST = -1.0


class NeighborCache:
    """For every slot of a table its ``num_candidates`` nearest other rows, a multiple of 8, some of them spare.

    A list holds *every* stored row nearer than the slot's ``radius``, nearest first. An arriving row enters the lists
    whose radius reaches it. The last row of a full list leaves, and the radius shrinks. A row that is overwritten
    leaves the radius as it is. So a list is exact as long as it has ``num_neighbors`` rows, which are the rows to draw
    from.
    """

    def __init__(self, table: PointTable, num_neighbors: int, num_candidates: int) -> None:
        capacity = table.capacity
        device = table.rows.device
        self.table = table
        self.num_neighbors = num_neighbors
        self.num_candidates = num_candidates
        self.slot: Tensor = torch.full((capacity, num_candidates), capacity, dtype=torch.int32, device=device)
        self.distance: Tensor = torch.full((capacity, num_candidates), torch.inf, dtype=torch.float32, device=device)
        self.radius: Tensor = torch.full((capacity,), NO_LIST, dtype=torch.float32, device=device)
        # The number of rows to draw from. It is a float because it multiplies the uniform draw.
        self.choices: Tensor = torch.zeros(capacity, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Size of the lists in bytes, without the table."""
        return sum(getattr(self, name).nbytes for name in _COLUMNS)

    def pick(self, index: Tensor, uniform: Tensor) -> Tensor:
        """Returns a nearest row of each of ``index`` ``[B]`` by numbers in [0, 1), or ``capacity`` for none."""
        position = (uniform * self.choices.index_select(0, index)).long().add_(index, alpha=self.num_candidates)
        return self.slot.view(-1).index_select(0, position).long()

    def put(self, slots: Tensor, distance: Tensor, slot: Tensor) -> None:
        """Replaces the lists of ``slots`` ``[n]`` by sorted ones ``[n, M]``. The radius is left alone."""
        stored = distance.isfinite()
        self.distance[slots] = distance
        self.slot[slots] = slot.masked_fill(~stored, self.table.capacity).int()
        self.choices[slots] = stored.sum(1).clamp_(max=self.num_neighbors).float()

    def drop(self, leaving: Tensor, limit: int) -> None:
        """Removes the slots marked in ``leaving`` (bool ``[capacity + 1]``) from the lists below ``limit``."""
        hit = leaving.index_select(0, self.slot[:limit].flatten())
        # Eight marks are read at a time, because all but a thousand of two million bytes are 0.
        slots = (hit.view(torch.int64).nonzero().squeeze(1) // (self.num_candidates // 8)).unique_consecutive()
        for block in blocks_of(slots, _BLOCK):
            kept = self.slot[block]
            distance = self.distance[block].masked_fill(leaving[kept.long()], torch.inf)
            distance, order = distance.sort(dim=1, stable=True)
            self.put(block, distance, kept.gather(1, order))

    def enter(self, arriving: Tensor, closest: Tensor) -> None:
        """Enters the rows ``arriving`` ``[q]`` into all lists whose radius reaches them."""
        # The rows arriving [q] are in each other's lists only. The array closest [limit] holds the squared distances to
        # the nearest row.
        reached = closest.clamp_(min=0) < self.radius[: len(closest)]
        for block in blocks_of(reached.nonzero().squeeze(1), _BLOCK):
            radius = self.radius[block]
            mode = "donot_use_mm_for_euclid_dist"
            distance = torch.cdist(self.table.points(block), self.table.points(arriving), compute_mode=mode).square_()
            distance = distance.masked_fill_(distance >= radius.unsqueeze(1), torch.inf)
            distance = torch.cat([self.distance[block], distance], 1)
            slot = torch.cat([self.slot[block], arriving.int().expand(len(block), -1)], 1)
            kept, position = distance.topk(self.num_candidates, dim=1, largest=False)
            pushed_out = distance.isfinite().sum(1) > self.num_candidates
            self.put(block, kept, slot.gather(1, position))
            self.radius[block] = torch.where(pushed_out, kept[:, -1], radius)

    def rerank(self, slots: Tensor) -> None:
        """Recomputes the distances in lists after a restandardization and scales each radius by its own list."""
        for block in blocks_of(slots, _BLOCK):
            slot = self.slot[block].long()
            old = self.distance[block]
            new = self.table.distances(block, slot)
            growth = new.nan_to_num(posinf=0.0).sum(1) / old.nan_to_num(posinf=0.0).sum(1)
            new, order = new.sort(dim=1)
            self.put(block, new, slot.gather(1, order))
            # The growth is bounded, and 1 for an empty list. The infinite radius of a list of all rows stays infinite.
            self.radius[block] *= growth.nan_to_num(nan=1.0).clamp_(1e-6, 1e6)

    def short(self, limit: int, required: int) -> Tensor:
        """Returns slots below ``limit`` that have a list, with fewer than ``required`` rows to draw from."""
        return ((self.choices[:limit] < required) & (self.radius[:limit] >= 0)).nonzero().squeeze(1)

    def state_dict(self, limit: int) -> dict[str, Tensor]:
        """Returns the lists of the slots below ``limit``."""
        return {name: getattr(self, name)[:limit].clone() for name in _COLUMNS}

    def load_state_dict(self, state: dict[str, Tensor], limit: int) -> None:
        """Restores the lists of the slots below ``limit``. Raises ``ValueError`` if they name other slots."""
        places = {name: getattr(self, name)[:limit] for name in _COLUMNS}
        slot = state["slot"]
        choices = state["choices"]
        # The compiled loops check no bounds, and the file may be damaged.
        within = (slot >= 0) & (slot <= self.table.capacity), (choices >= 0) & (choices <= self.num_neighbors)
        same_shapes = all(state[name].shape == place.shape for name, place in places.items())
        if not same_shapes or not all(bool(each.all()) for each in within):
            raise ValueError(f"the saved lists of neighbors are not those of {limit} slots of {self.table.capacity}")
        for name, place in places.items():
            place[:] = state[name]


# The lists: slot and distance, int32 and float32 [L, M], nearest first. Empty places hold the slot capacity. The array
# choices, float32 [L], holds the number of rows to draw from, num_neighbors at most. The radius is float32 [L].
@compiled
def pick(index, uniform, choices, slot, picked):  # type: ignore[no-untyped-def]
    """Writes ``picked``, one of the first ``choices[i]`` of the list ``slot[i]`` of each slot i in ``index``."""
    for number in range(index.size):
        row = index[number]
        picked[number] = slot[row, np.int64(uniform[number] * choices[row])]


@compiled
def drop(slot, distance, choices, leaving, lowest, highest, num_neighbors):  # type: ignore[no-untyped-def]
    """Removes the slots marked in ``leaving``, ``lowest`` to ``highest``, from lists. Others move to the front."""
    lists, length = slot.shape
    empty, span = np.int32(leaving.size - 1), np.uint32(highest - lowest)
    for row in range(lists):
        # Without a branch, so that the loop is vectorized: most lists have no slot between the bounds.
        within: Any = np.bool_(False)
        for place in range(length):
            within |= np.uint32(slot[row, place] - lowest) <= span
        if not within:
            continue
        kept = 0
        for place in range(length):
            other = slot[row, place]
            if other != empty and not leaving[other]:
                slot[row, kept] = other
                distance[row, kept] = distance[row, place]
                kept += 1
        slot[row, kept:] = empty
        distance[row, kept:] = np.inf
        choices[row] = min(kept, num_neighbors)


@compiled
def enter(  # type: ignore[no-untyped-def]
    slot, distance, choices, radius, points, closest, arriving, queries, empty, num_neighbors
):
    """Enters rows into the lists whose radius reaches them. The radius of a list that has no room for all shrinks.

    The rows are in the slots ``arriving``, int32 ``[q]``. ``queries``, float32 ``[d, q]``, are their ``points``.
    """
    length, (width, count) = slot.shape[1], queries.shape
    squares = np.empty(count, dtype=np.float32)
    for row in range(slot.shape[0]):
        reach = radius[row]
        if not max(closest[row], np.float32(0)) < reach:
            continue
        squares[:] = 0
        for feature in range(width):
            value = points[row, feature]
            for number in range(count):
                difference = value - queries[feature, number]
                squares[number] += difference * difference
        stored = 0
        while stored < length and slot[row, stored] != empty:
            stored += 1
        is_overfull = False
        for number in range(count):
            square = squares[number]
            if not square < reach:
                continue
            if stored == length:
                is_overfull = True
                if not square < distance[row, length - 1]:
                    continue
            else:
                stored += 1
            place = stored - 1
            while place > 0 and square < distance[row, place - 1]:
                distance[row, place] = distance[row, place - 1]
                slot[row, place] = slot[row, place - 1]
                place -= 1
            distance[row, place] = square
            slot[row, place] = arriving[number]
        choices[row] = min(stored, num_neighbors)
        if is_overfull:
            radius[row] = distance[row, length - 1]


class CompiledNeighborCache(NeighborCache):
    """A :class:`~lightning_replay.neighbors.cache.NeighborCache` updated in one loop each."""

    def pick(self, index: Tensor, uniform: Tensor) -> Tensor:
        """Returns a nearest row of each of ``index`` ``[B]``, in one compiled loop."""
        picked = torch.empty_like(index)
        pick(index.numpy(), uniform.numpy(), self.choices.numpy(), self.slot.numpy(), picked.numpy())
        return picked

    def drop(self, leaving: Tensor, limit: int) -> None:
        """Removes the slots marked in ``leaving`` from the lists below ``limit``, in one compiled loop."""
        slots = leaving.numpy().nonzero()[0].astype(np.int32)
        lists = (self.slot.numpy()[:limit], self.distance.numpy()[:limit], self.choices.numpy()[:limit])
        if slots.size:
            drop(*lists, leaving.numpy(), slots[0], slots[-1], self.num_neighbors)

    def enter(self, arriving: Tensor, closest: Tensor) -> None:
        """Enters the rows ``arriving`` into all lists whose radius reaches them, in one compiled loop."""
        limit = len(closest)
        columns = (self.slot, self.distance, self.choices, self.radius, self.table.rows)
        enter(
            *(column.numpy()[:limit] for column in columns),
            closest.numpy(),
            arriving.int().numpy(),
            self.table.points(arriving).T.contiguous().numpy(),
            np.int32(self.table.capacity),
            self.num_neighbors,
        )
