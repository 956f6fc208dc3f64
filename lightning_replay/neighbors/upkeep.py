# SPDX-License-Identifier: Apache-2.0
"""When and how cached neighbour lists are brought up to date."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_replay.neighbors.cache import NeighborCache
from lightning_replay.neighbors.rows import FeatureRows
from lightning_replay.neighbors.search import ExactSearch, FaissSearch, blocks_of

_BLOCK = 64  # queries of one product
# Distances that each arriving row pays for the renewal of old lists after a restandardisation: a sixth of its own
# search at 100,000 rows; at 1,000 rows a few arriving rows renew everything.
_RENEWAL_DISTANCES = 2**14


class NeighborUpkeep:
    """Collects the rows that were written and serves them together in one pass over the table.

    Three kinds of lists are computed by a search in a pass: those of the rows that wait, those that have lost more
    rows than they had spare, and, after a restandardisation, all others, a few per pass. Where at least half of all
    rows wait, every list is rebuilt instead.

    Args:
        rows: what is stored.
        cache: the lists.
        search: of a rebuild.
        refresh_interval: waiting rows that are served without being drawn.
        drift_tolerance: relative change of a standard deviation from which rows are standardised anew.
    """

    def __init__(
        self,
        rows: FeatureRows,
        cache: NeighborCache,
        search: ExactSearch | FaissSearch,
        refresh_interval: int,
        drift_tolerance: float,
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.search = search
        self.refresh_interval = refresh_interval
        self.drift_tolerance = drift_tolerance
        # One more than slots: short lists point to the slot after the last.
        self.waiting = torch.zeros(rows.capacity + 1, dtype=torch.bool, device=rows.features.device)
        self.waiting_count = 0
        self._left: list[Tensor] = []  # rows that were overwritten since the last pass and may be in lists
        self._renewals_left = 0
        self._renewal_cursor = 0

    @property
    def nbytes(self) -> int:
        """Bytes of lists, table and marks."""
        return self.cache.nbytes + self.cache.table.nbytes + self.waiting.nbytes

    def announce(self, index: Tensor, held: Tensor, old: Tensor) -> None:
        """Says that ``index`` was just written, where ``held`` of it held the rows ``old``."""
        if len(held):
            served = ~self.waiting[held]
            self._left.append(old[served])
            self.waiting_count -= len(held) - len(self._left[-1])
        self.waiting_count += len(index)
        self.waiting[index] = True

    def catch_up(self, index: Tensor) -> None:
        """Runs a pass if enough rows wait, or one of ``index``."""
        enough = self.waiting_count >= min(self.refresh_interval, self.rows.count // 2)
        if self.waiting_count and (enough or bool(self.waiting.index_select(0, index).any())):
            self.run()

    def run(self) -> None:
        """Serves all rows that wait."""
        if 2 * self.waiting_count >= self.rows.count:
            self._rebuild()
        else:
            self._admit(self.waiting[: self.rows.limit].nonzero().squeeze(1))
        self.waiting.fill_(False)
        self.waiting_count = 0
        self._left = []

    def _rebuild(self) -> None:
        slots = self.rows.refit()
        self.cache.table.place(slots, self.rows.standardized(slots))
        found = self.search.neighbors(self.cache.table, slots, self.cache.num_candidates, self.rows.limit)
        self.cache.put(slots, *found)
        self.cache.complete(slots)
        self._renewals_left = 0

    def _admit(self, arriving: Tensor) -> None:
        cache, limit = self.cache, self.rows.limit
        left = self._rows_left()
        if len(left):
            cache.drop(self.waiting, limit)
        cache.suspend(arriving)
        self.rows.standardization.replace(left, self.rows.features[arriving])
        if self.rows.standardization.drift() > self.drift_tolerance:
            self._restandardize()
        else:
            cache.table.place(arriving, self.rows.standardized(arriving))
        due = self._due(len(arriving))
        for block in blocks_of(arriving, _BLOCK):
            distance, slot, closest = cache.table.nearest(block, cache.num_candidates, limit)
            cache.put(block, distance, slot)
            cache.enter(block, closest)
        for block in blocks_of(due, _BLOCK):
            cache.put(block, *cache.table.nearest(block, cache.num_candidates, limit)[:2])
        # Only now: a list just computed holds all arriving rows already, those of later blocks too.
        cache.complete(torch.cat([arriving, due]))

    def _rows_left(self) -> Tensor:
        return torch.cat([self.rows.features[:0], *self._left])

    def _restandardize(self) -> None:
        slots = self.rows.refit()
        self.cache.table.place(slots, self.rows.standardized(slots))
        self.cache.rerank(slots[~self.waiting[slots]])
        self._renewals_left = self.rows.limit

    def _due(self, arriving_count: int) -> Tensor:
        """Slots whose lists must be searched anew: too short ones, and the next of a renewal."""
        limit = self.rows.limit
        short = self.cache.short(limit, min(self.cache.num_neighbors, self.rows.count - 1))
        if not self._renewals_left:
            return short
        number = min(math.ceil(arriving_count * _RENEWAL_DISTANCES / self.rows.count), self._renewals_left)
        renewed = (torch.arange(number, device=short.device) + self._renewal_cursor) % limit
        self._renewal_cursor = (self._renewal_cursor + number) % limit
        self._renewals_left -= number
        return torch.cat([short, renewed[self.cache.listed(renewed)]]).unique()

    def state_dict(self) -> dict[str, Any]:
        """Lists, marks and how far a renewal is."""
        return {
            "cache": self.cache.state_dict(self.rows.limit),
            "waiting": self.waiting[: self.rows.limit].clone(),
            "left": self._rows_left(),
            "renewals_left": self._renewals_left,
            "renewal_cursor": self._renewal_cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` returned, after the rows were loaded."""
        slots = self.rows.slots()
        self.cache.table.place(slots, self.rows.standardized(slots))
        self.cache.load_state_dict(state["cache"])
        self.waiting[: self.rows.limit] = state["waiting"].to(self.waiting.device)
        self.waiting_count = int(self.waiting.sum())
        self._left = [state["left"].to(self.rows.features)] if len(state["left"]) else []
        self._renewals_left = int(state["renewals_left"])
        self._renewal_cursor = int(state["renewal_cursor"])
