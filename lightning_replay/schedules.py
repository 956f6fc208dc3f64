# SPDX-License-Identifier: Apache-2.0
"""Values that change over training, each on a clock it names."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lightning_replay.recorded import recorded

CLOCKS = ("draws", "updates", "env_steps")


@runtime_checkable
class Schedule(Protocol):
    """A value as a function of a clock: ``"draws"`` of the sampler, ``"updates"`` or ``"env_steps"`` of the run."""

    clock: str

    def __call__(self, time: int) -> float:
        """The value when the clock shows ``time``."""
        ...


@recorded
class Constant:
    """Always ``value``.

    Example:
        >>> Constant(0.4)(1_000)
        0.4
    """

    clock = "draws"

    def __init__(self, value: float) -> None:
        self.value = float(value)

    def __call__(self, time: int) -> float:
        """``value``, whatever the clock shows."""
        return self.value


@recorded
class Linear:
    """From ``start`` to ``end`` in a straight line over ``duration`` ticks of ``clock``, then ``end``.

    Args:
        start: value at time 0.
        end: value from ``duration`` on.
        duration: ticks of the clock; positive.
        clock: ``"draws"``, ``"updates"`` or ``"env_steps"``.

    Example:
        >>> [Linear(0.4, 1.0, duration=100)(time) for time in (0, 50, 200)]
        [0.4, 0.7, 1.0]
    """

    def __init__(self, start: float, end: float, duration: int, clock: str = "draws") -> None:
        if duration <= 0:
            raise ValueError(f"duration must be a positive number of ticks of the clock; got {duration}")
        if clock not in CLOCKS:
            raise ValueError(f"clock must be one of {', '.join(CLOCKS)}; got {clock!r}")
        self.start = float(start)
        self.end = float(end)
        self.duration = int(duration)
        self.clock = clock

    def __call__(self, time: int) -> float:
        """The value when the clock shows ``time``."""
        return self.start + (self.end - self.start) * min(max(time / self.duration, 0.0), 1.0)


def as_schedule(value: Any) -> Schedule:
    """``value`` itself when it is a schedule, a :class:`Constant` when it is a number.

    Raises:
        TypeError: neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Constant(value)
    if callable(value) and getattr(value, "clock", None) in CLOCKS:
        return value
    raise TypeError(
        f"a schedule is a number, or a callable with an attribute clock among {', '.join(CLOCKS)}; "
        f"got {value!r}. Use Linear(start, end, duration, clock=...)"
    )
