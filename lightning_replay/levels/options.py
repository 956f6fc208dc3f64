# SPDX-License-Identifier: Apache-2.0
"""Options of constructors, checked by kind and range."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

__all__ = ["ABOVE_ZERO", "check_option", "check_share"]

ABOVE_ZERO = math.ulp(0.0)  # the least float that is
_LARGEST = math.nextafter(math.inf, 0.0)


def check_option(
    name: str, value: Any, kind: type, accepted: str, lowest: float = -_LARGEST, highest: float = _LARGEST
) -> None:
    """Refuses the value of an option that is of another kind or out of its range.

    Args:
        name: of the option.
        value: that was given.
        kind: ``numbers.Real``, ``numbers.Integral``, neither of which takes ``True``, or ``bool``.
        accepted: what the error says the option must be.
        lowest: of the accepted numbers; ``ABOVE_ZERO`` leaves 0 out.
        highest: of the accepted numbers.

    Raises:
        TypeError: another kind.
        ValueError: another number, or NaN.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r}; it must be {accepted}")
    if not lowest <= value <= highest:  # type: ignore[operator]
        raise ValueError(f"{name} is {value}; it must be {accepted}")


def check_share(name: str, value: Any, lowest: float = 0.0) -> None:
    """Refuses all but a number in [0, 1], or with ``lowest=ABOVE_ZERO`` in (0, 1]; errors as :func:`check_option`."""
    check_option(name, value, Real, f"a number in {'[' if lowest == 0.0 else '('}0, 1]", lowest, 1.0)
