# SPDX-License-Identifier: Apache-2.0
"""Values that follow a named clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from lightning_replay.recorded import recorded

CLOCKS = ("draws", "updates", "env_steps")


class Schedule(ABC):
    """A value that depends on how far a clock has run; who owns the clock calls it with the reading.

    Attributes:
        clock: ``"draws"`` (batches the sampler has drawn), ``"updates"`` or ``"env_steps"`` (both told to the
            buffer by ``replay.advance``).
    """

    clock: str = "draws"

    @abstractmethod
    def __call__(self, reading: int) -> float:
        """Value at this reading of the clock."""


@recorded
class Constant(Schedule):
    """Always ``value``.

    Args:
        value: returned at every reading; finite.

    Example:
        >>> Constant(0.4)(1000)
        0.4
    """

    def __init__(self, value: float) -> None:
        self.value = _finite("value", value)

    def __call__(self, reading: int) -> float:
        """The value, at any reading."""
        return self.value

    def __repr__(self) -> str:
        return f"Constant({self.value})"


@recorded
class Linear(Schedule):
    """From ``start`` to ``end`` in a straight line over ``duration``, then ``end``.

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
        if not duration >= 1:
            raise ValueError(f"duration is {duration}; a linear schedule needs at least 1 unit of its clock")
        if clock not in CLOCKS:
            raise ValueError(f"clock is {clock!r}; accepted are {', '.join(map(repr, CLOCKS))}")
        self.start = _finite("start", start)
        self.end = _finite("end", end)
        self.duration = duration
        self.clock = clock

    def __call__(self, reading: int) -> float:
        """Value at this reading; readings before 0 count as 0."""
        if reading >= self.duration:
            return self.end
        return self.start + (self.end - self.start) * max(reading, 0) / self.duration

    def __repr__(self) -> str:
        return f"Linear({self.start}, {self.end}, duration={self.duration}, clock={self.clock!r})"


def as_schedule(value: float | Schedule) -> Schedule:
    """A number as a constant schedule; a schedule as it is."""
    return value if isinstance(value, Schedule) else Constant(value)


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; a schedule needs a finite number")
    return float(value)
