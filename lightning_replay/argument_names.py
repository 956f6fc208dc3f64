# SPDX-License-Identifier: Apache-2.0
"""Errors for unknown arguments, which name the closest one that is accepted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec, TypeVar

from lightning_replay.validation import did_you_mean

__all__ = ["accepted_names", "refuse_unknown", "with_named_arguments"]

P = ParamSpec("P")
R = TypeVar("R")


def accepted_names(function: Callable[..., object]) -> list[str] | None:
    """Returns the names a function can be called with, or ``None`` where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.name != "self"]


def refuse_unknown(owner: str, given: Iterable[str], accepted: Collection[str] | None) -> None:
    """Raises ``TypeError`` for names of arguments that are not ``accepted``, of which ``None`` stands for all.

    The error names the ``owner``, a class or a function.
    """
    for name in given:
        if accepted is not None and name not in accepted:
            hint = did_you_mean(name, accepted) or f"; accepted are {', '.join(accepted) or 'none'}"
            raise TypeError(f"{owner} has no argument {name!r}{hint}")


def with_named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of constructors and recipes: unknown arguments are refused; signature and documentation stay."""
    accepted = accepted_names(function)
    known = None if accepted is None else set(accepted)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if known is not None and not known.issuperset(kwargs):
            refuse_unknown(owner, kwargs, accepted)
        return function(*args, **kwargs)

    return checked
