# SPDX-License-Identifier: Apache-2.0
"""Batched eviction, equal to inserting one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lightning_replay.priority_tree import PriorityTree
from lightning_replay.retention.eviction import FIRST_ROW, NO_ROW, Candidates, Decisions, enters, evict_functions
from lightning_replay.retention.eviction_order import LeavingOrder, single_key
from lightning_replay.retention.feedback import Factors
from lightning_replay.retention.rules import RetentionRule


class RetainedRows:
    """Retention priorities of all slots by a rule, which rows they evict, and the largest priority seen."""

    def __init__(self, capacity: int, rule: RetentionRule, generator: torch.Generator) -> None:
        self.capacity = capacity
        self.order: LeavingOrder = LeavingOrder(capacity)
        self._evict_lowest, self._replace_lowest = evict_functions()
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
        """Bytes of the priorities and their factors."""
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
        if len(factors.priority) == 1 and self._chances is None and self._length == self.capacity and not self._holes:
            return self._offer_single(factors, first_arrival, always_admits)
        priority = self._first_priorities(factors)
        new = Candidates(priority, first_arrival, always_admits, not factors.is_known, np.full(len(priority), -1))
        fitting = min(len(priority), self.capacity - self._length + len(self._holes))
        if fitting:
            if self._holes:
                new.slots[:fitting] = [self._take_free() for _ in range(fitting)]
            else:
                new.slots[:fitting] = np.arange(self._length, self._length + fitting)
                self._length += fitting
            self._place(new.slots[:fitting], priority[:fitting], np.arange(first_arrival, first_arrival + fitting))
        evicted = 0
        if fitting < len(priority):
            evict = self._evict_lowest if self._chances is None else self._evict_drawn
            evicted = evict(self.order, new, fitting)
        entered = (new.slots >= 0).nonzero()[0]
        slots = new.slots[entered]
        self._keep_factors(slots, factors, entered)
        self._reset_draws(slots)
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
        key = single_key(float(priority[0]), arrival)
        has_free = bool(self._holes) or self._length < self.capacity
        stored = self._length - len(self._holes)
        victims = np.zeros(0, dtype=np.int64) if has_free else self._victims(np.zeros(0, dtype=np.int64))
        while True:
            highest = self.order.key(int(victims[-1])) if len(victims) else None
            if highest is not None and not enters(key, highest, always_admits, not factors.is_known):
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
        self._reset_draws(np.array([slot]))
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
        self._surprise[slots] = factors.surprise.numpy()[rows]
        if len(self._on_policyness):
            self._on_policyness[slots] = factors.on_policyness.numpy()[rows]

    def _reset_draws(self, slots: np.ndarray) -> None:
        """Sets the count of draws of new rows to 0."""
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

    def _offer_single(self, factors: Factors, arrival: int, always_admits: bool) -> Decisions:
        """:meth:`offer` of one row to full slots, in plain numbers: the fast path of one environment step."""
        priority = factors.priority.item()
        if not factors.is_known and priority != priority:
            priority = self.default_priority
        self._largest = max(self._largest, priority)
        slot = self._replace_lowest(self.order, single_key(priority, arrival), always_admits, not factors.is_known)
        if slot < 0:
            return Decisions(NO_ROW, NO_ROW, 0, 0)
        self._surprise[slot] = factors.surprise.item()
        if len(self._on_policyness):
            self._on_policyness[slot] = factors.on_policyness.item()
        slots = np.array([slot])
        self._reset_draws(slots)
        return Decisions(slots, FIRST_ROW, 1, 1)

    def _evict_drawn(self, order: LeavingOrder, new: Candidates, fitting: int) -> int:
        """As :func:`~lightning_replay.retention.eviction.evict_lowest` with drawn victims; all new rows enter."""
        assert self._chances is not None
        count = len(new.slots) - fitting
        uniform = torch.rand(count, dtype=torch.float64, generator=self._generator, device="cpu")
        for row, number in enumerate(uniform.split(1), fitting):
            victim = int(self._chances.draw(number)[0]) if self._chances.has_mass() else order.first()
            new.slots[new.slots == victim] = -1  # evicts an earlier new row, where it had the slot
            new.slots[row] = victim
            self._place(np.array([victim]), new.priority[row : row + 1], np.array([new.first_arrival + row]))
        return count

    def update(self, slots: np.ndarray, factors: Factors) -> None:
        """Sets the factors of stored rows; of several for one slot the last counts."""
        if len(self._draws):
            np.add.at(self._draws, slots, 1)
        priority = self._discounted(slots, factors.priority.numpy())
        self._largest = max(self._largest, float(priority.max()))
        self.order.set(slots, priority)
        self._set_chances(slots, priority)
        self._keep_factors(slots, factors, np.arange(len(slots)))

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
