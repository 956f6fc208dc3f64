# SPDX-License-Identifier: Apache-2.0
"""Values that follow a named clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real

from lightning_replay.options import (
    LARGEST,
    check_option,
    checked_choice,
    checked_count,
    checked_number,
    plain_number,
    range_of,
)
from lightning_replay.saving.spec import rebuildable

CLOCKS = ("draws", "updates", "env_steps")


class Schedule(ABC):
    """A value that depends on the reading of a clock.

    Attributes:
        clock: ``"draws"`` (batches drawn by the sampler), ``"updates"`` or ``"env_steps"`` (set by ``replay.advance``).
    """

    clock: str = "draws"

    @abstractmethod
    def __call__(self, reading: int) -> float:
        """Returns the value at this reading of the clock."""


@rebuildable
class Constant(Schedule):
    """The same value at every reading.

    Args:
        value: finite.

    Example:
        >>> Constant(0.4)(1000)
        0.4
    """

    def __init__(self, value: float) -> None:
        self.value: float = checked_number("value", value)

    def __call__(self, reading: int) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"Constant({self.value})"


@rebuildable
class Linear(Schedule):
    """A straight line from ``start`` to ``end`` over ``duration``, then ``end``.

    Args:
        start: value at reading 0.
        end: value from reading ``duration`` on.
        duration: in units of the clock, at least 1.
        clock: ``"draws"``, ``"updates"`` or ``"env_steps"``.

    Example:
        >>> anneal = Linear(0.4, 1.0, duration=100, clock="updates")
        >>> anneal(0), anneal(50), anneal(100), anneal(1000)
        (0.4, 0.7, 1.0, 1.0)
    """

    def __init__(self, start: float, end: float, duration: int, clock: str = "draws") -> None:
        self.start: float = checked_number("start", start)
        self.end: float = checked_number("end", end)
        self.duration: int = checked_count("duration", duration)
        self.clock: str = checked_choice("clock", clock, CLOCKS)

    def __call__(self, reading: int) -> float:
        if reading >= self.duration:
            return self.end
        return self.start + (self.end - self.start) * max(reading, 0) / self.duration

    def __repr__(self) -> str:
        return f"Linear({self.start}, {self.end}, duration={self.duration}, clock={self.clock!r})"


def checked_schedule(name: str, value: object, lowest: float = 0.0, highest: float = LARGEST) -> Schedule:
    """Returns a schedule of numbers in a range. A number becomes a constant one.

    Example:
        >>> checked_schedule("importance_exponent", 0.4, highest=1.0)
        Constant(0.4)
    """
    accepted = f"{range_of(lowest, highest)}, or a schedule of such numbers"
    if not isinstance(value, Schedule):
        number = plain_number(value)
        check_option(name, number, Real, accepted, lowest, highest)
        return Constant(number)
    checked_choice(f"the clock of {name}", value.clock, CLOCKS)
    # Of a user's own schedule only the value at reading 0 is known to be meant.
    for reading in (0, value.duration) if isinstance(value, Linear) else (0,):
        check_option(f"{name} at reading {reading} of {value!r}", value(reading), Real, accepted, lowest, highest)
    return value
