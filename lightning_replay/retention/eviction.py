# SPDX-License-Identifier: Apache-2.0
"""The rows that leave first: their order by importance, as if one row at a time arrived."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lightning_replay.compiled import compiled
from lightning_replay.feedback import real_numbers
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.retention.eviction_order import ARRIVAL_BITS, FAN_OUT, SHIFT, LeavingOrder, key_of
from lightning_replay.retention.rules import RetentionRule
from lightning_replay.retention.surprise import squared_td_error

_LARGEST = torch.finfo(torch.float32).max


_ARRIVALS = (1 << ARRIVAL_BITS) - 1
_SIGN = 0x7FFF_FFFF
# A call between compiled functions counts references to every array it passes.
_inlined = njit(inline="always")


class Factors(NamedTuple):
    """Surprise, on-policyness and the priority of both, float32 ``[n]`` on the CPU each.

    ``is_known`` is false of new rows without feedback: a priority of NaN stands for the largest seen, and they enter
    also when equal to the lowest.
    """

    surprise: Tensor
    on_policyness: Tensor
    priority: Tensor
    is_known: bool = True

    @classmethod
    @functools.lru_cache(maxsize=8)  # they are not written
    def unknown(cls, count: int) -> Factors:
        nothing = torch.full((count,), torch.nan, device="cpu")
        return cls(nothing, torch.ones(count, device="cpu"), nothing, is_known=False)

    def rows(self, kept: Tensor) -> Factors:
        return Factors(self.surprise[kept], self.on_policyness[kept], self.priority[kept], self.is_known)

    def twice(self) -> Factors:
        surprise, weight, priority = (torch.cat((part, part)) for part in self[:3])
        return Factors(surprise, weight, priority, self.is_known)


def first_surprise(given: Any, count: int) -> Tensor:
    """Returns the result of ``initial_surprise`` for ``count`` new rows, validated, as float32 ``[count]``."""
    if not isinstance(given, Tensor):
        raise ValueError(
            f"initial_surprise returned {type(given).__name__} for {count} rows; a torch tensor [{count}] is accepted. "
            "Nothing was stored"
        )
    if given.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"initial_surprise returned {list(given.shape)} for {count} rows; one number for each is accepted, "
            f"[{count}]. Nothing was stored; reduce it over everything but the rows"
        )
    given = real_numbers("what initial_surprise returned", given, "Nothing was stored")
    return _as_surprise(given, "initial_surprise returned", "Nothing was stored")


def read_factors(rule: RetentionRule, count: int, td_error: Tensor | None, signals: Mapping[str, Any]) -> Factors:
    """Returns the factors in feedback for ``count`` rows, validated; only TD errors may still be infinite or NaN."""
    if signals.get("surprise") is not None:
        given = real_numbers("surprise", signals["surprise"], "No priority was changed")
        if given.shape not in ((count,), (count, 1)):
            raise ValueError(
                f"surprise must hold one number for each of the {count} rows of the batch; got {list(given.shape)}. "
                "No priority was changed"
            )
        measured = _as_surprise(given, "surprise is", "No priority was changed")
    elif td_error is not None:
        measured = squared_td_error(td_error.reshape(-1).to("cpu", torch.float32)).clamp_max(_LARGEST)
    elif rule.takes_surprise:
        raise ValueError(
            f"update_priority got neither td_error nor surprise, and {type(rule).__name__} keeps rows by their "
            "surprise; pass one of them. No priority was changed"
        )
    else:
        measured = torch.full((count,), torch.nan, device="cpu")  # unknown, and not used
    weight = _on_policyness(rule, count, signals)
    return Factors(measured, weight, rule.priority(measured, weight) if len(measured) == count else measured)


def _on_policyness(rule: RetentionRule, count: int, signals: Mapping[str, Any]) -> Tensor:
    action_values, action = signals.get("action_values"), signals.get("action")
    if not rule.weighs_actions:
        return torch.ones(count, device="cpu")
    if action_values is None:
        if rule.needs_actions:
            raise ValueError(
                f"{type(rule).__name__} learns from action_values [B, A] and action [B] alone, and update_priority got "
                "none; pass both. No priority was changed"
            )
        return torch.ones(count, device="cpu")
    if action is None:
        raise ValueError("update_priority got action_values without action; pass action=batch['action'] as well")
    action_values = real_numbers("action_values", action_values, "No priority was changed")
    if action_values.ndim != 2 or action_values.shape[0] != count:
        raise ValueError(
            f"action_values must be [{count}, A], the values of all actions for each row of the batch; got "
            f"{list(action_values.shape)}. No priority was changed"
        )
    action = real_numbers("action", action, "No priority was changed").to(action_values.device)
    weight = rule.on_policyness(action_values, action).to("cpu", torch.float32)
    if bool(weight.isnan().any()):
        rows = weight.isnan().nonzero().flatten().tolist()
        raise ValueError(
            f"action_values are NaN or infinite in rows {rows[:10]} of the batch; finite ones are accepted, and -inf "
            "for illegal actions. No priority was changed"
        )
    return weight


def _as_surprise(given: Tensor, what: str, outcome: str) -> Tensor:
    values = given.detach().reshape(-1).to("cpu", torch.float32)
    array = values.numpy()
    if len(array) and not (array.min() >= 0 and array.max() < np.inf):  # of NaN neither is true
        rows = np.flatnonzero(~((array >= 0) & (array < np.inf))).tolist()
        raise ValueError(
            f"{what} {values[rows[0]].item()} in rows {rows[:10]}; surprise is finite and not negative. {outcome}"
        )
    return values


@_inlined
def _least(nodes, first, count):  # type: ignore[no-untyped-def]
    least = nodes[first]
    for node in range(first + 1, first + count):
        least = min(least, nodes[node])
    return least


@_inlined
def _place_of(nodes, first, count, value):  # type: ignore[no-untyped-def]
    # A search after _least is faster than one loop for both.
    place = 0
    while place < count - 1 and nodes[first + place] != value:
        place += 1
    return place


@_inlined
def _lowest(nodes, starts):  # type: ignore[no-untyped-def]
    top = starts.size - 2
    width = starts[top + 1] - starts[top]
    key = _least(nodes, starts[top], width)
    slot = _place_of(nodes, starts[top], width, key)
    for level in range(top - 1, -1, -1):
        slot = (slot << SHIFT) + _place_of(nodes, starts[level] + (slot << SHIFT), FAN_OUT, key)
    return key, slot


@_inlined
def _set(slot, key, nodes, starts):  # type: ignore[no-untyped-def]
    nodes[slot] = key
    node = slot
    for level in range(1, starts.size - 1):
        node >>= SHIFT
        nodes[starts[level] + node] = _least(nodes, starts[level - 1] + (node << SHIFT), FAN_OUT)


@compiled
def evict_lowest(bits, begin, first_arrival, always_admits, ties_enter, slots, nodes, starts):  # type: ignore[no-untyped-def]
    """Gives slots to the rows from ``begin`` on that enter, one after the other; returns how many did.

    Args:
        bits: of their float32 priorities, int32 ``[M]``.
        begin: rows before it have a slot.
        first_arrival: of the first row; the others follow.
        always_admits: whether they enter whatever their priority.
        ties_enter: whether they evict rows of equal priority.
        slots: int64 ``[M]``, -1 where a row has none; written.
        nodes, starts: of the order of eviction, see :class:`~lightning_replay.retention.eviction_order.LeavingOrder`.
    """
    lowest, slot = _lowest(nodes, starts)
    evicted = 0
    for row in range(begin, bits.size):
        wide = np.int64(bits[row])
        mine, other = wide ^ ((wide >> 63) & _SIGN), lowest >> ARRIVAL_BITS
        if not (always_admits or mine > other or (ties_enter and mine == other)):
            continue
        earlier = (lowest & _ARRIVALS) - first_arrival
        if earlier >= 0:  # a row of this call leaves again
            slots[earlier] = -1
        slots[row] = slot
        _set(slot, (mine << ARRIVAL_BITS) | (first_arrival + row), nodes, starts)
        evicted += 1
        lowest, slot = _lowest(nodes, starts)
    return evicted


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
        return self._largest if self._largest > 0 else 1.0

    def _first_priorities(self, factors: Factors) -> np.ndarray:
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
        slots = np.arange(self._length)
        return np.delete(slots, self._holes) if self._holes else slots

    def _evict_drawn(self, priority: np.ndarray, slots: np.ndarray, fitting: int, first_arrival: int) -> int:
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
