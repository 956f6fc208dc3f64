# SPDX-License-Identifier: Apache-2.0
"""Which rows are kept, one decision after another, at the cost of one for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_replay.priority_tree import PriorityTree
from lightning_replay.priority_tree.leaving_order import ARRIVAL_BITS, LeavingOrder, key_of
from lightning_replay.writers.retention_feedback import Factors
from lightning_replay.writers.retention_rules import RetentionRule


class Decisions(NamedTuple):
    """What became of new rows, which were decided on one after the other.

    ``slots``, int64 ``[n]``, of those that no later one drove out again, and which rows these are, ``entered``, int64
    ``[n]`` ascending; how many entered at all, and how many rows left for them.
    """

    slots: np.ndarray
    entered: np.ndarray
    num_admitted: int
    num_evicted: int


class RetainedRows:
    """The retention priorities of all slots, who leaves next by them, and the largest priority seen.

    Args:
        capacity: slots.
        rule: what the priorities are made of.
        generator: of stochastic rules.
    """

    def __init__(self, capacity: int, rule: RetentionRule, generator: torch.Generator) -> None:
        self.capacity = capacity
        self.order = LeavingOrder(capacity)
        self._rule = rule
        self._generator = generator
        self._chances = PriorityTree(capacity) if rule.is_stochastic else None
        # Kept where priorities may have to be computed anew; NaN is surprise that is not known.
        slots = capacity if rule.schedule is not None else 0
        self._surprise = np.full(slots, np.nan, dtype=np.float32)
        self._on_policyness = np.ones(slots, dtype=np.float32)
        self._length = 0
        self._holes: list[int] = []  # slots below the length that were given up and hold nothing
        self._largest = -1.0

    @property
    def nbytes(self) -> int:
        """Bytes of priorities and of what they are computed from."""
        chances = 0 if self._chances is None else self._chances.nbytes
        return self.order.nbytes + chances + self._surprise.nbytes + self._on_policyness.nbytes

    @property
    def default_priority(self) -> float:
        """Of rows of which nothing is known: the largest seen, 1 before any or when all were 0."""
        return self._largest if self._largest > 0 else 1.0

    def first_priorities(self, factors: Factors) -> np.ndarray:
        """Priorities of new rows, float32 ``[M]``: the largest seen where nothing is known."""
        priority = factors.priority.numpy()
        if not factors.is_known:
            priority = np.where(np.isnan(priority), np.float32(self.default_priority), priority)
        self._largest = max(self._largest, float(priority.max()))
        return priority

    def offer(self, factors: Factors, first_arrival: int, always_admits: bool) -> Decisions:
        """Decides on new rows ``[M]``, one after the other.

        Args:
            factors: of the new rows.
            first_arrival: of the first of them; the others follow.
            always_admits: whether even the lowest newcomer enters.
        """
        priority = self.first_priorities(factors)
        arrival = np.arange(first_arrival, first_arrival + len(priority))
        owner = np.full(len(priority), -1)
        fitting = min(len(priority), self.capacity - self._length + len(self._holes))
        if fitting:
            owner[:fitting] = [self._take_free() for _ in range(fitting)] if self._holes else self._take_end(fitting)
            self._place(owner[:fitting], priority[:fitting], arrival[:fitting])
        evicted = 0
        if fitting < len(priority):
            compete = self._draw_victims if self._chances is not None else self._lowest_leave
            rest = slice(fitting, None)
            evicted = compete(priority[rest], arrival[rest], owner, fitting, always_admits, not factors.is_known)
        entered = np.flatnonzero(owner >= 0)
        self._keep_factors(owner[entered], factors, entered)
        return Decisions(owner[entered], entered, fitting + evicted, evicted)

    def offer_one(
        self,
        row: int,
        factors: Factors,
        arrival: int,
        always_admits: bool,
        fits: Callable[[np.ndarray], bool],
    ) -> tuple[int, np.ndarray] | None:
        """Decides on one new row, for which several others may have to leave; all of them or none.

        Args:
            row: which of the rows of ``factors``.
            factors: of new rows.
            arrival: of this one.
            always_admits: whether it enters even if it is lowest.
            fits: whether there is room once the rows in these slots, int64 ``[n]``, have left.

        Returns:
            its slot, and the slots whose rows left, int64 ``[n]``, its own among them unless that was free; ``None``
            where it was refused.
        """
        priority = self.first_priorities(factors.rows(torch.tensor([row])))
        key = int(key_of(priority, np.array([arrival]))[0])
        has_free = bool(self._holes) or self._length < self.capacity
        stored = self._length - len(self._holes)
        victims = np.zeros(0, dtype=np.int64) if has_free else self._victims(np.zeros(0, dtype=np.int64))
        while True:
            lowest = int(self.order.keys(victims)[-1]) if len(victims) else -1
            if len(victims) and not _enters(key, lowest, always_admits, not factors.is_known):
                return None
            if len(victims) >= stored or fits(victims):
                break
            victims = self._victims(victims)
        slot = self._take_free() if has_free else int(victims[0])
        self._remove(victims)
        self._holes += [int(victim) for victim in victims if victim != slot]
        self._place(np.array([slot]), priority, np.array([arrival]))
        self._keep_factors(np.array([slot]), factors, np.array([row]))
        return slot, victims

    def _victims(self, before: np.ndarray) -> np.ndarray:
        """One more slot to be given up than ``before``."""
        if self._chances is None:
            return self.order.lowest(len(before) + 1)
        left = self._chances.get(torch.from_numpy(before))
        self._chances.remove(torch.from_numpy(before))  # so that each is drawn once
        if self._chances.has_mass():
            uniform = torch.rand(1, dtype=torch.float64, generator=self._generator)
            victim = int(self._chances.draw(uniform)[0])
        else:
            victim = int(np.setdiff1d(self.order.lowest(len(before) + 1), before)[0])
        self._chances.set(torch.from_numpy(before), left)
        return np.append(before, victim)

    def _take_end(self, count: int) -> np.ndarray:
        self._length += count
        return np.arange(self._length - count, self._length)

    def _take_free(self) -> int:
        return self._holes.pop() if self._holes else int(self._take_end(1)[0])

    def _remove(self, slots: np.ndarray) -> None:
        if len(slots):
            self.order.remove(slots)
            if self._chances is not None:
                self._chances.remove(torch.from_numpy(slots))

    def _keep_factors(self, slots: np.ndarray, factors: Factors, rows: np.ndarray) -> None:
        if len(self._surprise):
            self._surprise[slots] = factors.surprise.numpy()[rows]
            self._on_policyness[slots] = factors.on_policyness.numpy()[rows]

    def stored(self) -> np.ndarray:
        """Slots that hold a row, int64 ``[n]`` ascending."""
        slots = np.arange(self._length)
        return np.delete(slots, self._holes) if self._holes else slots

    def _lowest_leave(
        self,
        priority: np.ndarray,
        arrival: np.ndarray,
        owner: np.ndarray,
        offset: int,
        always_admits: bool,
        ties_enter: bool,
    ) -> int:
        """Puts the slots that new rows take into ``owner``; returns how many entered, each in place of another row.

        One at a time, by a heap of as many rows as can leave: nobody else is ever the lowest.
        """
        keys = key_of(priority, arrival).tolist()
        if len(keys) == 1:
            victim = self.order.first()
            if not _enters(keys[0], int(self.order.keys(slice(victim, victim + 1))[0]), always_admits, ties_enter):
                return 0
            self._drive_out(victim, owner)
            owner[offset] = victim
            self.order.place(np.array([victim]), priority, arrival)
            return 1
        slots = self.order.lowest(len(keys))
        heap = list(zip(self.order.keys(slots).tolist(), slots.tolist(), strict=True))  # sorted, which is a heap
        taken: dict[int, int] = {}
        admitted = 0
        for row, key in enumerate(keys):
            lowest, slot = heap[0]
            if _enters(key, lowest, always_admits, ties_enter):
                heapreplace(heap, (key, slot))
                taken[slot] = row
                admitted += 1
        if taken:
            slots, rows = np.array(list(taken)), np.array(list(taken.values()))
            owner[np.isin(owner, slots)] = -1  # rows of this batch that had filled the last free slots
            owner[offset + rows] = slots
            self.order.place(slots, priority[rows], arrival[rows])
        return admitted

    def _draw_victims(
        self, priority: np.ndarray, arrival: np.ndarray, owner: np.ndarray, offset: int, always_admits: bool, _: bool
    ) -> int:
        """The same with drawn victims; all enter."""
        assert self._chances is not None and always_admits
        uniform = torch.rand(len(priority), dtype=torch.float64, generator=self._generator)
        for row in range(len(priority)):
            if self._chances.has_mass():
                victim = int(self._chances.draw(uniform[row : row + 1])[0])
            else:
                victim = self.order.first()
            self._drive_out(victim, owner)
            owner[offset + row] = victim
            self._place(np.array([victim]), priority[row : row + 1], arrival[row : row + 1])
        return len(priority)

    @staticmethod
    def _drive_out(victim: int, owner: np.ndarray) -> None:
        if len(owner) > 1:
            owner[owner == victim] = -1

    def update(self, slots: np.ndarray, factors: Factors) -> None:
        """New priorities of stored rows; of several for one slot the last counts."""
        priority = factors.priority.numpy()
        self._largest = max(self._largest, float(priority.max()))
        self.order.set(slots, priority)
        self._set_chances(slots, priority)
        self._keep_factors(slots, factors, np.arange(len(slots)))

    def recompute(self) -> None:
        """All priorities by the rule as it is now; rows of unknown surprise get the largest of the others."""
        slots = self.stored()
        surprise, weight = (torch.from_numpy(part[slots]) for part in (self._surprise, self._on_policyness))
        priority = self._rule.priority(surprise, weight).numpy()
        known = ~np.isnan(priority)
        self._largest = float(priority[known].max()) if known.any() else -1.0
        if len(slots):
            self._largest = self.default_priority
            self.order.set(slots, np.where(known, priority, np.float32(self._largest)))

    def renumber(self) -> int:
        """Numbers arrivals anew, in their order from 0 on; returns the next number."""
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
        """Forgets every row and the largest priority."""
        self.order.clear()
        if self._chances is not None:
            self._chances.clear()
        self._surprise.fill(np.nan)
        self._on_policyness.fill(1.0)
        self._length = 0
        self._holes = []
        self._largest = -1.0

    def state_dict(self) -> dict[str, Any]:
        """Keys of the stored rows, what priorities are computed from, chances, and the largest priority."""
        stored = slice(0, self._length)
        return {
            "keys": torch.from_numpy(self.order.keys(stored).copy()),
            "chances": None if self._chances is None else self._chances.state_dict(),
            "surprise": torch.from_numpy(self._surprise[stored].copy()),
            "on_policyness": torch.from_numpy(self._on_policyness[stored].copy()),
            "holes": list(self._holes),
            "largest": self._largest,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, of rows under the same rule."""
        self.clear()
        keys = state_dict["keys"].cpu().numpy()
        self.order.load(keys)
        self._length, self._holes = len(keys), list(state_dict["holes"])
        if self._chances is not None:
            self._chances.load_state_dict(state_dict["chances"])
        if len(self._surprise):
            self._surprise[: len(keys)] = state_dict["surprise"].cpu().numpy()
            self._on_policyness[: len(keys)] = state_dict["on_policyness"].cpu().numpy()
        self._largest = float(state_dict["largest"])


def _enters(key: int, lowest: int, always_admits: bool, ties_enter: bool) -> bool:
    """Whether a newcomer drives the lowest row out, by keys; the priority is their upper half."""
    if always_admits:
        return True
    mine, other = key >> ARRIVAL_BITS, lowest >> ARRIVAL_BITS
    return mine > other or (ties_enter and mine == other)
