# SPDX-License-Identifier: Apache-2.0
"""The rows that leave first: the order of their priorities, as if rows arrived one at a time.

Programs that read saves import this module, so that it does not import TorchRL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lightning_replay.free_memory import check_free
from lightning_replay.jit import compiled
from lightning_replay.priority_tree import PriorityTree
from lightning_replay.retention.rules import RetentionRule

ARRIVAL_BITS = 32  # The arrival is the lower half of a key.
WIDEST_TOP = 1024  # The highest level has at most so many nodes, because it is searched as one row.
ARRIVALS = (1 << ARRIVAL_BITS) - 1
_SIGN = 0x7FFF_FFFF
_SHIFT = 6
_FAN_OUT = 1 << _SHIFT
_ABSENT = np.iinfo(np.int64).max
_NO_SLOTS = np.zeros(0, dtype=np.int64)
# A call between compiled functions counts references to every array that it passes.
_inlined = njit(inline="always")


class LeavingOrder:
    """A flat tree of minima over ``capacity`` slots, which finds the slot that is evicted first, on the CPU.

    The lowest priority comes first, and the oldest of equal rows. The key of a slot is one int64: its float32 priority
    is the upper half, and its arrival the lower half. So keys compare by priority and then by age, and all keys differ.
    """

    def __init__(self, capacity: int) -> None:
        check_free(8 * capacity, f"the order in which rows leave, of {capacity:,} slots")
        counts = [_rounded_up(capacity)]
        while len(counts) == 1 or counts[-1] > WIDEST_TOP:
            counts.append(_rounded_up(counts[-1] // _FAN_OUT))
        #: All levels one after the other, int64. The keys of the slots come first.
        self.nodes: np.ndarray = np.full(sum(counts), _ABSENT)
        #: Place in ``nodes`` at which each level begins, and the end of the last level.
        self.starts: np.ndarray = np.cumsum([0, *counts])
        self._levels = np.split(self.nodes, self.starts[1:-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._levels = np.split(self.nodes, self.starts[1:-1])  # The levels of a copy are no views of its nodes.

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return self.nodes.nbytes

    def place(self, slots: np.ndarray, priority: np.ndarray, arrival: np.ndarray) -> None:
        """Adds rows in different ``slots`` with priorities float32 ``[n]``, not NaN, and arrivals below ``2**32``."""
        self.write(slots, key_of(priority, arrival))

    def set(self, slots: np.ndarray, priority: np.ndarray) -> None:
        """Sets priorities of rows that keep their arrival. The last of several priorities for one slot counts."""
        self.write(slots, key_of(priority, self.arrival(slots)))

    def remove(self, slots: np.ndarray) -> None:
        """Removes the rows in different ``slots``."""
        self.write(slots, np.full(len(slots), _ABSENT))

    def lowest(self, count: int) -> np.ndarray:
        """Returns the ``count`` slots that are evicted first, in that order, or all slots if there are fewer."""
        slots = np.arange(len(self._levels[-1]))
        for level in reversed(self._levels):
            slots = slots[level[slots] < _ABSENT]
            if count < len(slots):  # The lowest keys lie below the nodes with the lowest minima.
                slots = slots[np.argpartition(level[slots], count - 1)[:count]]
            if level is not self._levels[0]:
                slots = (slots[:, None] * _FAN_OUT + np.arange(_FAN_OUT)).reshape(-1)
        return slots[np.argsort(self.nodes[slots])]

    def priority(self, slots: np.ndarray) -> np.ndarray:
        """Returns the priorities of the rows in the slots, float32."""
        return priority_of(self.nodes[slots])

    def arrival(self, slots: np.ndarray) -> np.ndarray:
        """Returns the arrivals of the rows in the slots, int64."""
        return self.nodes[slots] & ARRIVALS

    def write(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Sets keys, int64 ``[n]``, as :func:`key_of` returns them. The last of several keys for one slot counts."""
        self.nodes[slots] = keys  # NumPy writes in order.
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            slots = slots >> _SHIFT
            blocks = below.reshape(-1, _FAN_OUT)
            if len(slots) < len(blocks):
                level[slots] = blocks[slots].min(1)
            else:
                level[: len(blocks)] = blocks.min(1)

    def clear(self) -> None:
        """Removes all rows."""
        self.nodes.fill(_ABSENT)


def key_of(priority: np.ndarray, arrival: np.ndarray) -> np.ndarray:
    """Returns the keys, int64 ``[n]``, of priorities float32 ``[n]`` and arrivals int64 ``[n]``."""
    bits = (priority + np.float32(0.0)).view(np.int32).astype(np.int64)  # Adding 0 turns -0.0 into 0.0.
    # As integers, the bits of positive floats ascend with the floats. The bits of negative floats descend.
    bits ^= (bits >> 63) & _SIGN
    return (bits << ARRIVAL_BITS) | arrival


def priority_of(keys: np.ndarray) -> np.ndarray:
    """Returns the priorities in keys, float32 ``[n]``."""
    bits = keys >> ARRIVAL_BITS
    bits ^= (bits >> 63) & _SIGN
    return bits.astype(np.int32).view(np.float32)


def _rounded_up(count: int) -> int:
    return -(-count // _FAN_OUT) * _FAN_OUT


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
        slot = (slot << _SHIFT) + _place_of(nodes, starts[level] + (slot << _SHIFT), _FAN_OUT, key)
    return key, slot


@_inlined
def _set(slot, key, nodes, starts):  # type: ignore[no-untyped-def]
    nodes[slot] = key
    node = slot
    for level in range(1, starts.size - 1):
        node >>= _SHIFT
        nodes[starts[level] + node] = _least(nodes, starts[level - 1] + (node << _SHIFT), _FAN_OUT)


@compiled
def evict_lowest(bits, begin, first_arrival, always_admits, ties_enter, slots, nodes, starts):  # type: ignore[no-untyped-def]
    """Gives ``slots``, int64 ``[M]``, to the rows from ``begin`` on that enter one by one, and returns how many did.

    ``bits`` are the bits of their float32 priorities, int32 ``[M]``. ``nodes`` and ``starts`` are of a
    :class:`LeavingOrder`.
    """
    lowest, slot = _lowest(nodes, starts)
    evicted = 0
    for row in range(begin, bits.size):
        wide = np.int64(bits[row])
        candidate = wide ^ ((wide >> 63) & _SIGN)
        stored = lowest >> ARRIVAL_BITS
        if not (always_admits or candidate > stored or (ties_enter and candidate == stored)):
            continue
        earlier = (lowest & ARRIVALS) - first_arrival
        if 0 <= earlier < row:  # A row of this call leaves again. A damaged state may have other numbers.
            slots[earlier] = -1
        slots[row] = slot
        _set(slot, (candidate << ARRIVAL_BITS) | (first_arrival + row), nodes, starts)
        evicted += 1
        lowest, slot = _lowest(nodes, starts)
    return evicted


class Factors(NamedTuple):
    """Surprise, on-policyness, and the priority of both, float32 ``[n]`` each. A surprise of NaN is unknown."""

    surprise: np.ndarray
    on_policyness: np.ndarray
    priority: np.ndarray
    # Not known are the factors of new rows without feedback. Their priority of NaN stands for the largest priority, and
    # they enter although rows of the same priority are older.
    is_known: bool = True

    @classmethod
    @functools.lru_cache(maxsize=8)  # Nothing writes to the arrays.
    def unknown(cls, count: int) -> Factors:
        """Returns the factors of new rows without feedback."""
        nothing = np.full(count, np.nan, dtype=np.float32)
        return cls(nothing, np.ones_like(nothing), nothing, is_known=False)

    @classmethod
    def by(cls, rule: RetentionRule, surprise: Tensor, on_policyness: Tensor) -> Factors:
        """Returns the factors, tensors on the CPU, with their priority by the rule."""
        return cls(surprise.numpy(), on_policyness.numpy(), rule.priority(surprise, on_policyness).numpy())

    def rows(self, kept: np.ndarray) -> Factors:
        """Returns the factors of some rows, by their places or a mask."""
        return Factors(self.surprise[kept], self.on_policyness[kept], self.priority[kept], self.is_known)


class Decisions(NamedTuple):
    """Outcome for new rows, decided on one after the other."""

    slots: np.ndarray  #: Slots of the new rows that no later row evicted, int64 ``[n]``.
    entered: np.ndarray  #: Places of these rows among the new rows, int64 ``[n]`` ascending.
    num_admitted: int  #: Number of new rows that entered, including rows that a later row evicted.
    num_evicted: int  #: Number of rows that left for them.


class RetainedRows:
    """Retention priorities of all slots by a rule, which rows they evict, and the largest priority seen."""

    _largest: float

    def __init__(self, capacity: int, rule: RetentionRule, generator: torch.Generator) -> None:
        self.capacity = capacity
        self.order: LeavingOrder = LeavingOrder(capacity)
        self._rule = rule
        self.generator: torch.Generator = generator
        self._chances = PriorityTree(capacity) if rule.is_stochastic else None
        self.surprise: np.ndarray = np.empty(capacity, dtype=np.float32)  # Each row has its latest. NaN is unknown.
        # The on-policyness is needed again if a schedule changes the priorities.
        self._on_policyness = np.ones(capacity * (rule.schedule is not None), dtype=np.float32)
        # Feedback for a row is counted if it discounts the priority.
        self._draws = np.zeros(capacity * (rule.draw_discount < 1.0), dtype=np.int32)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the order, the chances, and the factors."""
        chances = 0 if self._chances is None else self._chances.nbytes
        return self.order.nbytes + chances + self.surprise.nbytes + self._on_policyness.nbytes + self._draws.nbytes

    def _known(self, priority: np.ndarray) -> np.ndarray:
        # A row without a priority gets the largest priority seen, or 1 before any.
        return np.where(np.isnan(priority), np.float32(self._largest if self._largest > 0 else 1.0), priority)

    def _first_priorities(self, factors: Factors, rows: slice) -> np.ndarray:
        priority = factors.priority[rows]
        if not factors.is_known:
            priority = self._known(priority)
        self._largest = max(self._largest, float(priority.max()))
        return priority

    def offer(self, factors: Factors, first_arrival: int, always_admits: bool) -> Decisions:
        """Decides on new rows ``[M]``, one after the other. The arrivals are numbered from ``first_arrival`` on."""
        priority = self._first_priorities(factors, slice(None))
        count = len(priority)
        slots = np.full(count, -1)
        fitting = min(count, self.capacity - self._length + len(self._holes))
        if fitting:
            slots[:fitting] = self._take_free(fitting)
            self._place(slots[:fitting], priority[:fitting], np.arange(first_arrival, first_arrival + fitting))
        evicted = count - fitting
        if evicted and self._chances is None:
            bits = (priority + np.float32(0.0)).view(np.int32)  # Adding 0 turns -0.0 into 0.0.
            flags = always_admits, not factors.is_known
            evicted = evict_lowest(bits, fitting, first_arrival, *flags, slots, self.order.nodes, self.order.starts)
        else:  # A rule that draws victims admits all rows.
            for row in range(fitting, count):
                victim = self._victims(_NO_SLOTS)
                slots[slots == victim] = -1  # An earlier new row may have had the slot.
                slots[row] = victim[0]
                self._place(victim, priority[row : row + 1], np.array([first_arrival + row]))
        entered = (slots >= 0).nonzero()[0]
        slots = slots[entered]
        self._keep_factors(slots, factors, entered)
        return Decisions(slots, entered, fitting + evicted, evicted)

    def offer_one(
        self, row: int, factors: Factors, arrival: int, always_admits: bool, lacking: Callable[[np.ndarray], int]
    ) -> tuple[int, np.ndarray] | None:
        """Decides on the new row at place ``row`` of ``factors``, which evicts rows until no frame is ``lacking``.

        Returns the slot of the row, and the slots whose rows left, or ``None`` if the row is refused. Unless it was
        free, the slot of the row is also among the slots whose rows left.
        """
        priority = self._first_priorities(factors, slice(row, row + 1))
        candidate = int(key_of(priority, np.array([arrival]))[0]) >> ARRIVAL_BITS
        has_free = bool(self._holes) or self._length < self.capacity
        stored = self._length - len(self._holes)
        victims = _NO_SLOTS if has_free else self._victims(_NO_SLOTS)
        while True:
            if len(victims) and not always_admits:
                lowest = int(self.order.nodes[victims[-1]]) >> ARRIVAL_BITS
                if candidate < lowest or (candidate == lowest and factors.is_known):
                    return None
            if len(victims) >= stored or not lacking(victims):
                break
            victims = self._victims(victims)
        slot = int(self._take_free(1)[0] if has_free else victims[0])
        if len(victims):
            self.order.remove(victims)
            if self._chances is not None:
                self._chances.remove(torch.from_numpy(victims))
        self._holes += [int(victim) for victim in victims if victim != slot]
        self._place(np.array([slot]), priority, np.array([arrival]))
        self._keep_factors(np.array([slot]), factors, np.array([row]))
        return slot, victims

    def _victims(self, before: np.ndarray) -> np.ndarray:
        """Returns the slots ``before``, int64 ``[n]``, and the slot whose row leaves after them."""
        if self._chances is None:
            return self.order.lowest(len(before) + 1)
        if len(before):  # Each victim is drawn once.
            left = self._chances.get(torch.from_numpy(before))
            self._chances.remove(torch.from_numpy(before))
        if self._chances.has_mass():
            uniform = torch.rand(1, dtype=torch.float64, generator=self.generator, device="cpu")
            victim = self._chances.draw(uniform)[0].numpy()
        else:
            victim = np.setdiff1d(self.order.lowest(len(before) + 1), before)[:1]
        if len(before):
            self._chances.set(torch.from_numpy(before), left)
        return np.append(before, victim)

    def _take_free(self, count: int) -> np.ndarray:
        reused = self._holes[::-1][:count]
        del self._holes[len(self._holes) - len(reused) :]
        first = self._length
        self._length += count - len(reused)
        return np.array([*reused, *range(first, self._length)], dtype=np.int64)

    def _keep_factors(self, slots: np.ndarray, factors: Factors, rows: np.ndarray) -> None:
        self.surprise[slots] = factors.surprise[rows]
        if len(self._on_policyness):
            self._on_policyness[slots] = factors.on_policyness[rows]
        if len(self._draws):
            self._draws[slots] = 0

    def _discounted(self, slots: np.ndarray, priority: np.ndarray) -> np.ndarray:
        # The priority by the rule is multiplied by draw_discount for each draw of the row.
        if not len(self._draws):
            return priority
        return priority * (self._rule.draw_discount ** self._draws[slots]).astype(np.float32)

    def occupancy(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function from slots, int64 ``[n]``, to whether each holds a row now, bool ``[n]``."""
        length = self._length
        if not self._holes:
            return lambda slots: slots < length
        holes = np.array(self._holes, dtype=np.int64)
        return lambda slots: (slots < length) & ~np.isin(slots, holes)

    def stored(self) -> np.ndarray:
        """Returns the slots that hold a row, int64 ascending."""
        slots = np.arange(self._length)
        return np.delete(slots, self._holes) if self._holes else slots

    def update(self, slots: np.ndarray, factors: Factors) -> None:
        """Sets the factors of stored rows. The last of several factors for one slot counts."""
        if len(self._draws):
            np.add.at(self._draws, slots, 1)
        priority = self._discounted(slots, factors.priority)
        self._largest = max(self._largest, float(priority.max()))
        self.order.set(slots, priority)
        self._set_chances(slots, priority)
        self.surprise[slots] = factors.surprise
        if len(self._on_policyness):
            self._on_policyness[slots] = factors.on_policyness

    def recompute(self) -> None:
        """Computes all priorities again by the rule. Rows of unknown surprise get the largest of the others."""
        slots = self.stored()
        surprise, weight = (torch.from_numpy(column[slots]) for column in (self.surprise, self._on_policyness))
        priority = self._discounted(slots, self._rule.priority(surprise, weight).numpy())
        self._largest = float(np.max(priority, initial=-1.0, where=~np.isnan(priority)))
        if len(slots):
            if self._largest <= 0:
                self._largest = 1.0
            self.order.set(slots, self._known(priority))

    def renumber(self) -> int:
        """Renumbers arrivals in their order from 0 on, and returns the next number."""
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
        """Removes all rows, and forgets the largest priority."""
        self.order.clear()
        if self._chances is not None:
            self._chances.clear()
        self.surprise.fill(np.nan)
        self._on_policyness.fill(1.0)
        self._draws.fill(0)
        self._length = 0
        self._holes: list[int] = []  # These slots below the length are empty.
        self._largest = -1.0

    def _columns(self) -> dict[str, np.ndarray]:
        return {"surprise": self.surprise, "on_policyness": self._on_policyness, "draws": self._draws}

    def state_dict(self) -> dict[str, Any]:
        """Returns keys and factors of the slots up to the length, and the largest priority seen."""
        columns = {"keys": self.order.nodes} | self._columns()
        return {
            **{name: torch.from_numpy(column[: self._length].copy()) for name, column in columns.items()},
            "chances": None if self._chances is None else self._chances.state_dict(),
            "holes": list(self._holes),
            "largest": self._largest,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.clear()
        keys = state_dict["keys"].cpu().numpy()
        self.order.write(np.arange(len(keys)), keys)
        self._length = len(keys)
        self._holes = list(state_dict["holes"])
        if self._chances is not None:
            self._chances.load_state_dict(state_dict["chances"])
        for name, column in self._columns().items():
            column[: len(state_dict[name])] = state_dict[name].cpu().numpy()
        self._largest = float(state_dict["largest"])
