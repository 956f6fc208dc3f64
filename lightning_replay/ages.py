# SPDX-License-Identifier: Apache-2.0
"""Ages of rows: how likely a row is drawn falls with the rows, steps, updates, or versions that came after it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from lightning_replay.options import (
    ABOVE_ZERO,
    check_kind,
    checked_choice,
    checked_key,
    checked_number,
    checked_share,
)
from lightning_replay.saving.spec import rebuildable
from lightning_replay.schedules import Constant, Schedule, checked_schedule
from lightning_replay.storage.packed import read_columns

CLOCKS = ("rows", "env_steps", "updates")
# When all weights are written again, the newest row gets the weight 1, halved this many times. Weights of later rows
# grow up to 1, so that float32 holds them times any priority. Then all weights are written again.
MOST_DOUBLINGS = 40.0
# A schedule changes the half-life in steps of this share, because each step writes all weights again.
HALF_LIFE_STEP = 0.01


@rebuildable
@dataclass(frozen=True)
class Age:
    """How the probability of a row falls with its age: ``max(floor, 2 ** (-age / half_life))`` times its priority.

    Without priorities, this is truncated geometric replay (Korniak et al. 2026, https://arxiv.org/abs/2605.10236).
    With priorities, it is faded prioritized replay: the decay of Kang et al. 2025,
    https://arxiv.org/abs/2507.02712, and of Lyu et al. 2026, https://arxiv.org/abs/2605.11711. Their weights fall by
    0.9999 with each row, a half-life of 6,931 rows, to a floor of 0.1.

    Args:
        half_life: Age at which the probability is half of a new row's, in units of ``clock``, a number above 0 or a
            schedule. ``None`` for a window without decay. A schedule acts in steps of 1%.
        floor: Least factor of old rows, from 0 to 1.
        max_age: Largest age at which a row is drawn, in units of ``clock``, or ``None`` for no limit.
        clock: Unit of the age: ``"rows"`` (rows stored after the row), ``"env_steps"`` or ``"updates"`` (readings of
            ``replay.advance`` since the row was stored). In another number of shards, loaded rows count from reading 0.
        version_key: Column of a version, such as that of the policy, which replaces the clock: the age is the
            newest stored version less the row's version. Versions are finite numbers from 0 that never fall.

    Raises:
        ValueError: Neither ``half_life`` nor ``max_age`` is given, or a number is out of its range.

    Example:
        >>> Age(half_life=6_931).weight(np.array([0, 6_931, 100_000]))
        array([1. , 0.5, 0.1])
        >>> Age(max_age=2, clock="updates").weight(np.array([2, 3]))
        array([1., 0.])
    """

    half_life: float | Schedule | None = None
    floor: float = 0.1
    max_age: float | None = None
    clock: str = "rows"
    version_key: NestedKey | None = None

    def __post_init__(self) -> None:
        if self.half_life is not None:
            checked_schedule("half_life", self.half_life, lowest=ABOVE_ZERO)
        checked_share("floor", self.floor)
        if self.max_age is not None:
            checked_number("max_age", self.max_age, 0.0)
        checked_choice("clock", self.clock, CLOCKS)
        if self.version_key is not None:
            names = checked_key("version_key", self.version_key)
            # A file gives a nested key as a list, which is no key of a TensorDict.
            object.__setattr__(self, "version_key", names if len(names) > 1 else names[0])
            if self.clock != "rows":
                raise ValueError(
                    f"version_key is {self.version_key!r} and clock is {self.clock!r}; an age has one unit. Leave one "
                    "of the two out"
                )
        if self.half_life is None and self.max_age is None:
            raise ValueError("Age got neither half_life nor max_age; give at least one, such as half_life=10_000")

    def weight(self, age: np.ndarray, half_life: float | None = None) -> np.ndarray:
        """Returns the factors of rows of these ages, float64 of the same shape.

        Args:
            age: Ages in units of the clock.
            half_life: Present value of a schedule, by default the value at the start.
        """
        weight = np.ones(np.shape(age))
        if self.half_life is not None:
            present = checked_schedule("half_life", self.half_life)(0) if half_life is None else half_life
            weight = np.maximum(self.floor, np.exp2(-age / present))
        return weight if self.max_age is None else np.where(age <= self.max_age, weight, 0.0)


def checked_age(value: Age | Mapping[str, Any] | None) -> Age | None:
    """Returns an :class:`Age`, which a file or a dictionary gives as a mapping of its options. ``None`` stays."""
    if isinstance(value, Mapping):
        # A file may also name the class. A wrong option reaches this function with its class path.
        return Age(**(value.get("init_args") or {} if "class_path" in value else value))
    if value is not None:
        check_kind("age", value, Age, "an Age or a mapping of its options, such as {'half_life': 10_000}")
    return value


class RowAges:
    """Births of rows by slot, and which rows the formula of an :class:`Age` treats as decaying, as old, or as gone.

    Decaying rows have the weight ``2 ** ((birth - reference) / half_life)``: their ratios do not change as time goes
    on, so a row that nobody touches keeps its weight. A row is written again once when it reaches the floor and once
    when it reaches ``max_age``.

    Args:
        age: Formula.
        num_slots: Number of slots.
    """

    def __init__(self, age: Age, num_slots: int) -> None:
        self.age = age
        #: Reading of the clock at the insertion of the row in each slot, float64 ``[num_slots]``.
        self.births: np.ndarray = np.zeros(num_slots)
        #: Number of times that all weights had to be written again. Trees compare it with their own.
        self.renewals: int = 0
        self._schedule = None if age.half_life is None else checked_schedule("half_life", age.half_life)
        #: Largest age at which a row is drawn.
        self.max_age: float = math.inf if age.max_age is None else age.max_age
        # How many half-lives a row decays.
        self._halvings = math.log2(1.0 / age.floor) if age.floor else math.inf
        #: Whether ages are counted in rows.
        self.counts_rows: bool = age.clock == "rows" and age.version_key is None
        #: Whether the half-life never changes.
        self.is_steady: bool = self._schedule is None or isinstance(self._schedule, Constant)
        # Whether rows reach the floor or the largest age.
        self._has_limits = age.max_age is not None or (self._schedule is not None and age.floor > 0)
        # The slots of the inserted rows, oldest first, and their births. A slot counts at its last place.
        self._in_order = np.zeros(2 * num_slots if self._has_limits else 0, dtype=np.int64)
        self._births_in_order = np.zeros(len(self._in_order))
        self._last_place = np.zeros(num_slots if self._has_limits else 0, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Forgets all rows."""
        # The births of rows that left could be far above the next reference.
        self.births[:] = 0.0
        #: Present reading of the clock.
        self.now: float = 0.0
        #: Birth at which a decaying row has the weight 1.
        self.reference: float = 0.0
        #: Half-life in use, ``None`` without decay.
        self.half_life: float | None = None if self._schedule is None else self._schedule(0)
        #: Reciprocal of the half-life, 0 without decay.
        self.rate: float = 0.0 if self.half_life is None else 1.0 / self.half_life
        #: Rows that were born before this reading are at the floor.
        self.old_before: float = -math.inf
        #: Rows that were born before this reading are not drawn.
        self.gone_before: float = -math.inf
        #: Number of rows ever registered.
        self.rows_written: int = 0
        self._queued = 0
        # How many rows in order have reached the floor, and the largest age.
        self._reached = [0, 0]
        self._renew(0.0)

    @property
    def reach(self) -> float:
        """Largest age of a decaying row, infinite if rows never reach the floor."""
        return math.inf if self.half_life is None else self.half_life * self._halvings

    @property
    def scale(self) -> float:
        """Factor of the weights of decaying rows at the present reading."""
        # The factor and its square stay above 0, so that rows can be drawn after an idle time of a thousand half-lives.
        return 2.0 ** -min((self.now - self.reference) * self.rate, 400.0)

    @property
    def nbytes(self) -> int:
        """Size of the births and their order in bytes."""
        return self.births.nbytes + self._in_order.nbytes + self._births_in_order.nbytes + self._last_place.nbytes

    def check_rows(self, rows: TensorDictBase) -> None:
        """Refuses new rows, TensorDict ``[N]``, without versions or with versions that fall, with a ``ValueError``."""
        key = self.age.version_key
        if key is None:
            return
        version = rows.get(key, None)
        if version is None:
            raise ValueError(
                f"version_key is {key!r} and the rows have {sorted(map(str, rows.keys(True, True)))}; store this "
                "column, [N] or [N, 1], with each row. Nothing was stored"
            )
        self._checked_versions(version)

    def _checked_versions(self, version: Tensor) -> np.ndarray:
        numbers = version.detach().cpu().double().reshape(len(version), -1).numpy()
        previous = np.concatenate(([self.now], numbers[:-1, 0]))
        is_wrong = ~(np.isfinite(numbers[:, 0]) & (numbers[:, 0] >= previous))
        if numbers.shape[1] != 1 or is_wrong.any():
            row = int(is_wrong.argmax())
            raise ValueError(
                f"version {self.age.version_key!r} of new row {row} is {numbers[row].tolist()} after {previous[row]}; "
                "each row needs one finite version, at least 0 and at least the version of the row before. Sort rows "
                "by their version"
            )
        return numbers[:, 0]

    def register(self, slots: np.ndarray, clocks: Mapping[str, int], storage: Storage | None) -> np.ndarray:
        """Counts new rows, slots ``[n]``, and returns their births, float64 ``[n]``.

        Of more rows than slots, only the newest are stored. Then versions are returned only of these rows.
        """
        count = len(slots)
        if not count:
            return np.zeros(0)
        if self.age.version_key is not None:
            assert storage is not None
            births = self._checked_versions(
                read_columns(storage, torch.from_numpy(slots[-len(self.births) :]), [self.age.version_key])[0]
            )
            self.now = float(births[-1])
        elif self.counts_rows:
            births = np.arange(self.rows_written, self.rows_written + count, dtype=np.float64)
        else:
            self.now = max(self.now, float(clocks[self.age.clock]))
            births = np.full(count, self.now)
        self.count(count)
        return births

    def count(self, rows: int) -> None:
        """Counts new rows."""
        self.rows_written += rows
        if self.counts_rows:
            self.now = float(self.rows_written - 1)

    def insert(self, slots: np.ndarray, births: np.ndarray) -> None:
        """Stores the births of rows, float64 ``[n]``, in slots, int64 ``[n]``, oldest first. Births never fall."""
        count = min(len(slots), len(self.births))
        if not count:
            return
        slots = slots[-count:]
        births = births[-count:]
        if self.rate and births[-1] > self.reference:
            self._renew(births[-1])
        self.births[slots] = births
        if not self._has_limits:
            return
        if self._queued + count > len(self._in_order):
            self._drop_overwritten()
        own = slice(self._queued, self._queued + count)
        self._in_order[own] = slots
        self._births_in_order[own] = births
        self._last_place[slots] = np.arange(own.start, own.stop)
        self._queued += count

    def _drop_overwritten(self) -> None:
        # Each slot has one last place, so at least half of the places become free.
        order = self._in_order[: self._queued]
        kept = np.flatnonzero(self._last_place[order] == np.arange(self._queued))
        self._in_order[: len(kept)] = order[kept]
        self._births_in_order[: len(kept)] = self._births_in_order[kept]
        self._queued = len(kept)
        self._last_place[self._in_order[: len(kept)]] = np.arange(len(kept))
        self._reached = np.searchsorted(kept, self._reached).tolist()

    def _renew(self, newest: float) -> None:
        self.reference = float(newest + MOST_DOUBLINGS * (self.half_life or 0.0))
        self.renewals += 1

    def follow(self, clocks: Mapping[str, int]) -> np.ndarray:
        """Moves to the present readings, and returns the slots of rows that have reached a limit, int64 ``[m]``."""
        age = self.age
        if age.clock != "rows":
            self.now = max(self.now, float(clocks[age.clock]))
        if self._schedule is not None and not self.is_steady:
            half_life = self._schedule(clocks[self._schedule.clock])
            if abs(half_life * self.rate - 1.0) > HALF_LIFE_STEP:
                self.half_life = half_life
                self.rate = 1.0 / half_life
                self._renew(self.now)
        self._set_limits()
        if not self._has_limits:
            return self._in_order
        before = self._reached
        births = self._births_in_order[: self._queued]
        self._reached = births.searchsorted((self.old_before, self.gone_before)).tolist()
        if self._reached == before:
            return self._in_order[:0]
        return np.concatenate([self._in_order[a:b] for a, b in zip(before, self._reached, strict=True)])

    def _set_limits(self) -> None:
        self.old_before = self.now - self.reach
        self.gone_before = self.now - self.max_age

    @property
    def unit(self) -> str:
        """Unit of the births, the clock or the column of versions."""
        return self.age.clock if self.age.version_key is None else str(self.age.version_key)

    def state_dict(self) -> dict[str, Any]:
        """Returns the births with what decides how weights are rounded."""
        if self._has_limits:
            self._drop_overwritten()
        return {
            "unit": self.unit,
            "births": torch.from_numpy(self.births.copy()),
            "in_order": torch.from_numpy(self._in_order[: self._queued].copy()),
            "readings": [self.now, self.reference],
            "half_life": self.half_life,
            "rows_written": self.rows_written,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the ages of a sampler's state, or raises ``ValueError`` if it has none, or another unit or number of
        slots.

        The formula is that of the constructor.
        """
        if "ages" not in state_dict:
            raise ValueError(
                "the saved buffer has no ages, but this buffer has an age; the births of the saved rows are unknown. "
                "Build the buffer without age, or store the rows again"
            )
        state_dict = state_dict["ages"]
        births = state_dict["births"].cpu().numpy()
        in_order = state_dict["in_order"].cpu().numpy()
        if state_dict["unit"] != self.unit or len(births) != len(self.births):
            raise ValueError(
                f"the saved ages are in {state_dict['unit']!r} of {len(births)} slots, but the ages of this buffer are "
                f"in {self.unit!r} of {len(self.births)} slots; build it with the clock and the capacity of the save"
            )
        if len(np.unique(in_order)) < len(in_order) or not np.isin(in_order, np.arange(len(births))).all():
            raise ValueError("the saved order of rows names a slot twice or outside of the storage; load another save")
        self.clear()
        self.births[:] = births
        self.rows_written = int(state_dict["rows_written"])
        self.now, self.reference = map(float, state_dict["readings"])
        if not self.is_steady and state_dict["half_life"] is not None:
            self.half_life = float(state_dict["half_life"])
            self.rate = 1.0 / self.half_life
        if state_dict["half_life"] != self.half_life:
            # At another half-life, weights beside the saved reference may be too large or too small for float32.
            self._renew(self.now)
        self._set_limits()
        if not self._has_limits:
            return
        if not len(in_order):  # The saved formula needed no order.
            in_order = np.argsort(births, kind="stable")
        self._queued = len(in_order)
        self._in_order[: self._queued] = in_order
        self._births_in_order[: self._queued] = births[in_order]
        self._last_place[in_order] = np.arange(self._queued)
        self._reached = births[in_order].searchsorted((self.old_before, self.gone_before)).tolist()
