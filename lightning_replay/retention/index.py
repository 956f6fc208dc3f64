# SPDX-License-Identifier: Apache-2.0
"""Batched eviction, equal to inserting one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_replay.priority_tree import PriorityTree
from lightning_replay.retention.eviction_order import ARRIVAL_BITS, LeavingOrder, key_of
from lightning_replay.retention.feedback import Factors
from lightning_replay.retention.numba_kernels import evict_lowest
from lightning_replay.retention.rules import RetentionRule


class Decisions(NamedTuple):
    """Outcome for new rows, decided on one after the other."""

    slots: np.ndarray  #: int64 ``[n]``, of the new rows that no later one evicted.
    entered: np.ndarray  #: Which rows these are, int64 ``[n]`` ascending.
    num_admitted: int  #: New rows that entered, also those that a later one evicted.
    num_evicted: int  #: Rows that left for them.


class RetainedRows:
    """Retention priorities of all slots by a rule, which rows they evict, and the largest priority seen."""

    def __init__(self, capacity: int, rule: RetentionRule, generator: torch.Generator) -> None:
        self.capacity = capacity
        self.order: LeavingOrder = LeavingOrder(capacity)
        self._rule = rule
        self._generator = generator
        self._chances = PriorityTree(capacity) if rule.is_stochastic else None
        self._surprise = np.full(capacity, np.nan, dtype=np.float32)  # NaN is unknown
        # Kept where a schedule changes the priorities.
        self._on_policyness = np.ones(capacity if rule.schedule is not None else 0, dtype=np.float32)
        # Feedback received for the row, counted where it discounts the priority.
        self._draws = np.zeros(capacity if rule.draw_discount < 1.0 else 0, dtype=np.int32)
        self._length = 0
        self._holes: list[int] = []  # empty slots below the length
        self._largest = -1.0

    @property
    def nbytes(self) -> int:
        chances = 0 if self._chances is None else self._chances.nbytes
        return self.order.nbytes + chances + self._surprise.nbytes + self._on_policyness.nbytes + self._draws.nbytes

    @property
    def default_priority(self) -> float:
        """Returns the priority of rows without feedback: the largest seen, 1 before any or when all were 0."""
        return self._largest if self._largest > 0 else 1.0

    def _first_priorities(self, factors: Factors) -> np.ndarray:
        """Returns priorities of new rows, float32 ``[M]``: the largest seen where they are unknown."""
        priority = factors.priority.numpy()
        if not factors.is_known:
            priority = np.where(np.isnan(priority), np.float32(self.default_priority), priority)
        self._largest = max(self._largest, float(priority.max()))
        return priority

    def offer(self, factors: Factors, first_arrival: int, always_admits: bool) -> Decisions:
        """Decides on new rows ``[M]``, one after the other; the arrivals are numbered from ``first_arrival`` on."""
        priority, count = self._first_priorities(factors), len(factors.priority)
        slots = np.full(count, -1)  # of each new row
        fitting = min(count, self.capacity - self._length + len(self._holes))
        if fitting:
            slots[:fitting] = [self._take_free() for _ in range(fitting)]
            self._place(slots[:fitting], priority[:fitting], np.arange(first_arrival, first_arrival + fitting))
        evicted = 0
        if fitting < count and self._chances is not None:
            evicted = self._evict_drawn(priority, slots, fitting, first_arrival)
        elif fitting < count:
            bits = (priority + np.float32(0.0)).view(np.int32)  # adding 0 turns -0.0 into 0.0
            flags = always_admits, not factors.is_known
            evicted = evict_lowest(bits, fitting, first_arrival, *flags, slots, self.order.nodes, self.order.starts)
        entered = (slots >= 0).nonzero()[0]
        slots = slots[entered]
        self._keep_factors(slots, factors, entered)
        return Decisions(slots, entered, fitting + evicted, evicted)

    def offer_one(
        self, row: int, factors: Factors, arrival: int, always_admits: bool, fits: Callable[[np.ndarray], bool]
    ) -> tuple[int, np.ndarray] | None:
        """Decides on the new row at place ``row`` of ``factors``, which evicts several others or none.

        Args:
            fits: whether the storage has room once the rows in these slots, int64 ``[n]``, have left.

        Returns:
            its slot, and the slots whose rows left, int64 ``[n]``, its own among them unless that was free; ``None``
            where it was refused.
        """
        priority = self._first_priorities(factors.rows(torch.tensor([row], device="cpu")))
        mine = int(key_of(priority, np.array([arrival]))[0]) >> ARRIVAL_BITS
        has_free = bool(self._holes) or self._length < self.capacity
        stored = self._length - len(self._holes)
        victims = np.zeros(0, dtype=np.int64) if has_free else self._victims(np.zeros(0, dtype=np.int64))
        while True:
            if len(victims) and not always_admits:
                other = int(self.order.keys(victims[-1:])[0]) >> ARRIVAL_BITS
                if mine < other or (mine == other and factors.is_known):  # of equal ones the oldest leaves
                    return None
            if len(victims) >= stored or fits(victims):
                break
            victims = self._victims(victims)
        slot = self._take_free() if has_free else int(victims[0])
        if len(victims):
            self.order.remove(victims)
            if self._chances is not None:
                self._chances.remove(torch.from_numpy(victims))
        self._holes += [int(victim) for victim in victims if victim != slot]
        self._place(np.array([slot]), priority, np.array([arrival]))
        self._keep_factors(np.array([slot]), factors, np.array([row]))
        return slot, victims

    def _victims(self, before: np.ndarray) -> np.ndarray:
        """Returns the slots to evict, one more than ``before``."""
        if self._chances is None:
            return self.order.lowest(len(before) + 1)
        left = self._chances.get(torch.from_numpy(before))
        self._chances.remove(torch.from_numpy(before))  # each is drawn once
        if self._chances.has_mass():
            victim = int(
                self._chances.draw(torch.rand(1, dtype=torch.float64, generator=self._generator, device="cpu"))[0]
            )
        else:
            victim = int(np.setdiff1d(self.order.lowest(len(before) + 1), before)[0])
        self._chances.set(torch.from_numpy(before), left)
        return np.append(before, victim)

    def _take_free(self) -> int:
        if self._holes:
            return self._holes.pop()
        self._length += 1
        return self._length - 1

    def _keep_factors(self, slots: np.ndarray, factors: Factors, rows: np.ndarray) -> None:
        """Keeps the factors of some rows that are new in these slots."""
        self._surprise[slots] = factors.surprise.numpy()[rows]
        if len(self._on_policyness):
            self._on_policyness[slots] = factors.on_policyness.numpy()[rows]
        if len(self._draws):
            self._draws[slots] = 0

    def _discounted(self, slots: np.ndarray, priority: np.ndarray) -> np.ndarray:
        """Returns priorities by the rule, float32 ``[n]``, times ``draw_discount`` for each draw of the row."""
        if not len(self._draws):
            return priority
        return priority * (self._rule.draw_discount ** self._draws[slots]).astype(np.float32)

    def occupancy(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function from slots, int64 ``[n]``, to whether each holds a row now, bool ``[n]``."""
        length, holes = self._length, np.array(self._holes, dtype=np.int64)
        return lambda slots: (slots < length) & ~np.isin(slots, holes) if len(holes) else slots < length

    def surprise(self, slots: np.ndarray) -> np.ndarray:
        """Returns the latest surprise of stored rows, float32 ``[n]``, NaN where unknown."""
        return self._surprise[slots]

    def stored(self) -> np.ndarray:
        """Returns the slots that hold a row, int64 ``[n]`` ascending."""
        slots = np.arange(self._length)
        return np.delete(slots, self._holes) if self._holes else slots

    def _evict_drawn(self, priority: np.ndarray, slots: np.ndarray, fitting: int, first_arrival: int) -> int:
        """As ``evict_lowest`` with drawn victims; all new rows enter."""
        assert self._chances is not None
        count = len(slots) - fitting
        uniform = torch.rand(count, dtype=torch.float64, generator=self._generator, device="cpu")
        for row, number in enumerate(uniform.split(1), fitting):
            victim = int(self._chances.draw(number)[0] if self._chances.has_mass() else self.order.lowest(1)[0])
            slots[slots == victim] = -1  # evicts an earlier new row, where it had the slot
            slots[row] = victim
            self._place(np.array([victim]), priority[row : row + 1], np.array([first_arrival + row]))
        return count

    def update(self, slots: np.ndarray, factors: Factors) -> None:
        """Sets the factors of stored rows; of several for one slot the last counts."""
        if len(self._draws):
            np.add.at(self._draws, slots, 1)
        priority = self._discounted(slots, factors.priority.numpy())
        self._largest = max(self._largest, float(priority.max()))
        self.order.set(slots, priority)
        self._set_chances(slots, priority)
        self._surprise[slots] = factors.surprise.numpy()
        if len(self._on_policyness):
            self._on_policyness[slots] = factors.on_policyness.numpy()

    def recompute(self) -> None:
        """Computes all priorities again by the rule; rows of unknown surprise get the largest of the others."""
        slots = self.stored()
        surprise, weight = (torch.from_numpy(part[slots]) for part in (self._surprise, self._on_policyness))
        priority = self._discounted(slots, self._rule.priority(surprise, weight).numpy())
        known = ~np.isnan(priority)
        self._largest = float(priority[known].max()) if known.any() else -1.0
        if len(slots):
            self._largest = self.default_priority
            self.order.set(slots, np.where(known, priority, np.float32(self._largest)))

    def renumber(self) -> int:
        """Renumbers arrivals in their order from 0 on; returns the next number."""
        slots = self.stored()
        rank = np.empty(len(slots), dtype=np.int64)
        rank[np.argsort(self.order.arrival(slots))] = np.arange(len(slots))
        self.order.place(slots, self.order.priority(slots), rank)
        return len(slots)

    def _place(self, slots: np.ndarray, priority: np.ndarray, arrival: np.ndarray) -> None:
        self.order.place(slots, priority, arrival)
        self._set_chances(slots, priority)

    def _set_chances(self, slots: np.ndarray, priority: np.ndarray) -> None:
        if self._chances is not None:
            chance = self._rule.chance(torch.from_numpy(np.ascontiguousarray(priority)))
            self._chances.set(torch.from_numpy(slots), chance)

    def clear(self) -> None:
        """Removes every row and the largest priority."""
        self.order.clear()
        if self._chances is not None:
            self._chances.clear()
        self._surprise.fill(np.nan)
        self._on_policyness.fill(1.0)
        self._draws.fill(0)
        self._length = 0
        self._holes = []
        self._largest = -1.0

    def state_dict(self) -> dict[str, Any]:
        """Returns keys, factors and chances of the stored rows, and the largest priority."""
        stored = slice(0, self._length)
        return {
            "keys": torch.from_numpy(self.order.keys(stored).copy()),
            "chances": None if self._chances is None else self._chances.state_dict(),
            "surprise": torch.from_numpy(self._surprise[stored].copy()),
            "on_policyness": torch.from_numpy(self._on_policyness[stored].copy()),
            "draws": torch.from_numpy(self._draws[stored].copy()),
            "holes": list(self._holes),
            "largest": self._largest,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, under the same rule."""
        self.clear()
        keys = state_dict["keys"].cpu().numpy()
        self.order.load(keys)
        self._length, self._holes = len(keys), list(state_dict["holes"])
        if self._chances is not None:
            self._chances.load_state_dict(state_dict["chances"])
        surprise = state_dict["surprise"]  # format 3 began with it only where a schedule needs it
        self._surprise[: len(surprise)] = surprise.cpu().numpy()
        if len(self._on_policyness):
            self._on_policyness[: len(keys)] = state_dict["on_policyness"].cpu().numpy()
        if len(self._draws):
            self._draws[: len(keys)] = state_dict["draws"].cpu().numpy()
        self._largest = float(state_dict["largest"])
