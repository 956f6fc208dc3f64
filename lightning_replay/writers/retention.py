# SPDX-License-Identifier: Apache-2.0
"""Eviction by surprise times on-policyness and by the rules it is compared with, and how what stays differs."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import Storage, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from lightning_replay.options import check_kind, checked_flag
from lightning_replay.parts import BufferHooks, Insertion, ReplayWriter
from lightning_replay.retention.eviction import Decisions, Factors, RetainedRows, first_surprise, read_factors
from lightning_replay.retention.eviction_order import ARRIVAL_BITS
from lightning_replay.retention.rules import RetentionRule, SurpriseOnly, SurpriseOnPolicyness
from lightning_replay.saving.spec import recorded
from lightning_replay.state import seeded_generator
from lightning_replay.storage.columns import Column, as_array, as_rows
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.writers.rows import announce, chosen, packed_storage

HOARDING_AGE = 3.0  # mean age over the capacity
HOARDING_RATIO = 2.0  # of the share of episode ends, or of the TD error, to that of the newest rows
MIN_ROWS = 100  # shares of fewer rows are chance
UNKNOWN = -1


logger: logging.Logger = logging.getLogger(__name__)
InitialSurprise = Callable[[TensorDictBase], Tensor]
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
TERMINATED = ("next", "terminated")


class Diagnostics:
    """Figures of hoarding: whether a buffer keeps old rows whose surprise training does not remove.

    The kept rows are compared with the newest ``capacity`` offered ones, stored or refused, whose flags and surprise
    lie in a ring: a row is at the place of its number modulo the capacity.

    Args:
        rows: the stored ones, with their latest surprise.
        rule: decides which rows are kept; the warning advises for it.
    """

    def __init__(self, rows: RetainedRows, rule: RetentionRule) -> None:
        self._rows, self._rule = rows, rule
        self._is_terminal = np.full(rows.capacity, UNKNOWN, dtype=np.int8)  # by slot
        self._newest_is_terminal = self._is_terminal.copy()  # these two by place in the ring
        self._newest_surprise = np.full(rows.capacity, np.nan, dtype=np.float32)
        self._next = 0  # number of the next row
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        return self._is_terminal.nbytes + self._newest_is_terminal.nbytes + self._newest_surprise.nbytes

    def add(
        self, ended: Column | None, surprise: torch.Tensor, first: int, slots: np.ndarray, rows: np.ndarray
    ) -> None:
        """Records offered rows ``[M]``, stored or refused.

        Args:
            ended: whether each is a terminal step, ``[M]`` or ``[M, 1]``; ``None`` where that is unknown.
            surprise: of each, float32 ``[M]``; NaN where unknown.
            first: number of the first row.
            slots: of those that entered.
            rows: which of the new rows these are.
        """
        is_terminal = UNKNOWN if ended is None else as_array(ended != 0).reshape(-1)
        self._add_newest(first, is_terminal, surprise.numpy())
        self._is_terminal[slots] = UNKNOWN if isinstance(is_terminal, int) else is_terminal[rows]

    def _add_newest(self, first: int, is_terminal: np.ndarray | int, surprise: np.ndarray) -> None:
        count, capacity = len(surprise), self._rows.capacity
        self._next, start = first + count, first % capacity
        # Of several rows in one place the last stays; a slice is written faster.
        at = slice(start, start + count) if start + count <= capacity else np.arange(first, first + count) % capacity
        self._newest_is_terminal[at], self._newest_surprise[at] = is_terminal, surprise

    def update(self, slots: np.ndarray, surprise: torch.Tensor) -> None:
        number, capacity = self._rows.order.arrival(slots), self._rows.capacity
        recent = number >= self._next - capacity
        self._newest_surprise[number[recent] % capacity] = surprise.numpy()[recent]

    def restart(self) -> None:
        """Takes the stored rows as the newest; called after their arrivals were renumbered."""
        slots = self._rows.stored()
        slots = slots[np.argsort(self._rows.order.arrival(slots))]
        self._clear_newest()
        self._add_newest(0, self._is_terminal[slots], self._rows.surprise(slots))

    def stats(self, slots: np.ndarray, age_mean: float) -> dict[str, float]:
        """Returns the figures of ``RetentionWriter.stats`` that are known; warns once where they show hoarding.

        Args:
            slots: of all stored rows.
            age_mean: their mean age.
        """
        stats = {"age_over_capacity": age_mean / self._rows.capacity}
        share, newest_share = _share(self._is_terminal[slots]), _share(self._newest_is_terminal)
        newest = max(newest_share, 1 / self._rows.capacity)  # NaN stays; none counts as one
        stats |= {"terminal_share": share, "terminal_over_newest": share / newest}
        errors = _mean_error(self._rows.surprise(slots)), _mean_error(self._newest_surprise)
        stats["td_error_over_newest"] = _ratio(*errors)
        if not self._has_warned and len(slots) >= MIN_ROWS and _hoards(stats):
            self._has_warned = True
            _warn(stats, newest_share, self._rule)
        return {name: value for name, value in stats.items() if not math.isnan(value)}

    def clear(self) -> None:
        self._clear_newest()
        self._is_terminal.fill(UNKNOWN)

    def _clear_newest(self) -> None:
        self._newest_is_terminal.fill(UNKNOWN)
        self._newest_surprise.fill(np.nan)
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        flags, surprise = self._newest_is_terminal.copy(), self._newest_surprise.copy()
        newest = {"is_terminal": torch.from_numpy(flags), "surprise": torch.from_numpy(surprise), "next": self._next}
        return {"newest": newest, "is_terminal": torch.from_numpy(self._is_terminal.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        # None in early saves of format 3: nothing is known of their rows.
        self.clear()
        if state_dict is not None:
            newest = state_dict["newest"]
            self._newest_is_terminal[:] = newest["is_terminal"].cpu().numpy()
            self._newest_surprise[:] = newest["surprise"].cpu().numpy()
            self._next = int(newest["next"])
            self._is_terminal[:] = state_dict["is_terminal"].cpu().numpy()


def _share(is_terminal: np.ndarray) -> float:
    return _ratio((is_terminal > 0).sum(), (is_terminal >= 0).sum())


def _hoards(stats: Mapping[str, float]) -> bool:
    ratios = (stats["terminal_over_newest"], stats["td_error_over_newest"])  # NaN if unknown
    return stats["age_over_capacity"] >= HOARDING_AGE and any(ratio >= HOARDING_RATIO for ratio in ratios)


def _warn(stats: Mapping[str, float], newest_share: float, rule: RetentionRule) -> None:
    shown = [f"their mean age is {stats['age_over_capacity']:.1f} times the capacity (0.5 first in, first out)"]
    if not math.isnan(stats["terminal_share"]):
        shown.append(f"{stats['terminal_share']:.0%} of them end an episode ({newest_share:.0%} of the newest)")
    if not math.isnan(stats["td_error_over_newest"]):
        shown.append(f"their TD error is {stats['td_error_over_newest']:.1f} times that of the newest")
    warnings.warn(
        f"the buffer hoards rows that training does not explain: {'; '.join(shown)}. Where chance decides rewards or "
        "successors, as with sticky actions or returns over several steps, it counts as surprise that stays. "
        f"{_advice(rule)} with first in, first out, rule=OldestLeaves(), of this and of a larger capacity; see "
        "docs/retention.md",
        stacklevel=5,
    )


def _advice(rule: RetentionRule) -> str:
    if not isinstance(rule, SurpriseOnly | SurpriseOnPolicyness):
        return f"Compare {type(rule).__name__}"
    if rule.draw_discount < 1.0:
        return f"draw_discount={rule.draw_discount:g} does not suffice here: give a lower one, and compare"
    return "Give draw_discount=0.9, and compare"


def _mean_error(surprise: np.ndarray) -> float:
    known = surprise[~np.isnan(surprise)]
    return _ratio(np.sqrt(known).sum(dtype=np.float64), len(known))


def _ratio(amount: float, whole: float) -> float:
    return float(amount / whole) if whole else float("nan")


@partial(recorded, set_again=("initial_surprise",))
class RetentionWriter(ReplayWriter, TensorDictRoundRobinWriter):
    """Evicts the row of the lowest retention priority from a full storage; a candidate that is lowest is refused.

    The priority is ``on_policyness * surprise``; of equal ones the oldest leaves. It is apart from the priority by
    which a sampler draws, and any sampler may be used: a candidate takes the slot of the row that leaves.
    A new row has on-policyness 1 and the surprise that ``initial_surprise`` computes; it enters a full buffer when some
    stored priority is lower than its own. Without ``initial_surprise`` it gets the largest priority seen (1 before any)
    and is never refused. ``Replay.update_priority(index, td_error, generation=..., action_values=..., action=...,
    surprise=...)`` sets both priorities. Priorities are float32 and kept by the CPU. Algorithm 1 of "Memory-efficient
    reinforcement learning with priority based on surprise and on-policyness" (2022),
    https://openreview.net/forum?id=SPRHpBKzJE.

    Rows are final once stored: form n-step transitions before, with ``NStepTransitions``, as
    :func:`~lightning_replay.recipes.surprise_retention` does.

    Args:
        rule: of the priority, and of the row that it evicts.
        initial_surprise: from the new rows ``TensorDict [M]`` to their surprise ``[M]``, not negative; called once for
            each ``extend``, unless the rule has priorities without surprise. May be set later, as an attribute. A
            function that cannot be imported by name, such as a lambda or an agent's method, is not saved: a buffer
            that ``load_replay`` builds has none until it is set again, and logs so.
        always_admit: candidates always enter, as the paper's prose has it and its listing not.
        seed: of stochastic rules; ``None`` seeds from torch's global generator.

    Raises:
        ValueError: in ``extend``, surprise that is not one number per row, NaN or negative; nothing is stored.

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import PackedStorage, Replay
        >>> writer = RetentionWriter(initial_surprise=lambda rows: rows["observation"].float())
        >>> replay = Replay(storage=PackedStorage(2), writer=writer, batch_size=2)
        >>> [replay.extend(TensorDict({"observation": torch.tensor([value])}, [1])).tolist() for value in (5, 3, 2, 4)]
        [[0], [1], [], [1]]
    """

    may_refuse = True
    _write_count: int

    def __init__(
        self,
        rule: RetentionRule | None = None,
        initial_surprise: InitialSurprise | None = None,
        always_admit: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(compilable=True)  # plain counters, see PackedStorage
        if rule is not None:
            check_kind(
                "rule", rule, RetentionRule, "a rule of lightning_replay.writers, such as SurpriseOnPolicyness()"
            )
        if initial_surprise is not None:
            check_kind("initial_surprise", initial_surprise, Callable, "a function TensorDict [M] -> [M]")
        self.rule: SurpriseOnPolicyness | RetentionRule = (
            SurpriseOnPolicyness() if rule is None else copy.copy(rule)
        )  # it may follow a schedule
        self.initial_surprise = initial_surprise
        self.always_admit: bool = checked_flag("always_admit", always_admit)
        self.insert_nothing()
        self._generator = seeded_generator(seed)
        self._rows: RetainedRows
        self._diagnostics: Diagnostics
        self._offered = self._refused = self._evicted = 0
        self._has_warned = False
        self._columns: Any = None  # of the storage, for which this is the place of the flag
        self._flag_place: int | None = None

    @property
    def needs_feedback(self) -> bool:  # type: ignore[override]
        """Whether feedback changes what is kept."""
        return self.rule.learns

    @property
    def nbytes(self) -> int:
        return 0 if self._storage is None else self._rows.nbytes + self._diagnostics.nbytes

    def register_storage(self, storage: Storage) -> None:
        """Attaches a ``PackedStorage``; other storages and TorchRL's own buffer of TensorDicts are a ``TypeError``."""
        storage = packed_storage(storage, self, storage.max_size)
        for buffer in storage._attached_entities:
            if isinstance(buffer, TensorDictReplayBuffer) and not isinstance(buffer, BufferHooks):
                raise TypeError(
                    f"RetentionWriter refuses rows, and a {type(buffer).__name__} writes the slot of every row into "
                    "it; use lightning_replay.Replay(storage=..., writer=..., ...)"
                )
        super().register_storage(storage)
        self._rows = RetainedRows(storage.capacity, self.rule, self._generator)
        self._diagnostics = Diagnostics(self._rows, self.rule)

    def extend(self, data: TensorDictBase) -> Tensor:
        return self.insert(data).slots

    def insert(self, data: TensorDictBase) -> Insertion:
        """Offers transitions ``[M]``, oldest first, as if one at a time.

        Returns:
            The slots of those that are stored afterwards, in the order of the rows, and these rows, also in
            ``entered``; :attr:`evicted` has the slots whose earlier rows left.

        Raises:
            ValueError: rows that do not fit the first ones, or surprise that is no priority. Nothing is stored then.
        """
        return self.insert_columns(self._storage.checked_values(data), data)

    def insert_columns(self, columns: Sequence[Column], rows: Any) -> Insertion:
        values, count = columns, len(columns[0])
        if self.initial_surprise is None and type(self.rule).first_priority is RetentionRule.first_priority:
            factors = Factors.unknown(count)
        else:
            rows = as_rows(rows)
            factors = self._first_factors(rows)
        ended = self._terminal_flags(values)
        if self._offered + count >= 1 << ARRIVAL_BITS:
            self._renumber()
        were_stored = self._rows.occupancy()
        if isinstance(self._storage, FrameStorage) and not self._storage.room_for(values):
            decisions, left = self._store_one_by_one(values, factors)
        else:
            decisions = self._rows.offer(factors, self._offered, self._admits_all)
            left = slots = decisions.slots
            if len(slots):
                values, first, num = chosen(values, decisions.entered), int(slots[0]), len(slots)
                is_run = num == 1 or (slots[-1] - first == num - 1 and (np.diff(slots) == 1).all())  # written faster
                where = slice(first, first + num) if is_run else torch.from_numpy(slots).to(self._storage.device)
                self._storage.write(where, values)
        self._diagnostics.add(ended, factors.surprise, self._offered, decisions.slots, decisions.entered)
        self._evicted_slots = left[were_stored(left)]
        self._offered += count
        self._write_count += decisions.num_admitted
        self._refused += count - decisions.num_admitted
        self._evicted += decisions.num_evicted
        self.entered: Tensor = torch.from_numpy(decisions.entered)
        index = torch.from_numpy(decisions.slots).to(self._storage.device)
        announce(self._storage, index, decisions.entered, rows, count)
        return Insertion(index, self.entered)

    @property
    def evicted(self) -> Tensor:
        """Slots of the rows that were stored before the last ``extend`` and left in it, int64 ``[n]``.

        To mirror the buffer: these rows are gone, and those in the slots that ``extend`` returned are new.
        """
        return torch.from_numpy(self._evicted_slots)

    def insert_nothing(self) -> None:
        """Notes that nothing entered and left in the last ``extend``."""
        self.entered = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._evicted_slots = np.zeros(0, dtype=np.int64)

    def _renumber(self) -> None:
        self._offered = self._rows.renumber()
        self._diagnostics.restart()

    def _terminal_flags(self, values: Sequence[Column]) -> Column | None:
        columns = self._storage.row_columns
        if columns is not self._columns:
            has_flag = TERMINATED in columns and columns[TERMINATED][1].numel() == 1
            self._columns, self._flag_place = columns, list(columns).index(TERMINATED) if has_flag else None
        return None if self._flag_place is None else values[self._flag_place]

    def _store_one_by_one(self, values: Sequence[Column], factors: Factors) -> tuple[Decisions, np.ndarray]:
        """Stores rows where frames do not fit; returns the decisions, and the slots of rows that left, ascending."""
        storage: Any = self._storage
        count = len(values[0])
        owner = np.full(count, -1)
        left = [np.zeros(0, dtype=np.int64)]
        admitted = evicted = 0
        for row in range(count):
            part = [value[row : row + 1] for value in values]
            decision = self._rows.offer_one(
                row, factors, self._offered + row, self._admits_all, partial(storage.room_for, part)
            )
            if decision is None:
                continue
            slot, victims = decision
            storage.release(victims[victims != slot])
            storage.write(torch.tensor([slot], device=storage.device), part)
            owner[np.isin(owner, victims)] = -1
            owner[row] = slot
            left.append(victims)
            admitted += 1
            evicted += len(victims)
        entered = np.flatnonzero(owner >= 0)
        return Decisions(owner[entered], entered, admitted, evicted), np.unique(np.concatenate(left))

    @property
    def needs_initial_surprise(self) -> bool:  # type: ignore[override]
        """Whether the rule uses surprise and there is no function for that of new rows."""
        return self.rule.takes_surprise and self.initial_surprise is None

    def set_initial_surprise(self, measure: InitialSurprise | None) -> None:
        """Sets ``initial_surprise`` from the next rows on."""
        self.initial_surprise = measure

    def build_options(self) -> dict[str, Any]:
        schedule = " with a schedule" if self.rule.schedule is not None else ""
        discount = f" and draw_discount {self.rule.draw_discount:g}" if self.rule.draw_discount < 1.0 else ""
        return {"rule": type(self.rule).__name__ + schedule + discount}

    @property
    def _admits_all(self) -> bool:
        return self.always_admit or self.rule.always_admits

    def _first_factors(self, data: TensorDictBase) -> Factors:
        """Returns surprise (NaN where unknown) and on-policyness of new rows, or the priority from the rule."""
        count = data.shape[0]
        priority = self.rule.first_priority(data)
        if priority is None and self.initial_surprise is None:
            return Factors.unknown(count)
        weight = torch.ones(count, device="cpu")
        if priority is not None:
            priority = priority.detach().cpu()
            unknown = torch.full((count,), torch.nan, device="cpu")
            return Factors(unknown, weight, priority, is_known=not self.rule.learns)
        assert self.initial_surprise is not None
        given = first_surprise(self.initial_surprise(data), count)
        return Factors(given, weight, self.rule.priority(given, weight), is_known=True)

    def read_feedback(self, count: int, td_error: Tensor | None, signals: Mapping[str, Any]) -> Factors:
        """Returns the surprise and on-policyness that feedback gives for a batch; changes nothing.

        Args:
            count: B, rows of the batch.
            td_error: ``[B]``; may be ``None`` where the signals hold all that the rule needs.
            signals: ``action_values`` ``[B, A]`` with ``action``, and ``surprise`` ``[B]`` in place of ``td_error**2``.

        Raises:
            ValueError, IndexError: as :func:`~lightning_replay.retention.eviction.read_factors`.
        """
        factors = read_factors(self.rule, count, td_error, signals)
        if self.rule.weighs_actions and signals.get("action_values") is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "update_priority was given no action_values, so rows are kept by surprise alone; pass action_values= "
                "and action=, or build the buffer with rule=SurpriseOnly()"
            )
        return factors

    def update_priority(self, index: Tensor, factors: Factors, *, both: bool = False) -> None:
        """Sets the priorities of rows to those of :meth:`read_feedback`; of several for one slot the last counts.

        See :meth:`lightning_replay.parts.WriterHooks.update_priority`.
        """
        if index.ndim == 2:
            # The last of duplicates counts: partners before firsts.
            index, factors = (index.t().flip(0).reshape(-1), factors.twice()) if both else (index[:, 0], factors)
        slots = index.cpu().numpy()
        if slots.size and slots.min() < 0:
            kept = slots >= 0
            slots, factors = slots[kept], factors.rows(torch.from_numpy(kept))
        if slots.size:
            self._diagnostics.update(slots, factors.surprise)
            self._rows.update(slots, factors)

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clock of the rule's schedule; where that changes priorities, all are recomputed."""
        schedule = self.rule.schedule
        if schedule is None:
            return
        reading = {"env_steps": env_steps, "updates": updates}[schedule.clock]
        if reading is not None and self.rule.follow(schedule(reading)):
            self._rows.recompute()

    def reseed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def age_of(self, index: Tensor) -> Tensor:
        arrival = self._rows.order.arrival(index.cpu().numpy())
        return torch.from_numpy(self._offered - 1 - arrival)

    def retention_priority(self, index: Tensor) -> Tensor:
        """Returns priorities of stored rows, float32 of the shape of ``index``."""
        return torch.from_numpy(self._rows.order.priority(index.cpu().numpy()))

    def stats(self) -> dict[str, Any]:
        """Returns rows admitted, refused and evicted, ages of the stored ones, and quantiles of their priorities.

        Also the stored rows beside those that a first-in-first-out buffer would hold, the newest ``capacity`` rows that
        were offered and for which both ratios are 1:

        * ``age_over_capacity``: their mean age, 0.5 of the newest rows;
        * ``terminal_share``, ``terminal_over_newest``: the share that ends an episode, and that share over the newest
          rows' (no end among these counts as one);
        * ``td_error_over_newest``: the mean magnitude of the TD error over the newest rows', each row's by its latest
          feedback or, before any, ``initial_surprise``; the root of the surprise where that is no squared TD error.

        What is unknown is left out. Warns once where the figures show hoarding: a mean age of at least three times the
        capacity, and ends of episodes at least twice as often as among the newest rows, or errors twice as large.
        """
        stored = self._rows.stored()
        ages = self._offered - 1 - self._rows.order.arrival(stored)
        stats: dict[str, Any] = {
            "admitted": self._write_count,
            "refused": self._refused,
            "evicted": self._evicted,
            "age_mean": float(ages.mean()) if len(ages) else 0.0,
            "age_max": int(ages.max()) if len(ages) else 0,
        }
        if len(ages):
            stats |= self._diagnostics.stats(stored, stats["age_mean"])
            quantiles = np.quantile(self._rows.order.priority(stored).astype(np.float64), QUANTILES)
            names = (f"{quantile:g}" for quantile in QUANTILES)
            stats["retention_priority"] = dict(zip(names, quantiles.tolist(), strict=True))
        return stats

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count=empty_write_count)
        self._rows.clear()
        self._diagnostics.clear()
        self.insert_nothing()
        self._offered = 0
        if empty_write_count:
            self._refused = self._evicted = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": self._rows.state_dict(),
            "diagnostics": self._diagnostics.state_dict(),
            "offered": self._offered,
            "refused": self._refused,
            "evicted": self._evicted,
            "write_count": self._write_count,
            "surprise_exponent": self.rule.surprise_exponent,
            "asks_for_surprise": self.rule.takes_surprise and self.initial_surprise is not None,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; a RuntimeError before the writer is in a buffer."""
        if self._storage is None:
            raise RuntimeError(
                "a RetentionWriter keeps a priority for each slot of a storage and has no storage yet; build the "
                "buffer with it, and load then. Nothing was loaded"
            )
        rule: Any = self.rule
        if rule.schedule is not None:  # exactly that of the priorities, however little it differs
            rule.surprise_exponent = state_dict["surprise_exponent"]
        elif rule.surprise_exponent != state_dict["surprise_exponent"]:
            logger.warning(
                "surprise_exponent is %s, and stored rows keep the priorities of the saved exponent, %s, until their "
                "next update_priority",
                *(rule.surprise_exponent, state_dict["surprise_exponent"]),
            )
        self._rows.load_state_dict(state_dict["rows"])
        self._diagnostics.load_state_dict(state_dict.get("diagnostics"))  # format 3 began without it
        self.insert_nothing()
        self._offered, self._refused = state_dict["offered"], state_dict["refused"]
        self._evicted, self._write_count = state_dict["evicted"], state_dict["write_count"]
        self._generator.set_state(state_dict["generator"].cpu().to(torch.uint8))
        if state_dict["asks_for_surprise"] and self.initial_surprise is None:
            logger.warning(
                "the saved buffer had a function for the surprise of new rows, and this one has none: they get the "
                "largest priority seen until replay.writer.initial_surprise is set"
            )
