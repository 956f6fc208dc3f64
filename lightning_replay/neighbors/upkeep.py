# SPDX-License-Identifier: Apache-2.0
"""Passes over all rows that update the cached neighbour lists."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_replay.neighbors.cache import NO_LIST, NeighborCache
from lightning_replay.neighbors.rows import FeatureRows
from lightning_replay.neighbors.search import Search, blocks_of

_BLOCK = 64  # queries of one product
# Distances that each arriving row pays for the renewal of old lists after a restandardisation: a sixth of its own
# search at 100,000 rows; at 1,000 rows a few arriving rows renew everything.
_RENEWAL_DISTANCES = 2**14


class NeighborUpkeep:
    """Collects the rows that were written and adds them to the lists together, in one pass over the table.

    A pass searches the lists of the waiting rows, those with fewer rows than neighbours, and, after a
    restandardisation, all others, a few per pass. Where at least half of all rows wait, every list is rebuilt.

    ``search`` finds the lists of a rebuild; ``refresh_interval`` and ``drift_tolerance`` are those of
    :class:`~lightning_replay.neighbors.NeighborLists`.
    """

    def __init__(
        self, rows: FeatureRows, cache: NeighborCache, search: Search, refresh_interval: int, drift_tolerance: float
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.search = search
        self.refresh_interval = refresh_interval
        self.drift_tolerance = drift_tolerance
        # One more than slots: short lists refer to the slot after the last.
        self.waiting: Tensor = torch.zeros(rows.capacity + 1, dtype=torch.bool, device=rows.features.device)
        self.waiting_count: int = 0
        self._left: list[Tensor] = []  # features overwritten since the last pass, of rows that may be in lists
        self._renewals_left = 0
        self._renewal_cursor = 0

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.cache.table.nbytes + self.waiting.nbytes

    def announce(self, index: Tensor, held: Tensor, old: Tensor) -> None:
        """Adds ``index``, just written, to the waiting rows; ``held`` of it held other rows with features ``old``."""
        if len(held):
            was_waiting = self.waiting.index_select(0, held)
            again = int(was_waiting.sum())
            self._left.append(old[~was_waiting] if again else old)
            self.waiting_count -= again
        self.waiting_count += len(index)
        self.waiting.index_fill_(0, index, True)

    def catch_up(self, index: Tensor) -> None:
        """Runs a pass if enough rows wait, or one of ``index``."""
        enough = self.waiting_count >= min(self.refresh_interval, self.rows.count // 2)
        if self.waiting_count and (enough or bool(self.waiting.index_select(0, index).any())):
            self.run()

    def run(self) -> None:
        if 2 * self.waiting_count >= self.rows.count:
            self._rebuild()
        else:
            self._admit(self.waiting[: self.rows.limit].nonzero().squeeze(1))
        self.waiting.fill_(False)
        self.waiting_count = 0
        self._left = []

    def _rebuild(self) -> None:
        cache, slots = self.cache, self._refit()
        cache.put(slots, *self.search(cache.table, slots, cache.num_candidates, self.rows.limit))
        cache.radius[slots] = cache.distance[slots, -1]
        self._renewals_left = 0

    def _refit(self) -> Tensor:
        slots = self.rows.refit()
        self.cache.table.place(slots, self.rows.standardized(slots))
        return slots

    def _admit(self, arriving: Tensor) -> None:
        cache, limit = self.cache, self.rows.limit
        left = self._rows_left()
        if len(left):
            cache.drop(self.waiting, limit)
        cache.radius[arriving] = NO_LIST
        self.rows.standardization.replace(left, self.rows.features[arriving])
        if self.rows.standardization.drift() > self.drift_tolerance:
            slots = self._refit()
            cache.rerank(slots[~self.waiting[slots]])
            self._renewals_left = limit
        else:
            cache.table.place(arriving, self.rows.standardized(arriving))
        due = self._due(len(arriving))
        for block in blocks_of(arriving, _BLOCK):
            distance, slot, closest = cache.table.nearest(block, cache.num_candidates, limit)
            cache.put(block, distance, slot)
            cache.enter(block, closest)
        for block in blocks_of(due, _BLOCK):
            cache.put(block, *cache.table.nearest(block, cache.num_candidates, limit)[:2])
        # Only now: a list just computed has all arriving rows, those of later blocks too.
        searched = torch.cat([arriving, due])
        cache.radius[searched] = cache.distance[searched, -1]

    def _rows_left(self) -> Tensor:
        return torch.cat([self.rows.features[:0], *self._left])

    def _due(self, arriving_count: int) -> Tensor:
        """Returns slots whose lists are searched again: too short ones, and the next of a renewal."""
        limit = self.rows.limit
        short = self.cache.short(limit, min(self.cache.num_neighbors, self.rows.count - 1))
        if not self._renewals_left:
            return short
        number = min(math.ceil(arriving_count * _RENEWAL_DISTANCES / self.rows.count), self._renewals_left)
        renewed = (torch.arange(number, device=short.device) + self._renewal_cursor) % limit
        self._renewal_cursor = (self._renewal_cursor + number) % limit
        self._renewals_left -= number
        return torch.cat([short, renewed[self.cache.radius[renewed] >= 0]]).unique()

    def state_dict(self) -> dict[str, Any]:
        """Returns lists, waiting rows and the progress of a renewal."""
        return {
            "cache": self.cache.state_dict(self.rows.limit),
            "waiting": self.waiting[: self.rows.limit].clone(),
            "left": self._rows_left(),
            "renewals_left": self._renewals_left,
            "renewal_cursor": self._renewal_cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, after the rows were loaded."""
        slots = self.rows.slots()
        self.cache.table.place(slots, self.rows.standardized(slots))
        self.cache.load_state_dict(state["cache"])
        self.waiting[: self.rows.limit] = state["waiting"].to(self.waiting.device)
        self.waiting_count = int(self.waiting.sum())
        self._left = [state["left"].to(self.rows.features)] if len(state["left"]) else []
        self._renewals_left = int(state["renewals_left"])
        self._renewal_cursor = int(state["renewal_cursor"])
