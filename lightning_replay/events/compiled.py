# SPDX-License-Identifier: Apache-2.0
"""Conditions without memory as comparisons of numbers, evaluated together in one compiled pass over columns.

A call of a condition reads its columns from a TensorDict and compares them with torch, which takes longer than storing
the row. For one row, calls of a threshold, a flag, and a region take 65 µs, and the compiled pass 6 µs. For a threshold
they take 14 µs and 2 µs. For 1,024 rows and all three conditions, they take 187 µs and 54 µs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_replay.events.conditions import (
    AnyOf,
    ConditionLike,
    EveryOf,
    InfoKey,
    KeyInRegion,
    RewardAtLeast,
    RewardBelow,
    TerminalWithReward,
)
from lightning_replay.jit import compiled
from lightning_replay.options import checked_key
from lightning_replay.storage.columns import as_array
from lightning_replay.storage.rows import Key

_REWARD = ("next", "reward")
_TERMINATED = ("next", "terminated")
_MOST_COMPONENTS = 256  # A larger region, such as one of images, is evaluated by itself.
_WITHOUT_COMPARISON = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

Kinds = Mapping[Key, tuple[torch.dtype, torch.Size]]


class _Between(NamedTuple):
    """``low <= component <= high`` for one component of a column, converted to ``dtype`` first. It is false for NaN."""

    key: Key
    component: int
    dtype: np.dtype
    low: float
    high: float


class _Combined(NamedTuple):
    """Whether every part holds, or any of them."""

    is_every: bool
    parts: tuple[Any, ...]


class _Program(NamedTuple):
    """R results for the compiled loop. Result r is a comparison of a number, or a combination of earlier results."""

    columns: np.ndarray  #: int64 ``[R]``, the number that is compared, or -1 for a combination.
    lows: np.ndarray  #: float64 ``[R]``, least number for which a comparison holds.
    highs: np.ndarray  #: float64 ``[R]``, greatest number for which a comparison holds.
    are_every: np.ndarray  #: bool ``[R]``, whether every part of a combination must hold, or any.
    start: np.ndarray  #: int64 ``[R + 1]``, the parts of r are ``parts[start[r] : start[r + 1]]``.
    parts: np.ndarray  #: int64, results that are combined.


class ConditionBlock:
    """Evaluates all of V conditions at once that can be written as comparisons.

    Thresholds, flags, regions, and combinations of them can be written so, if they are exactly of the classes of this
    library. Numbers are compared in the precision in which a call of the condition compares them.
    """

    def __init__(self, conditions: Sequence[ConditionLike], kinds: Kinds) -> None:
        expressions = [_expression(condition, kinds) for condition in conditions]
        #: Places of the conditions that must be called.
        self.others: list[int] = [place for place, expression in enumerate(expressions) if expression is None]
        self._places = np.setdiff1d(np.arange(len(expressions)), self.others)
        self._num_conditions = len(expressions)
        # Equal expressions are evaluated once, and parts before their combinations.
        results: dict[_Between | _Combined, int] = {}
        written = [expression for expression in expressions if expression is not None]
        self._results = np.array([_add(expression, results) for expression in written], dtype=np.int64)
        self._is_plain = self._results.tolist() == list(range(len(conditions))) and len(results) == len(conditions)
        # Numbers are read once for all comparisons: the components of each column, in each dtype of a comparison.
        read: dict[tuple[Key, np.dtype], set[int]] = {}
        for test in results:
            if isinstance(test, _Between):
                read.setdefault((test.key, test.dtype), set()).add(test.component)
        keys = list(kinds)
        self._columns = [(keys.index(key), dtype, sorted(components)) for (key, dtype), components in read.items()]
        numbers = [(keys[place], dtype, number) for place, dtype, components in self._columns for number in components]
        self._num_numbers = len(numbers)
        # A compiled function reads a plain tuple faster than a named one.
        self._program = tuple(_program_of(results, numbers))

    def __call__(self, values: Sequence[Tensor | np.ndarray]) -> np.ndarray:
        """Returns which conditions hold, bool ``[V, N]``, from columns ``[N, ...]``, and false for :attr:`others`."""
        count = len(values[0])
        numbers = np.empty((self._num_numbers, count))
        first = 0
        for place, dtype, components in self._columns:
            value = as_array(values[place])
            if value.dtype is not dtype and value.dtype != dtype:
                value = value.astype(dtype)
            last = first + len(components)
            if value.size == count:
                numbers[first] = value.reshape(count)
            else:
                value = value.reshape(count, -1)
                numbers[first:last] = (value if len(components) == value.shape[1] else value[:, components]).T
            first = last
        held = np.empty((len(self._program[0]), count), dtype=np.bool_)
        if len(held):
            _evaluate(numbers, *self._program, held)
        if self._is_plain:
            return held
        happened = np.zeros((self._num_conditions, count), dtype=np.bool_)
        happened[self._places] = held[self._results]
        return happened


def _program_of(results: Mapping[_Between | _Combined, int], numbers: list[tuple[Key, np.dtype, int]]) -> _Program:
    never = _Between((), 0, np.dtype(np.float64), 0.0, 0.0)
    tests = [result if isinstance(result, _Between) else never for result in results]
    combined = [result if isinstance(result, _Combined) else _Combined(False, ()) for result in results]
    places = {number: place for place, number in enumerate(numbers)}
    return _Program(
        columns=np.array([places.get((test.key, test.dtype, test.component), -1) for test in tests], dtype=np.int64),
        lows=np.array([test.low for test in tests], dtype=np.float64),
        highs=np.array([test.high for test in tests], dtype=np.float64),
        are_every=np.array([result.is_every for result in combined], dtype=np.bool_),
        start=np.cumsum([0, *(len(result.parts) for result in combined)], dtype=np.int64),
        parts=np.array([results[part] for result in combined for part in result.parts], dtype=np.int64),
    )


@compiled
def _evaluate(numbers, columns, lows, highs, are_every, start, parts, held):  # type: ignore[no-untyped-def]
    # The arguments between numbers and held are the arrays of a _Program.
    for result in range(columns.size):
        column = columns[result]
        if column >= 0:
            for row in range(numbers.shape[1]):
                held[result, row] = (numbers[column, row] >= lows[result]) & (numbers[column, row] <= highs[result])
            continue
        held[result] = are_every[result]
        for place in range(start[result], start[result + 1]):
            for row in range(numbers.shape[1]):
                if are_every[result]:
                    held[result, row] &= held[parts[place], row]
                else:
                    held[result, row] |= held[parts[place], row]


def _add(expression: _Between | _Combined, results: dict[_Between | _Combined, int]) -> int:
    if isinstance(expression, _Combined):
        for part in expression.parts:
            _add(part, results)
    return results.setdefault(expression, len(results))


def _expression(condition: ConditionLike, kinds: Kinds) -> _Between | _Combined | None:
    """Returns a condition as comparisons, or ``None`` for a condition that must be called, even to raise its error."""
    if type(condition) is RewardAtLeast:
        return _at_least(_REWARD, condition.threshold, kinds)
    if type(condition) is RewardBelow:
        return _below(_REWARD, condition.threshold, kinds)
    if type(condition) is InfoKey:
        return _at_least(("next", *checked_key("key", condition.key)), condition.at_least, kinds)
    if type(condition) is TerminalWithReward and kinds.get(_TERMINATED, (None,))[0] == torch.bool:
        return _all_of([_at_least(_TERMINATED, 0.5, kinds), _at_least(_REWARD, condition.at_least, kinds)])
    if type(condition) is KeyInRegion:
        return _region(condition, kinds)
    if type(condition) is EveryOf or type(condition) is AnyOf:
        return _all_of([_expression(one, kinds) for one in condition.conditions], type(condition) is EveryOf)
    return None


def _all_of(parts: list[Any], is_every: bool = True) -> _Combined | None:
    return None if None in parts else _Combined(is_every, tuple(parts))


def _at_least(key: Key, threshold: float, kinds: Kinds) -> _Between | None:
    dtype = _compared_as(key, kinds)
    return None if dtype is None else _Between(key, 0, dtype, _rounded(threshold, dtype), math.inf)


def _below(key: Key, threshold: float, kinds: Kinds) -> _Between | None:
    dtype = _compared_as(key, kinds)
    if dtype is None:
        return None
    limit = _rounded(threshold, dtype)
    if limit == -math.inf:  # No number lies below it, so that no number lies between these bounds.
        return _Between(key, 0, dtype, math.inf, -math.inf)
    return _Between(key, 0, dtype, -math.inf, float(np.nextafter(dtype.type(limit), dtype.type(-math.inf))))


def _compared_as(key: Key, kinds: Kinds) -> np.dtype | None:
    """Returns the dtype in which torch compares a column of one number a row with a number."""
    dtype, shape = kinds.get(key, (torch.complex64, torch.Size()))
    if shape.numel() != 1 or dtype.is_complex or dtype in _WITHOUT_COMPARISON:
        return None  # A call of the condition raises its error.
    return _in_numpy(torch.result_type(torch.empty(1, dtype=dtype, device="cpu"), 0.5))


def _in_numpy(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def _rounded(number: float, dtype: np.dtype) -> float:
    with np.errstate(over="ignore"):
        return float(dtype.type(number))


def _region(condition: KeyInRegion, kinds: Kinds) -> _Combined | None:
    key = checked_key("key", condition.key)
    dtype, shape = kinds.get(key, (torch.complex64, torch.Size()))
    size = shape.numel()
    least, greatest = condition.bounds
    is_comparable = not dtype.is_complex and dtype not in _WITHOUT_COMPARISON
    if not is_comparable or not 0 < size <= _MOST_COMPONENTS or least.numel() not in (1, size):
        return None
    compared_as = dtype if dtype.is_floating_point else torch.float64
    bounds = [bound.to(compared_as).double().expand(size).tolist() for bound in (least, greatest)]
    return _all_of(
        [_Between(key, n, _in_numpy(compared_as), *both) for n, both in enumerate(zip(*bounds, strict=True))]
    )
