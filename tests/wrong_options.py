# SPDX-License-Identifier: Apache-2.0
"""Wrong values for every option of a function, read off the annotations of its signature."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest

KINDS = {"int", "float", "bool"}
NOT_TRIED = {"Bound", "Tensor", "torch.Generator", "Mapping[str, Tensor]", "Iterable[Tensor]", "torch.device"}
ANY_SIGN = {"seed"}
INFINITE = {"drift_tolerance"}
FROM_ZERO = {
    *("burn_in", "count", "exploration_steps", "noops", "num_learners", "num_spare", "overlap", "prefetch", "seed"),
    "warmup_steps",
}
ABOVE_ZERO = {
    *("advance_at", "clip_range", "concentration", "draw_discount", "exploration", "gradient_norm", "half_life"),
    *(
        "mixup_concentration",
        "offset",
        "score_step_size",
        "score_temperature",
        "step_size",
        "value_clip",
        "weight_sharing",
    ),
}
UP_TO_ONE = {
    *("advance_at", "c", "conflict_aversion", "default_share", "discount", "draw_discount", "epsilon", "event_share"),
    *("exploration", "exploration_end", "exploration_start", "floor", "fraction", "gae_lambda", "greedy_epsilon"),
    *(
        "importance_exponent",
        "max_share",
        "min_fill",
        "replay_probability",
        "score_step_size",
        "share",
        "staleness_weight",
    ),
    *("step_size", "sticky_action_probability", "sweep_share", "target_update_rate", "weight_sharing"),
}
CHOICES = {
    *("backend", "clock", "correction", "device", "discrete", "first_score", "kind", "maze", "projection"),
    *("shard_placement", "restart_shards"),
}


class WrongOption(NamedTuple):
    """One call that must be refused."""

    owner: str  # for the test's name
    build: Callable[..., Any]
    name: str  # of the option
    value: Any
    error: type[Exception] | None  # ``None`` for ``TypeError`` or ``ValueError``
    arguments: dict[str, Any]  # others, with which it could be built

    def __repr__(self) -> str:
        return f"{self.owner}-{self.name}-{self.value!r}"


def by_option(wrong: Iterable[WrongOption]) -> dict[str, list[WrongOption]]:
    """The calls of each option, for one test of an option: a test for each call takes longer than the call."""
    found: dict[str, list[WrongOption]] = {}
    for one in wrong:
        found.setdefault(f"{one.owner}-{one.name}", []).append(one)
    return found


def options_of(function: Callable[..., Any]) -> dict[str, set[str]]:
    """The parts of the annotation of each option: ``{"int", "None"}``."""
    function = function.__init__ if inspect.isclass(function) else function
    options = {}
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is one.VAR_KEYWORD and str(one.annotation).startswith("Unpack["):
            (shared,) = get_args(get_type_hints(function)[name])
            options |= {name: hint.__forward_arg__ for name, hint in shared.__annotations__.items()}
        elif name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            options[name] = str(one.annotation)
    return {name: {part.strip() for part in annotation.split("|")} for name, annotation in options.items()}


def wrong_values(name: str, parts: set[str]) -> Iterator[tuple[Any, type[Exception] | None]]:
    """Values of the wrong kind and out of range, each with the class of its error."""
    is_number, is_whole = bool(parts & {"int", "float"}), "float" not in parts
    if parts & NOT_TRIED:
        return
    if not parts & KINDS:
        yield 2.5, None
        if "str" in parts and name in CHOICES:
            yield "no such", ValueError
        elif "str" not in parts and any(part.startswith("Sequence[") for part in parts - {"Sequence[EventTable]"}):
            yield "no such", None
        return
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
    if is_whole and name not in FROM_ZERO:
        yield 0, ValueError
    if name in ABOVE_ZERO:
        yield 0.0, ValueError
    if name in UP_TO_ONE:
        yield 1.5, ValueError


def wrong_options(
    owner: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    any_sign: Collection[str] = (),
    leave_out: Collection[str] = (),
) -> list[WrongOption]:
    """Every wrong value of every option of a class or function; those of ``any_sign`` may be negative."""
    found = []
    for option, parts in options_of(owner).items():
        if option in leave_out:
            continue
        right = {-1} if option in ANY_SIGN or option in any_sign or "Sequence[int]" in parts else set()
        right |= {math.inf} if option in INFINITE else set()
        found += [
            WrongOption(owner.__name__, owner, option, value, error, arguments)
            for value, error in wrong_values(option, parts)
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
    assert type(refused.value) in ((wrong.error,) if wrong.error else (TypeError, ValueError)), refused.value
