# SPDX-License-Identifier: Apache-2.0
"""Lists of the nearest stored rows, kept up as rows arrive. With discrete actions, they are of the same action."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from lightning_replay.neighbors.cache import NO_LIST, CompiledNeighborCache, NeighborCache
from lightning_replay.neighbors.rows import FeatureRows, Standardization
from lightning_replay.neighbors.search import PointTable, blocks_of, direct_neighbors, search_by_name
from lightning_replay.options import check_option, checked_count
from lightning_replay.state import Stateful

_BLOCK = 64  # queries of one product
# Distances that each arriving row pays for the renewal of old lists after a restandardization. They are a sixth of the
# row's search at 100,000 rows. At 1,000 rows a few arriving rows renew everything.
_RENEWAL_DISTANCES = 2**14


class NeighborLists:
    """Draws a partner uniformly from the k nearest *other* rows in standardized features.

    Distances are Euclidean after division by the population standard deviation over all stored rows. A constant feature
    is ignored. A row is excluded from its own neighbors by its slot, so an exact duplicate is a neighbor. With fewer
    than k + 1 rows all others are neighbors. A lone row is drawn itself. Neighborhood of Sander et al. 2022,
    https://arxiv.org/abs/2205.09117.

    Call :meth:`write` whenever slots are (re)written and :meth:`draw` for partners. With ``refresh_interval=1``
    every draw searches all rows under the statistics of that moment: the paper's definition, exact and slow.

    Otherwise lists are cached and updated by passes over all rows. A pass runs in a draw when at least
    ``refresh_interval`` written rows wait or a drawn row waits. It searches for all that wait: one search per row,
    however often rows are drawn. A waiting row is not drawn as a partner. Lists are exact for the standardization of
    the last refit. When a standard deviation has moved by more than ``drift_tolerance`` since then, the rows are
    standardized again. Each list is then ranked again from its ``num_neighbors + num_spare`` candidates, and the next
    passes renew all lists, a few at a time.

    Args:
        capacity: Number of slots.
        num_neighbors: Number k of neighbors in the paper.
        refresh_interval: Number of waiting rows at which a draw runs a pass.
        backend: Search of rebuilds, which run if at least half of the rows are new: ``"exact"``, ``"faiss_flat"``
            (exact too) or ``"faiss_ivf"`` (inverted file, approximate: for loading many rows at once). Passes are
            exact with all three. Faiss runs on the GPU if the features are on one.
        num_spare: Least number of candidates kept beyond k. None keeps as many as k. A list is a multiple of 8 long.
        drift_tolerance: Relative change of a standard deviation from which rows are standardized again.

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
        """Removes every row. Features of another width may follow."""
        self._rows = FeatureRows(self.capacity)
        self._cache: NeighborCache | None = None
        self._waiting_count = 0
        # The overwritten features since the last pass, of rows that may be in lists.
        self._left: list[Tensor] = []
        self._renewals_left = self._renewal_cursor = 0

    def __len__(self) -> int:
        return self._rows.count

    @property
    def nbytes(self) -> int:
        """Bytes of features and lists, allocated by the first write."""
        cache = self._cache
        return self._rows.nbytes + (cache.nbytes + cache.table.nbytes + self._waiting.nbytes if cache else 0)

    @property
    def standardization(self) -> Standardization:
        """Means and standard deviations that the features are divided by."""
        return self._rows.standardization

    def write(self, index: Tensor, features: Tensor) -> None:
        """Stores rows with ``features`` ``[n, d]`` at the slots ``index`` ``[n]``, and searches nothing yet.

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
        self.to(features.device)
        held, old = self._rows.write(index, features)
        if self._cache is None:
            return
        if len(held):
            # Rows that waited are in no list, so they are not removed from any.
            was_waiting = self._waiting.index_select(0, held)
            again = int(was_waiting.sum())
            self._left.append(old[~was_waiting] if again else old)
            self._waiting_count -= again
        self._waiting_count += len(index)
        self._waiting.index_fill_(0, index, True)

    @torch.inference_mode(False)
    def _allocate(self, features: Tensor) -> None:
        self._rows.allocate(features)
        if self.refresh_interval > 1:
            table = PointTable(self.capacity, self._rows.width, features.device)
            kind = CompiledNeighborCache if features.device.type == "cpu" else NeighborCache
            self._cache = kind(table, self.num_neighbors, -(-(self.num_neighbors + self.num_spare) // 8) * 8)
            # Short lists refer to the slot after the last one.
            self._waiting = torch.zeros(self.capacity + 1, dtype=torch.bool, device=features.device)

    def draw(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a partner for each of the stored rows ``index`` ``[B]``, uniform over its nearest other rows.

        Takes one number per row from ``generator``, and more if a row drawn as a partner was just overwritten.

        Returns:
            Slots, int64 ``[B]``. A row is drawn itself if it is the only one.

        Raises:
            IndexError: a slot that holds no row.
        """
        self._rows.check_range(index)
        uniform = _uniform(index, generator)
        cache = self._cache
        if cache is None or len(self) < 2 or not len(index):
            return _choose(index, self.neighbors(index), uniform)
        self._catch_up(cache, index)
        partner = cache.pick(index, uniform)
        # A list of a stored row has empty places only behind the rows to draw from, so an empty one means a row that is
        # not stored.
        if int(partner.amax()) == self.capacity:
            self._rows.check_stored(index)
        if self._waiting_count:
            stale = self._waiting[partner]
            if bool(stale.any()):
                index = index[stale]
                neighbor = self.neighbors(index)
                if bool((neighbor[:, 0] < 0).any()):
                    self._run_pass(cache)
                    neighbor = self.neighbors(index)
                partner[stale] = _choose(index, neighbor, _uniform(index, generator))
        return partner

    def neighbors(self, index: Tensor) -> Tensor:
        """Returns the rows that partners of ``index`` are drawn from, int64 ``[B, k]``: nearest first, -1 for none."""
        self._rows.check_stored(index)
        if self._cache is None:
            return self._by_definition(index, self.num_neighbors)[1]
        self._catch_up(self._cache, index)
        slot = self._cache.slot[index, : self.num_neighbors].long()
        gone = (slot == self.capacity) | self._waiting[slot]
        return slot.masked_fill(gone, -1).gather(1, gone.to(torch.uint8).argsort(dim=1, stable=True))

    def _catch_up(self, cache: NeighborCache, index: Tensor) -> None:
        """Runs a pass if enough rows wait, or one of ``index``."""
        enough = self._waiting_count >= min(self.refresh_interval, len(self) // 2)
        if self._waiting_count and (enough or bool(self._waiting.index_select(0, index).any())):
            self._run_pass(cache)

    def _run_pass(self, cache: NeighborCache) -> None:
        # All waiting rows enter the lists in one pass over the table.
        if 2 * self._waiting_count >= len(self):
            slots = self._refit(cache)
            cache.put(slots, *self._search(cache.table, slots, cache.num_candidates, self._rows.limit))
            cache.radius[slots] = cache.distance[slots, -1]
            self._renewals_left = 0
        else:
            self._admit(cache, self._waiting[: self._rows.limit].nonzero().squeeze(1))
        self._waiting.fill_(False)
        self._waiting_count = 0
        self._left = []

    def _refit(self, cache: NeighborCache) -> Tensor:
        slots = self._rows.refit()
        cache.table.place(slots, self._rows.standardized(slots))
        return slots

    def _admit(self, cache: NeighborCache, arriving: Tensor) -> None:
        limit = self._rows.limit
        left = self._features_left()
        if len(left):
            cache.drop(self._waiting, limit)
        cache.radius[arriving] = NO_LIST
        self._rows.standardization.replace(left, self._rows.features[arriving])
        if self._rows.standardization.drift() > self.drift_tolerance:
            slots = self._refit(cache)
            cache.rerank(slots[~self._waiting[slots]])
            self._renewals_left = limit
        else:
            cache.table.place(arriving, self._rows.standardized(arriving))
        due = self._due(cache, len(arriving))
        for block in blocks_of(arriving, _BLOCK):
            distance, slot, closest = cache.table.nearest(block, cache.num_candidates, limit)
            cache.put(block, distance, slot)
            cache.enter(block, closest)
        for block in blocks_of(due, _BLOCK):
            cache.put(block, *cache.table.nearest(block, cache.num_candidates, limit)[:2])
        # The radius is set last, because a new list already contains the arriving rows of later blocks.
        searched = torch.cat([arriving, due])
        cache.radius[searched] = cache.distance[searched, -1]

    def _features_left(self) -> Tensor:
        return torch.cat([self._rows.features[:0], *self._left])

    def _due(self, cache: NeighborCache, arriving_count: int) -> Tensor:
        # Slots with too short lists, and the next slots of a renewal.
        limit = self._rows.limit
        short = cache.short(limit, min(self.num_neighbors, len(self) - 1))
        if not self._renewals_left:
            return short
        number = min(math.ceil(arriving_count * _RENEWAL_DISTANCES / len(self)), self._renewals_left)
        renewed = (torch.arange(number, device=short.device) + self._renewal_cursor) % limit
        self._renewal_cursor = (self._renewal_cursor + number) % limit
        self._renewals_left -= number
        return torch.cat([short, renewed[cache.radius[renewed] >= 0]]).unique()

    def _by_definition(self, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns distances and slots ``[B, count]`` in the present standardization, padded with infinity and -1."""
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
        """Returns the share of the true k nearest rows that the lists of ``sample`` rows hold, as standardized now.

        :meta private:
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

    def to(self, device: torch.device) -> None:
        """Moves features and lists, for example if they were loaded from files and rows lie on another device."""
        if self._rows.width and self._rows.features.device != device:
            self.load_state_dict(self.state_dict(), device)

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values. The next draws are the same after they are loaded."""
        return {
            "num_neighbors": self.num_neighbors,
            "num_spare": self.num_spare,
            "rows": self._rows.state_dict(),
            "upkeep": self._cache
            and {
                "cache": self._cache.state_dict(self._rows.limit),
                "waiting": self._waiting[: self._rows.limit].clone(),
                "left": self._features_left(),
                "renewals_left": self._renewals_left,
                "renewal_cursor": self._renewal_cursor,
            },
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Restores what :meth:`state_dict` returned, by lists of the same options.

        The default device is that of its tensors.
        """
        saved = (state["num_neighbors"], state["num_spare"], bool(state["upkeep"]) or not state["rows"]["limit"])
        mine = (self.num_neighbors, self.num_spare, self.refresh_interval > 1 or not state["rows"]["limit"])
        if saved != mine or state["rows"]["limit"] > self.capacity:
            raise ValueError(
                f"the saved lists have num_neighbors, num_spare, cached = {saved} and reach slot "
                f"{state['rows']['limit']}; these have {mine} and capacity {self.capacity}. "
                "Nothing was loaded; build them with the options of the saved ones"
            )
        self.clear()
        if state["rows"]["limit"]:
            self._allocate(state["rows"]["features"].to(device))
            self._rows.load_state_dict(state["rows"])
        if self._cache is not None:
            upkeep = state["upkeep"]
            slots = self._rows.slots()
            self._cache.table.place(slots, self._rows.standardized(slots))
            self._cache.load_state_dict(upkeep["cache"], self._rows.limit)
            self._waiting[: self._rows.limit] = upkeep["waiting"].to(self._waiting.device)
            self._waiting_count = int(self._waiting.sum())
            self._left = [upkeep["left"].to(self._rows.features)] if len(upkeep["left"]) else []
            self._renewals_left = int(upkeep["renewals_left"])
            self._renewal_cursor = int(upkeep["renewal_cursor"])


def _uniform(index: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(index.shape, dtype=torch.float32, generator=generator, device=generator.device).to(index.device)


def _choose(index: Tensor, neighbor: Tensor, uniform: Tensor) -> Tensor:
    choices = (neighbor >= 0).sum(1)
    position = (uniform * choices).long()
    partner = neighbor.gather(1, position.unsqueeze(1)).squeeze(1)
    return torch.where(choices > 0, partner, index)


class SameActionLists(Stateful):
    """Neighbor lists per discrete action, a :class:`NeighborLists` each: a partner always has the same action.

    Each action numbers its rows separately. The number of an overwritten row goes to the next row of the same action.
    Until then it may still be drawn, and the drawn row gets no partner. Memory: lists of the whole capacity for each
    action.

    Args:
        capacity, num_neighbors, options: Options of each :class:`NeighborLists`.

    Example:
        >>> lists = SameActionLists(capacity=4, num_neighbors=1)
        >>> features, action = torch.tensor([[0.0], [0.1], [9.0]]), torch.tensor([0, 1, 0])
        >>> lists.write(torch.arange(3), features, action)
        >>> lists.draw(torch.arange(3), torch.Generator())
        tensor([2, 1, 0])
    """

    saved_attributes: tuple[str, ...] = ("_group", "_number", "_free", "_used")

    def __init__(self, capacity: int, num_neighbors: int, **options: Any) -> None:
        # Bad options raise their errors before the first action.
        lists = NeighborLists(capacity, num_neighbors, **options)
        self.capacity: int = lists.capacity
        self.num_neighbors: int = lists.num_neighbors
        self._options = options
        self.clear()

    def clear(self) -> None:
        """Removes every row and every action."""
        self._lists: list[NeighborLists] = []
        # The position in the list of lists, by the action's values.
        self._actions: dict[tuple[int, ...], int] = {}
        self._group = torch.full((self.capacity,), -1, dtype=torch.int64, device="cpu")
        self._number = torch.full((self.capacity,), -1, dtype=torch.int64, device="cpu")
        # For each action, the slot of each number, or -1 if the number is free.
        self._slot_of: list[Tensor] = []
        # For each action, the freed numbers, and the next number that was never used.
        self._free: list[list[int]] = []
        self._used: list[int] = []

    @property
    def nbytes(self) -> int:
        """Size of the lists of all actions and of the numbering in bytes."""
        own = self._group.nbytes + self._number.nbytes + sum(slots.nbytes for slots in self._slot_of)
        return own + sum(lists.nbytes for lists in self._lists)

    def write(self, index: Tensor, features: Tensor, action: Tensor) -> None:
        """Stores rows with ``features`` ``[n, d]`` and integer actions ``[n, ...]`` at the slots ``index`` ``[n]``."""
        slots = index.cpu()
        held = slots[self._group[slots] >= 0]
        for group, number in zip(self._group[held].tolist(), self._number[held].tolist(), strict=True):
            self._slot_of[group][number] = -1
            self._free[group].append(number)
        self._group[held] = -1
        values, row_group = action.reshape(len(index), -1).cpu().long().unique(dim=0, return_inverse=True)
        for position, value in enumerate(values.tolist()):
            group = self._group_of(tuple(value))
            rows = row_group == position
            count = int(rows.sum())
            free = self._free[group]
            freed = [free.pop() for _ in range(min(count, len(free)))]
            used = self._used[group]
            self._used[group] = used + count - len(freed)
            numbers = torch.tensor([*freed, *range(used, self._used[group])], dtype=torch.int64, device="cpu")
            self._group[slots[rows]] = group
            self._number[slots[rows]] = numbers
            self._slot_of[group][numbers] = slots[rows]
            self._lists[group].write(numbers.to(features.device), features[rows.to(features.device)])

    def draw(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a partner of the same action for each of the stored rows ``index``, int64 ``[B]``."""
        slots = index.cpu()
        partner = slots.clone()
        groups = self._group[slots]
        for group in groups.unique().tolist():
            rows = groups == group
            numbers = self._lists[group].draw(self._number[slots[rows]].to(index.device), generator)
            drawn = self._slot_of[group][numbers.cpu()]
            partner[rows] = torch.where(drawn < 0, slots[rows], drawn)
        return partner.to(index.device)

    def to(self, device: torch.device) -> None:
        """Moves features and lists of all actions to a device."""
        for lists in self._lists:
            lists.to(device)

    def recall_at(self, k: int, sample: int = 1000, generator: torch.Generator | None = None) -> float:
        """Returns the share of the true k nearest in the lists, the mean over all rows.

        :meta private:
        """
        recalls = [lists.recall_at(k, sample=sample, generator=generator) for lists in self._lists]
        return sum(recall * used for recall, used in zip(recalls, self._used, strict=True)) / sum(self._used)

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values from which :meth:`load_state_dict` restores everything."""
        lists = [lists.state_dict() for lists in self._lists]
        return {"actions": [list(value) for value in self._actions], "lists": lists, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned. The capacity must be the same."""
        self.clear()
        for value in state["actions"]:
            self._group_of(tuple(value))
        for lists, saved in zip(self._lists, state["lists"], strict=True):
            lists.load_state_dict(saved)
        super().load_state_dict(state)
        held = (self._group >= 0).nonzero().squeeze(1)
        for group, slot_of in enumerate(self._slot_of):
            slots = held[self._group[held] == group]
            slot_of[self._number[slots]] = slots

    def _group_of(self, value: tuple[int, ...]) -> int:
        if value not in self._actions:
            self._actions[value] = len(self._lists)
            self._lists.append(NeighborLists(self.capacity, self.num_neighbors, **self._options))
            self._slot_of.append(torch.full((self.capacity,), -1, dtype=torch.int64, device="cpu"))
            self._free.append([])
            self._used.append(0)
        return self._actions[value]
