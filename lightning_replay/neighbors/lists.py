# SPDX-License-Identifier: Apache-2.0
"""The k nearest stored rows of any stored row, and a random one of them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from lightning_replay.neighbors.cache import NeighborCache
from lightning_replay.neighbors.compiled_cache import CompiledNeighborCache
from lightning_replay.neighbors.rows import FeatureRows
from lightning_replay.neighbors.search import PointTable, direct_neighbors, search_by_name
from lightning_replay.neighbors.standardization import Standardization
from lightning_replay.neighbors.upkeep import NeighborUpkeep
from lightning_replay.validation import check_option, checked_count


class NeighborLists:
    """Draws a partner uniformly from the k nearest *other* rows in standardised features.

    Distances are Euclidean after division by the population standard deviation over all stored rows; a constant feature
    is ignored. A row is excluded from its own neighbours by its slot, so an exact duplicate is a neighbour. With fewer
    than k + 1 rows all others are neighbours; a lone row is drawn itself. Neighbourhood of Sander et al. 2022,
    https://arxiv.org/abs/2205.09117.

    Call :meth:`write` whenever slots are (re)written and :meth:`draw` for partners. With ``refresh_interval=1``
    every draw searches all rows under the statistics of that moment: the paper's definition, exact and slow.

    Otherwise lists are cached and updated by passes over all rows. A pass runs in a draw when at least
    ``refresh_interval`` written rows wait or a drawn row waits, and searches for all that wait: one search per row,
    however often rows are drawn. A waiting row is not drawn as a partner. Lists are exact for the standardisation of
    the last refit. When a standard deviation has moved by more than ``drift_tolerance`` since then, the rows are
    standardised again, each list is ranked again from its ``num_neighbors + num_spare`` candidates, and the next passes
    renew all lists, a few at a time.

    Args:
        capacity: slots.
        num_neighbors: k of the paper.
        refresh_interval: waiting rows at which a draw runs a pass.
        backend: of rebuilds, which run where at least half of the rows are new: ``"exact"``, ``"faiss_flat"``
            (exact too) or ``"faiss_ivf"`` (inverted file, approximate: for loading many rows at once). Passes are
            exact with all three; Faiss runs on the GPU where the features are on one.
        num_spare: candidates kept beyond k, at least; None keeps as many as k. A list is a multiple of 8 long.
        drift_tolerance: relative change of a standard deviation from which rows are standardised again.

    Example:
        >>> lists = NeighborLists(capacity=4, num_neighbors=1)
        >>> lists.write(torch.arange(3), torch.tensor([[0.0], [1.0], [5.0]]))
        >>> lists.draw(torch.tensor([0, 1, 2]), torch.Generator())
        tensor([1, 0, 1])
    """

    def __init__(
        self,
        capacity: int,
        num_neighbors: int,
        *,
        refresh_interval: int = 64,
        backend: str = "exact",
        num_spare: int | None = None,
        drift_tolerance: float = 0.03,
    ) -> None:
        self.capacity: int = checked_count("capacity", capacity, of="slots")
        self.num_neighbors: int = checked_count("num_neighbors", num_neighbors)
        self.num_spare: int = self.num_neighbors if num_spare is None else checked_count("num_spare", num_spare, 0)
        self.refresh_interval: int = checked_count("refresh_interval", refresh_interval, of="new rows")
        check_option("drift_tolerance", drift_tolerance, Real, "a number from 0 on, inf for never", 0.0, math.inf)
        self.drift_tolerance: float = float(drift_tolerance)
        self.backend = backend
        self._search = search_by_name(backend)
        if refresh_interval == 1 and backend != "exact":
            raise ValueError(
                f"refresh_interval=1 searches every draw by the definition and takes backend='exact'; got {backend!r}. "
                "Raise refresh_interval to use Faiss for rebuilds."
            )
        self.clear()

    def clear(self) -> None:
        """Removes every row; features of another width may follow."""
        self._rows = FeatureRows(self.capacity)
        self._upkeep: NeighborUpkeep | None = None

    def __len__(self) -> int:
        return self._rows.count

    @property
    def nbytes(self) -> int:
        """Bytes of features and lists, allocated by the first write."""
        return self._rows.nbytes + (self._upkeep.nbytes if self._upkeep else 0)

    @property
    def standardization(self) -> Standardization:
        """Returns the standardisation of the lists, with the drift of the rows as of the last pass."""
        return self._rows.standardization

    def write(self, index: Tensor, features: Tensor) -> None:
        """Stores rows with ``features`` ``[n, d]`` at the slots ``index`` ``[n]``; searches nothing yet.

        Raises:
            ValueError: NaN, infinite or differently shaped features, or a slot named twice. Nothing is changed.
            IndexError: a slot out of range. Nothing is changed.
        """
        self._rows.check_write(index, features)
        if not len(index):
            return
        index = index.to(features.device).long()
        if not self._rows.width:
            self._allocate(features)
        held, old = self._rows.write(index, features)
        if self._upkeep:
            self._upkeep.announce(index, held, old)

    @torch.inference_mode(False)
    def _allocate(self, features: Tensor) -> None:
        self._rows.allocate(features)
        if self.refresh_interval > 1:
            table = PointTable(self.capacity, self._rows.width, features.device)
            cache = cache_for(table, self.num_neighbors, -(-(self.num_neighbors + self.num_spare) // 8) * 8)
            self._upkeep = NeighborUpkeep(self._rows, cache, self._search, self.refresh_interval, self.drift_tolerance)

    def draw(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a partner for each of the stored rows ``index`` ``[B]``, uniform over its nearest other rows.

        Takes one number per row from ``generator``, more where a row drawn as a partner was just overwritten.

        Returns:
            Slots, int64 ``[B]``; a row itself where it is the only one.

        Raises:
            IndexError: a slot that holds no row.
        """
        self._rows.check_range(index)
        uniform = torch.rand(index.shape, generator=generator, device=generator.device).to(index.device)
        if self._upkeep is None or len(self) < 2 or not len(index):
            return _choose(index, self.neighbors(index), uniform)
        self._upkeep.catch_up(index)
        partner = self._upkeep.cache.pick(index, uniform)
        if int(partner.amax()) == self.capacity:
            self._rows.check_stored(index)
        if self._upkeep.waiting_count:
            stale = self._upkeep.waiting[partner]
            if bool(stale.any()):
                partner[stale] = self._draw_again(index[stale], generator)
        return partner

    def _draw_again(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Draws partners among the rows left in the lists; runs a pass where a list has none."""
        assert self._upkeep is not None
        neighbor = self.neighbors(index)
        if bool((neighbor[:, 0] < 0).any()):
            self._upkeep.run()
            neighbor = self.neighbors(index)
        uniform = torch.rand(index.shape, generator=generator, device=generator.device).to(index.device)
        return _choose(index, neighbor, uniform)

    def neighbors(self, index: Tensor) -> Tensor:
        """Returns the rows that partners of ``index`` are drawn from, int64 ``[B, k]``: nearest first, -1 for none."""
        self._rows.check_stored(index)
        if self._upkeep is None:
            return self._by_definition(index, self.num_neighbors)[1]
        self._upkeep.catch_up(index)
        slot = self._upkeep.cache.slot[index, : self.num_neighbors].long()
        gone = (slot == self.capacity) | self._upkeep.waiting[slot]
        return slot.masked_fill(gone, -1).gather(1, gone.to(torch.uint8).argsort(dim=1, stable=True))

    def _by_definition(self, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns distances and slots ``[B, count]`` in the present standardisation, padded with infinity and -1."""
        if not len(index):
            return index.new_empty(0, count).double(), index.new_empty(0, count)
        slots = self._rows.slots()
        rows = self._rows.features[slots]
        now = Standardization(self._rows.width, rows.device)
        now.refit(rows)
        number = min(count, len(slots) - 1)
        distance, position = direct_neighbors(rows, now.std, torch.searchsorted(slots, index.contiguous()), number)
        missing = (0, count - number)
        return functional.pad(distance, missing, value=torch.inf), functional.pad(slots[position], missing, value=-1)

    def recall_at(self, k: int, sample: int = 1000, generator: torch.Generator | None = None) -> float:
        """Returns the share of the true k nearest rows, in the present standardisation, that the lists hold.

        ``k`` is at most ``num_neighbors``; ``sample`` rows are compared, drawn without replacement.
        """
        if checked_count("k", k) > self.num_neighbors:
            raise ValueError(f"k is {k}; it must be at most num_neighbors, which is {self.num_neighbors}")
        checked_count("sample", sample, of="rows")
        slots = self._rows.slots() if len(self) else torch.empty(0, dtype=torch.int64, device="cpu")
        if len(slots) < 2:
            return 1.0
        device = generator.device if generator is not None else "cpu"
        order = torch.randperm(len(slots), generator=generator, device=device)[:sample]
        index = slots[order.to(slots.device)]
        listed = self.neighbors(index)[:, :k]
        true = self._by_definition(index, min(k, len(slots) - 1))[1]
        return float((true.unsqueeze(2) == listed.unsqueeze(1)).any(2).double().mean())

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values; the next draws are the same after they are loaded."""
        return {
            "num_neighbors": self.num_neighbors,
            "num_spare": self.num_spare,
            "rows": self._rows.state_dict(),
            "upkeep": self._upkeep.state_dict() if self._upkeep else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, on the device of the saved tensors.

        Raises:
            ValueError: the state is of lists with other options.
        """
        saved = (state["num_neighbors"], state["num_spare"], bool(state["upkeep"]) or not state["rows"]["limit"])
        mine = (self.num_neighbors, self.num_spare, self.refresh_interval > 1 or not state["rows"]["limit"])
        if saved != mine or state["rows"]["limit"] > self.capacity:
            raise ValueError(
                f"the saved lists have num_neighbors, num_spare, cached = {saved} and reach slot "
                f"{state['rows']['limit']}; these have {mine} and capacity {self.capacity}. Build them as those were."
            )
        self.clear()
        if state["rows"]["limit"]:
            self._allocate(state["rows"]["features"])
            self._rows.load_state_dict(state["rows"])
        if self._upkeep:
            self._upkeep.load_state_dict(state["upkeep"])


def _choose(index: Tensor, neighbor: Tensor, uniform: Tensor) -> Tensor:
    """Returns one of the neighbours ``[B, k]`` of each row, padded with -1; the row itself where it has none."""
    choices = (neighbor >= 0).sum(1)
    position = (uniform * choices).long()
    partner = neighbor.gather(1, position.unsqueeze(1)).squeeze(1)
    return torch.where(choices > 0, partner, index)


def cache_for(table: PointTable, num_neighbors: int, num_candidates: int) -> NeighborCache:
    """Returns lists that are updated by compiled loops on the CPU, by torch elsewhere."""
    kind = CompiledNeighborCache if table.rows.device.type == "cpu" else NeighborCache
    return kind(table, num_neighbors, num_candidates)
