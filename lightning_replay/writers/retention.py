# SPDX-License-Identifier: Apache-2.0
"""A writer that evicts by surprise times on-policyness or another rule, and figures of the rows that stay."""

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
from torchrl.data.replay_buffers import Storage

from lightning_replay.fast_path import overrides
from lightning_replay.feedback import match_td_errors, real_numbers
from lightning_replay.options import check_kind, checked_flag
from lightning_replay.parts import BufferHooks, Insertion, ReplayWriter
from lightning_replay.retention.eviction import ARRIVAL_BITS, Decisions, Factors, RetainedRows
from lightning_replay.retention.rules import RetentionRule, SurpriseOnly, SurpriseOnPolicyness
from lightning_replay.retention.surprise import squared_td_error
from lightning_replay.saving.spec import comparable, describe, rebuildable
from lightning_replay.schedules import Schedule
from lightning_replay.state import Stateful
from lightning_replay.storage.columns import Column, as_array, as_rows
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.writers.rows import announce, chosen, rows_in, write_slots

HOARDING_AGE = 3.0  # A buffer hoards rows from this mean age on, divided by the capacity,
HOARDING_RATIO = 2.0  # if their share of episode ends or their TD error is so many times that of the newest rows.
MIN_ROWS = 100  # Shares of fewer rows are chance.
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
TERMINATED = ("next", "terminated")
_LARGEST = torch.finfo(torch.float32).max
_UNKNOWN = -1  # It is not known whether a row ends an episode.
logger: logging.Logger = logging.getLogger(__name__)
InitialSurprise = Callable[[TensorDictBase], Tensor]


class NewestRows(Stateful):
    """Ends of episodes and surprise of the newest ``capacity`` offered rows. Row k is at ``k % capacity``."""

    saved_attributes: tuple[str, ...] = ("_is_terminal", "_surprise", "_next")

    def __init__(self, capacity: int) -> None:
        self._is_terminal = np.empty(capacity, dtype=np.int8)
        self._surprise = np.empty(capacity, dtype=np.float32)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self._is_terminal.nbytes + self._surprise.nbytes

    def clear(self) -> None:
        """Forgets all rows. The next row has the number 0."""
        self._is_terminal.fill(_UNKNOWN)
        self._surprise.fill(np.nan)
        self._next = 0

    def add(self, first: int, is_terminal: np.ndarray | int, surprise: np.ndarray) -> None:
        """Adds rows ``[M]``, numbered from ``first`` on. An unknown end is -1, and an unknown surprise NaN."""
        capacity = len(self._surprise)
        start = first % capacity
        self._next = first + len(surprise)
        places: slice | np.ndarray = slice(start, start + len(surprise))
        if start + len(surprise) > capacity:  # Of several rows in one place, the last stays.
            places = np.arange(first, self._next) % capacity
        self._is_terminal[places] = is_terminal
        self._surprise[places] = surprise

    def update(self, number: np.ndarray, surprise: np.ndarray) -> None:
        """Sets the surprise of rows by their numbers. Rows that are no longer among the newest are ignored."""
        recent = number >= self._next - len(self._surprise)
        self._surprise[number[recent] % len(self._surprise)] = surprise[recent]

    def compared(self, is_terminal: np.ndarray | None, surprise: np.ndarray) -> tuple[dict[str, float], float]:
        """Compares stored rows with the newest rows.

        Returns:
            The figures of :meth:`RetentionWriter.stats`, NaN if they are unknown, and the share of ends among the
            newest rows.
        """
        share = math.nan if is_terminal is None else _mean(is_terminal)
        newest_share = _mean(self._is_terminal[self._is_terminal != _UNKNOWN])
        error, newest_error = (_mean(np.sqrt(rows[~np.isnan(rows)])) for rows in (surprise, self._surprise))
        figures = {
            "terminal_share": share,
            # If no newest row is an end, one end is assumed.
            "terminal_over_newest": share / max(newest_share, 1 / len(self._surprise)),
            "td_error_over_newest": error / (newest_error or math.nan),
        }
        return figures, newest_share


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan


def checked_surprise(what: str, given: object, count: int, outcome: str) -> Tensor:
    """Returns the surprise of ``count`` rows, finite and not negative, as float32 ``[count]`` on the CPU."""
    numbers = real_numbers(what, given, outcome)
    if numbers.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"{what} is {list(numbers.shape)} for {count} rows; one number for each is accepted, [{count}]. {outcome}"
        )
    numbers = numbers.detach().reshape(-1).to("cpu", torch.float32)
    array = numbers.numpy()
    if count and not (array.min() >= 0 and array.max() < np.inf):  # Neither comparison is true for NaN.
        rows = np.flatnonzero(~((array >= 0) & (array < np.inf))).tolist()
        raise ValueError(
            f"{what} is {array[rows[0]]} in rows {rows[:10]}; surprise is finite and not negative. {outcome}"
        )
    return numbers


def _on_policyness(rule: RetentionRule, count: int, signals: Mapping[str, Any]) -> Tensor:
    action_values = signals.get("action_values")
    action = signals.get("action")
    if rule.needs_actions and action_values is None:
        raise ValueError(
            f"{type(rule).__name__} learns only from action_values [B, A] and action [B], and update_priority got "
            "none; pass both. No priority was changed"
        )
    if not rule.weighs_actions or action_values is None:
        return torch.ones(count, dtype=torch.float32, device="cpu")
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


def _warn_of_hoard(stats: Mapping[str, float], newest_share: float, rule: RetentionRule) -> None:
    shown = [f"their mean age is {stats['age_over_capacity']:.1f} times the capacity (0.5 first in, first out)"]
    if not math.isnan(stats["terminal_share"]):
        shown.append(f"{stats['terminal_share']:.0%} of them end an episode ({newest_share:.0%} of the newest)")
    if not math.isnan(stats["td_error_over_newest"]):
        shown.append(f"their TD error is {stats['td_error_over_newest']:.1f} times that of the newest")
    if not isinstance(rule, SurpriseOnly | SurpriseOnPolicyness):
        advice = f"Compare {type(rule).__name__}"
    elif rule.draw_discount < 1.0:
        advice = f"draw_discount={rule.draw_discount:g} does not suffice here: give a lower one, and compare"
    else:
        advice = "Give draw_discount=0.9, and compare"
    warnings.warn(
        f"the buffer hoards rows that training does not explain: {'; '.join(shown)}. If chance decides rewards or "
        "successors, as with sticky actions or returns over several steps, it counts as surprise that stays. "
        f"{advice} with first in, first out, rule=OldestLeaves(), of this and of a larger capacity; see "
        "docs/retention.md",
        stacklevel=4,
    )


@partial(rebuildable, set_again=("initial_surprise",))
class RetentionWriter(ReplayWriter):
    """Evicts the row of the lowest retention priority from a full storage. A candidate that is lowest is refused.

    The priority is ``on_policyness * surprise``. The oldest of equal rows leaves. A sampler draws by another priority,
    and any sampler may be used. A candidate takes the slot of the row that leaves. A new row has on-policyness 1 and
    the surprise that ``initial_surprise`` computes. It enters a full buffer if a stored priority is lower. Without
    ``initial_surprise``, it gets the largest priority seen (1 before any) and is never refused.
    ``Replay.update_priority(index, td_error, generation=..., action_values=..., action=..., surprise=...)`` sets both
    priorities. Priorities are float32, and the CPU keeps them. Algorithm 1 of "Memory-efficient reinforcement learning
    with priority based on surprise and on-policyness" (2022), https://openreview.net/forum?id=SPRHpBKzJE.

    Rows are final once they are stored. Form n-step transitions before, with ``NStepTransitions``, as
    :func:`~lightning_replay.recipes.surprise_retention` does.

    Args:
        rule: Rule that gives priorities and chooses the row to evict.
        initial_surprise: Function from the new rows, ``TensorDict [M]``, to their surprise ``[M]``, not negative. It is
            called once for each ``extend``, unless the rule has priorities without surprise. You may set the attribute
            later. A function that cannot be imported by name, such as a lambda or an agent's method, is not saved.
            A buffer that ``load_replay`` builds then has none until you set it again, and logs so.
        always_admit: Whether candidates always enter, as in the prose of the paper, but not in its listing.
        seed: Seed for stochastic rules. ``None`` seeds from torch's global generator.

    Raises:
        ValueError: In ``extend``, surprise that is not one number per row, NaN, or negative. Nothing is stored.

    Example:
        >>> from tensordict import TensorDict
        >>> from lightning_replay import PackedStorage, Replay
        >>> writer = RetentionWriter(initial_surprise=lambda rows: rows["observation"].float())
        >>> replay = Replay(storage=PackedStorage(2), writer=writer, batch_size=2)
        >>> [replay.extend(TensorDict({"observation": torch.tensor([value])}, [1])).tolist() for value in (5, 3, 2, 4)]
        [[0], [1], [], [1]]
    """

    exact: bool = True
    may_refuse = True
    saved_attributes: tuple[str, ...] = ("_offered", "_refused", "_evicted", "_write_count")
    saved_parts: tuple[str, ...] = ("_rows",)

    def __init__(
        self,
        rule: RetentionRule | None = None,
        initial_surprise: InitialSurprise | None = None,
        always_admit: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if rule is not None:
            check_kind(
                "rule", rule, RetentionRule, "a rule of lightning_replay.writers, such as SurpriseOnPolicyness()"
            )
        if initial_surprise is not None:
            check_kind("initial_surprise", initial_surprise, Callable, "a function TensorDict [M] -> [M]")
        # The writer has a copy, because a rule may follow a schedule.
        self.rule: SurpriseOnPolicyness | RetentionRule = SurpriseOnPolicyness() if rule is None else copy.copy(rule)
        self.initial_surprise = initial_surprise
        self.always_admit: bool = checked_flag("always_admit", always_admit)
        self.needs_feedback: bool = self.rule.learns
        self._seed_generator(seed)
        self._offered = self._write_count = self._refused = self._evicted = 0
        self._has_warned = self._has_warned_of_hoard = False
        # The flag is at the place _flag_place in these columns.
        self._columns: Mapping[Any, Any] | None = None
        self._flag_place: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of priorities, arrivals, and figures."""
        return 0 if self._storage is None else self._rows.nbytes + self._newest.nbytes

    def register_storage(self, storage: Storage) -> None:
        """Attaches a storage. Beside one of TorchRL's, the writer keeps the generations.

        Raises:
            TypeError: Another storage, or a buffer of TorchRL that passes the rule no TD errors.

        :meta private:
        """
        storage = rows_in(storage, self, storage.max_size)
        super().register_storage(storage)
        self._rows = RetainedRows(storage.capacity, self.rule, self._generator)
        self._newest = NewestRows(storage.capacity)

    def check_buffer(self, buffer: Any) -> None:
        """Refuses a buffer of TorchRL's that lacks what the rule needs, or that takes the rows for a ring.

        :meta private:
        """
        super().check_buffer(buffer)
        if self.rule.needs_actions and not isinstance(buffer, BufferHooks):
            raise TypeError(
                f"{type(self.rule).__name__} learns from action_values and action, and a {type(buffer).__name__} "
                "passes TD errors only; use lightning_replay.Replay(storage=..., writer=..., ...)"
            )
        if getattr(buffer, "prioritized_sampler", buffer.sampler) is not buffer.sampler:
            raise TypeError(
                f"with sync=False, a {type(buffer).__name__} takes the storage for a ring, and "
                f"{type(self).__name__} chooses the slots of rows; use sync=True"
            )

    def _insert_columns(self, columns: Sequence[Column], rows: Any) -> Insertion:
        # Transitions [M] are offered as if one at a time, oldest first. Refusals come before any change.
        count = len(columns[0])
        first = self._offered
        if self.initial_surprise is None and not overrides(self.rule, RetentionRule, "first_priority"):
            factors = Factors.unknown(count)
        else:
            rows = as_rows(rows)
            factors = self._first_factors(rows)
        if first + count >= 1 << ARRIVAL_BITS:
            first = self._rows.renumber()
            self._newest.clear()  # Its rows are numbered as before.
        self._rows.generator = self._generator  # set_rng may have replaced it.
        were_stored = self._rows.occupancy()
        admits_all = self.always_admit or self.rule.always_admits
        if isinstance(self._storage, FrameStorage) and self._storage.frames_missing(columns):
            decisions, left = self._store_one_by_one(columns, factors, first, admits_all)
            index = torch.from_numpy(decisions.slots)
        else:
            decisions = self._rows.offer(factors, first, admits_all)
            left = decisions.slots
            values = chosen(columns, decisions.entered) if len(left) else ()
            index = write_slots(self._storage, left, values)
        flag = self._terminal_place()
        is_terminal = _UNKNOWN if flag is None else as_array(columns[flag] != 0).reshape(-1)
        self._newest.add(first, is_terminal, factors.surprise)
        self._offered = first + count
        self._write_count += decisions.num_admitted
        self._refused += count - decisions.num_admitted
        self._evicted += decisions.num_evicted
        announce(self._storage, index, decisions.entered, rows, count)
        return Insertion(index, torch.from_numpy(decisions.entered), torch.from_numpy(left[were_stored(left)]))

    def _terminal_place(self) -> int | None:
        columns = self._storage.row_columns
        if columns is not self._columns:
            self._columns = columns
            self._flag_place = None
            if TERMINATED in columns and columns[TERMINATED][1].numel() == 1:
                self._flag_place = list(columns).index(TERMINATED)
        return self._flag_place

    def _store_one_by_one(
        self, values: Sequence[Column], factors: Factors, first: int, admits_all: bool
    ) -> tuple[Decisions, np.ndarray]:
        """Stores rows whose frames do not fit. Returns the decisions, and the slots of rows that left, ascending."""
        storage: Any = self._storage
        owner = np.full(len(values[0]), -1)  # The slot of each row is -1 if it was refused or has left again.
        left = [np.zeros(0, dtype=np.int64)]
        for row in range(len(owner)):
            part = [value[row : row + 1] for value in values]
            decision = self._rows.offer_one(
                row, factors, first + row, admits_all, partial(storage.frames_missing, part)
            )
            if decision is None:
                continue
            slot, victims = decision
            storage.release(victims[victims != slot])
            storage.write(torch.tensor([slot], device="cpu"), part)
            owner[np.isin(owner, victims)] = -1
            owner[row] = slot
            left.append(victims)
        entered = np.flatnonzero(owner >= 0)
        gone = np.concatenate(left)
        return Decisions(owner[entered], entered, len(left) - 1, len(gone)), np.unique(gone)

    @property
    def needs_initial_surprise(self) -> bool:
        """Whether the rule uses surprise and no function computes the surprise of new rows.

        :meta private:
        """
        return self.rule.takes_surprise and self.initial_surprise is None

    def _first_factors(self, rows: TensorDictBase) -> Factors:
        count = rows.shape[0]
        unknown = Factors.unknown(count)
        priority = self.rule.first_priority(rows)
        if priority is not None:
            return unknown._replace(priority=priority.detach().cpu().numpy(), is_known=not self.rule.learns)
        if self.initial_surprise is None:
            return unknown
        surprise = self.initial_surprise(rows)
        surprise = checked_surprise("what initial_surprise returned", surprise, count, "Nothing was stored")
        return Factors.by(self.rule, surprise, torch.ones(count, dtype=torch.float32, device="cpu"))

    def read_feedback(self, count: int, td_error: Tensor | None, signals: Mapping[str, Any]) -> Factors:
        """Returns the surprise and on-policyness that feedback gives for a batch, and changes nothing.

        Args:
            count: Rows of the batch.
            td_error: TD errors ``[B]``, or ``None`` if there are none.
            signals: Signals of :meth:`~lightning_replay.Replay.update_priority`.

        Raises:
            ValueError: Feedback of another shape, or no feedback although the rule needs it.
            IndexError: An action that does not exist.
        """
        rule = self.rule
        if signals.get("surprise") is not None:
            measured = checked_surprise("surprise", signals["surprise"], count, "No priority was changed")
        elif td_error is not None:
            measured = squared_td_error(td_error.reshape(-1).to("cpu", torch.float32)).clamp_max(_LARGEST)
        elif rule.takes_surprise:
            raise ValueError(
                f"update_priority got neither td_error nor surprise, and {type(rule).__name__} keeps rows by their "
                "surprise; pass one of them. No priority was changed"
            )
        else:
            measured = torch.full((count,), torch.nan, dtype=torch.float32, device="cpu")  # The rule does not read it.
        weight = _on_policyness(rule, count, signals)
        if len(measured) != count:  # The caller refuses these TD errors with another message.
            return Factors.unknown(count)
        if self.rule.weighs_actions and signals.get("action_values") is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "update_priority was given no action_values, so rows are kept by surprise alone; pass action_values= "
                "and action=, or build the buffer with rule=SurpriseOnly()"
            )
        return Factors.by(rule, measured, weight)

    def update_priority(self, index: Tensor, factors: Factors, *, both: bool = False) -> None:
        """Sets the factors of stored rows, as :meth:`read_feedback` returned them."""
        slots = index.cpu().numpy()
        if slots.ndim == 2 and both:
            # The last of several factors for one slot counts, so that partners come before first rows.
            factors = factors.rows(np.tile(np.arange(len(slots)), 2))
            slots = slots.T[::-1].reshape(-1)
        elif slots.ndim == 2:
            slots = slots[:, 0]
        if slots.size and slots.min() < 0:
            factors = factors.rows(slots >= 0)
            slots = slots[slots >= 0]
        if slots.size:
            self._newest.update(self._rows.order.arrival(slots), factors.surprise)
            self._rows.update(slots, factors)

    def _learn(self, slots: Tensor, td_error: Tensor, both: bool) -> None:
        match_td_errors(slots, td_error, None, self._storage)  # It refuses wrong ones.
        super()._learn(slots, td_error, both)

    def advance(self, *, env_steps: int | None = None, updates: int | None = None) -> None:
        """Sets the clock of the rule's schedule. If this changes priorities, all priorities are computed again."""
        schedule = self.rule.schedule
        if schedule is None:
            return
        reading = {"env_steps": env_steps, "updates": updates}[schedule.clock]
        if reading is not None and self.rule.follow(schedule(reading)):
            self._rows.recompute()

    def age_of(self, index: Tensor) -> Tensor:
        """Returns how many rows were offered after the rows in the slots, int64."""
        return torch.from_numpy(self._offered - 1 - self._rows.order.arrival(index.cpu().numpy()))

    def retention_priority(self, index: Tensor) -> Tensor:
        """Returns priorities of stored rows, float32 of the shape of ``index``."""
        return torch.from_numpy(self._rows.order.priority(index.cpu().numpy()))

    def stats(self) -> dict[str, Any]:
        """Returns rows admitted, refused and evicted, ages of the stored ones, and quantiles of their priorities.

        Further figures compare the stored rows with the newest ``capacity`` offered rows, which a first-in-first-out
        buffer would hold. For the newest rows, both ratios are 1.

        * ``age_over_capacity``: mean age over the capacity, 0.5 for the newest rows.
        * ``terminal_share``, ``terminal_over_newest``: share that ends an episode, and this share over the share of the
          newest rows. If no newest row is an end, one end is assumed.
        * ``td_error_over_newest``: mean magnitude of the TD error over the mean of the newest rows. A row has the error
          of its latest feedback, or of ``initial_surprise`` before any. If the surprise is no squared TD error, its
          root is taken.

        Unknown figures are left out. The method warns once if the figures show hoarding. Hoarding is a mean age of at
        least three times the capacity, with one of two further signs. Ends of episodes are at least twice as often as
        among the newest rows, or errors are twice as large.
        """
        stored = self._rows.stored()
        order = self._rows.order
        stats: dict[str, Any] = {"admitted": self._write_count, "refused": self._refused, "evicted": self._evicted}
        if not len(stored):
            return stats | {"age_mean": 0.0, "age_max": 0}
        ages = self._offered - 1 - order.arrival(stored)
        stats |= {"age_mean": float(ages.mean()), "age_max": int(ages.max())}
        is_terminal = None
        if self._terminal_place() is not None:
            is_terminal = as_array(self._storage.column(TERMINATED, torch.from_numpy(stored)) != 0).reshape(-1)
        figures, newest_share = self._newest.compared(is_terminal, self._rows.surprise[stored])
        figures = {"age_over_capacity": stats["age_mean"] / self._rows.capacity} | figures
        ratios = figures["terminal_over_newest"], figures["td_error_over_newest"]  # Unknown ratios are NaN.
        hoards = figures["age_over_capacity"] >= HOARDING_AGE and any(ratio >= HOARDING_RATIO for ratio in ratios)
        if hoards and len(stored) >= MIN_ROWS and not self._has_warned_of_hoard:
            self._has_warned_of_hoard = True
            _warn_of_hoard(figures, newest_share, self.rule)
        stats |= {name: value for name, value in figures.items() if not math.isnan(value)}
        quantiles = np.quantile(order.priority(stored).astype(np.float64), QUANTILES).tolist()
        return stats | {"retention_priority": {f"{share:g}": q for share, q in zip(QUANTILES, quantiles, strict=True)}}

    def _empty(self, empty_write_count: bool = True) -> None:
        self._rows.clear()
        self._newest.clear()
        self._offered = 0
        if self.rows_beside is not None:
            self.rows_beside.clear()
        if empty_write_count:
            self._write_count = self._refused = self._evicted = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns priorities, figures, the generator, and a description of the rule."""
        return super().state_dict() | {
            "diagnostics": {"newest": self._newest.state_dict()},
            "rule": self._described_rule(),
            "rule_options": self._rule_options(),
            "surprise_exponent": self.rule.surprise_exponent,
            "asks_for_surprise": self.rule.takes_surprise and self.initial_surprise is not None,
        }

    def _described_rule(self) -> str:
        description = type(self.rule).__name__
        if self.rule.schedule is not None:
            description += " with a schedule"
        if self.rule.draw_discount < 1.0:
            description += f" and draw_discount {self.rule.draw_discount:g}"
        return description

    def _rule_options(self) -> dict[str, Any]:
        # The priorities of stored rows were computed with these options. With a schedule, they are computed again.
        given: dict[str, Any] = vars(self.rule).get("init_arguments", {})
        return {name: comparable(describe(value)) for name, value in given.items() if not isinstance(value, Schedule)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            RuntimeError: The writer is in no buffer yet.
            ValueError: The state was saved with another rule.
        """
        if self._storage is None:
            raise RuntimeError(
                "a RetentionWriter keeps a priority for each slot of a storage and has no storage yet; build the "
                "buffer with it, and load then. Nothing was loaded"
            )
        rule: Any = self.rule
        for name, given in (("rule", self._described_rule()), ("rule_options", self._rule_options())):
            if state_dict[name] != given:
                raise ValueError(
                    f"the saved buffer has the {name.replace('_', ' ')} {state_dict[name]}, here {given}. Nothing was "
                    "loaded; build the buffer with the options of the saved one, or let load_replay build it"
                )
        if rule.schedule is not None:  # The exponent of the stored priorities goes on, however little it differs.
            rule.surprise_exponent = state_dict["surprise_exponent"]
        elif rule.surprise_exponent != state_dict["surprise_exponent"]:
            logger.warning(
                "surprise_exponent is %s, and stored rows keep the priorities of the saved exponent, %s, until their "
                "next update_priority",
                *(rule.surprise_exponent, state_dict["surprise_exponent"]),
            )
        super().load_state_dict(state_dict)
        self._newest.load_state_dict(state_dict["diagnostics"]["newest"])
        if state_dict["asks_for_surprise"] and self.initial_surprise is None:
            logger.warning(
                "the saved buffer had a function for the surprise of new rows, and this one has none: they get the "
                "largest priority seen until replay.writer.initial_surprise is set"
            )
