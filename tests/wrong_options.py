# SPDX-License-Identifier: Apache-2.0
"""Wrong values for every option whose annotation is a number, a count, a seed or a flag, read off the signature."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import pytest

KINDS = {"int", "float", "bool"}
ANY_SIGN = {"seed"}
INFINITE = {"drift_tolerance"}


class WrongOption(NamedTuple):
    """One call that must be refused.

    Attributes:
        owner: what is called, for the test's name.
        build: what is called.
        name: of the option.
        value: that is refused.
        error: expected class.
        arguments: others, with which it could be built.
    """

    owner: str
    build: Callable[..., Any]
    name: str
    value: Any
    error: type[Exception]
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.owner}-{self.name}-{self.value!r}"


def options_of(function: Callable[..., Any]) -> dict[str, set[str]]:
    """The parts of the annotation of each option that is a number, a count or a flag: ``{"int", "None"}``."""
    function = function.__init__ if inspect.isclass(function) else function
    options = {}
    for name, parameter in inspect.signature(function).parameters.items():
        parts = {part.strip() for part in str(parameter.annotation).split("|")}
        if parts & KINDS:
            options[name] = parts
    return options


def wrong_values(parts: set[str]) -> Iterator[tuple[Any, type[Exception]]]:
    """Values of the wrong kind, and NaN, infinite and negative ones, each with the class of its error."""
    is_number, is_whole = bool(parts & {"int", "float"}), "float" not in parts
    yield 1j, TypeError
    if "str" not in parts:
        yield "4", TypeError
    if "None" not in parts:
        yield None, TypeError
    if "bool" not in parts:
        yield True, TypeError
    if not is_number:
        yield 1, TypeError
        return
    yield math.nan, TypeError if is_whole else ValueError
    yield math.inf, TypeError if is_whole else ValueError
    yield -1, ValueError
    if is_whole:
        yield 2.5, TypeError


def wrong_options(
    owner: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    any_sign: Collection[str] = (),
    leave_out: Collection[str] = (),
) -> list[WrongOption]:
    """Every wrong value of every option of ``owner``.

    Args:
        owner: a class or a function.
        arguments: with which it can be called.
        any_sign: options that may be negative, beside ``seed``.
        leave_out: options that are checked elsewhere.
    """

    found = []
    for option, parts in options_of(owner).items():
        if option in leave_out:
            continue
        right = {-1} if option in ANY_SIGN or option in any_sign or "Sequence[int]" in parts else set()
        right |= {math.inf} if option in INFINITE else set()
        found += [
            WrongOption(owner.__name__, owner, option, value, error, arguments)
            for value, error in wrong_values(parts)
            if value not in right
        ]
    return found


def assert_refused(wrong: WrongOption) -> None:
    """The error is of the expected class, and its message names the option and what was given."""
    with pytest.raises((TypeError, ValueError)) as refused:
        wrong.build(**(wrong.arguments | {wrong.name: wrong.value}))
    message = str(refused.value)
    assert re.search(rf"\b{wrong.name}\b", message), message
    assert repr(wrong.value) in message, message
    assert type(refused.value) is wrong.error, refused.value
