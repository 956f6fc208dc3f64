# SPDX-License-Identifier: Apache-2.0
"""Conditions without memory as comparisons of numbers, evaluated together in one compiled pass over columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from lightning_replay.compiled import compiled
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
from lightning_replay.storage.columns import as_array
from lightning_replay.storage.rows import Key

_REWARD, _TERMINATED = ("next", "reward"), ("next", "terminated")
_MOST_COMPONENTS = 256  # of a region; a larger one, as of images, is evaluated by itself
_WITHOUT_COMPARISON = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

Kinds = Mapping[Key, tuple[torch.dtype, torch.Size]]


class Comparisons(NamedTuple):
    """``low <= numbers[column] <= high`` of each comparison, arrays ``[C]``; false for NaN."""

    column: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Combinations(NamedTuple):
    """Whether every, or any, of several earlier results holds, for K combinations."""

    is_every: np.ndarray  #: bool ``[K]``.
    start: np.ndarray  #: int64 ``[K + 1]``, where the results of each begin in ``parts``.
    parts: np.ndarray  #: int64, results: comparisons first, combinations after them.


class _Between(NamedTuple):
    """A comparison of one component of a column, converted to ``dtype`` first."""

    key: Key
    component: int
    dtype: np.dtype
    low: float
    high: float


class _Combined(NamedTuple):
    is_every: bool
    parts: list[Any]


class ConditionBlock:
    """Evaluates the conditions that can be written as comparisons, all of them at once.

    These are thresholds, flags, regions and combinations of them, exactly of the classes of this library. Numbers are
    compared in the precision in which the condition by itself compares them.

    Args:
        conditions: V of them.
        kinds: dtype and shape per row of the columns.
    """

    def __init__(self, conditions: Sequence[ConditionLike], kinds: Kinds) -> None:
        expressions = [_expression(condition, kinds) for condition in conditions]
        given = [one for one in expressions if one is not None]
        #: Places of the conditions that must be called.
        self.others: list[int] = [place for place, one in enumerate(expressions) if one is None]
        self._places = np.array([place for place, one in enumerate(expressions) if one is not None], dtype=np.int64)
        self._num_conditions = len(expressions)
        tests = list(dict.fromkeys(test for one in given for test in _comparisons_of(one)))
        self._comparisons = self._read(tests, list(kinds))
        self._results, self._combinations = _combined(given, tests)
        self._is_plain = self._results.tolist() == list(range(len(conditions))) and not len(self._combinations.is_every)

    def _read(self, tests: list[_Between], keys: list[Key]) -> Comparisons:
        read: dict[tuple[Key, np.dtype], set[int]] = {}
        for test in tests:
            read.setdefault((test.key, test.dtype), set()).add(test.component)
        self._columns = [(keys.index(key), dtype, sorted(components)) for (key, dtype), components in read.items()]
        numbers = [(key, dtype, one) for (key, dtype), components in read.items() for one in sorted(components)]
        self._num_numbers = len(numbers)
        return Comparisons(
            np.array([numbers.index((test.key, test.dtype, test.component)) for test in tests], dtype=np.int64),
            np.array([test.low for test in tests], dtype=np.float64),
            np.array([test.high for test in tests], dtype=np.float64),
        )

    def __call__(self, values: Sequence[Tensor | np.ndarray]) -> np.ndarray:
        """Returns which conditions hold, bool ``[V, N]``, from columns ``[N, ...]``; false for :attr:`others`."""
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
        held = np.empty((len(self._comparisons.column) + len(self._combinations.is_every), count), dtype=np.bool_)
        if len(held):
            # named tuples would take as long as all comparisons
            _evaluate(numbers, *self._comparisons, *self._combinations, held)
        if self._is_plain:
            return held
        happened = np.zeros((self._num_conditions, count), dtype=np.bool_)
        happened[self._places] = held[self._results]
        return happened


@compiled
def _evaluate(numbers, columns, lows, highs, are_every, start, parts, held):  # type: ignore[no-untyped-def]
    """Fills bool ``[C + K, N]``: which of C comparisons hold for float64 ``[columns, N]``, then which combinations."""
    number_of_comparisons, count = columns.size, numbers.shape[1]
    for test in range(number_of_comparisons):
        column, low, high = columns[test], lows[test], highs[test]
        for row in range(count):
            held[test, row] = (numbers[column, row] >= low) & (numbers[column, row] <= high)
    for combination in range(are_every.size):
        result, is_every = number_of_comparisons + combination, are_every[combination]
        held[result] = is_every
        for place in range(start[combination], start[combination + 1]):
            part = parts[place]
            for row in range(count):
                if is_every:
                    held[result, row] &= held[part, row]
                else:
                    held[result, row] |= held[part, row]


def _combined(expressions: Sequence[_Between | _Combined], tests: list[_Between]) -> tuple[np.ndarray, Combinations]:
    """Returns the place of the result of each expression, and the combinations that lead to these."""
    is_every: list[bool] = []
    parts: list[list[int]] = []

    def result_of(expression: _Between | _Combined) -> int:
        if isinstance(expression, _Between):
            return tests.index(expression)
        results = [result_of(part) for part in expression.parts]
        parts.append(results)
        is_every.append(expression.is_every)
        return len(tests) + len(parts) - 1

    results = np.array([result_of(one) for one in expressions], dtype=np.int64)
    start = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return results, Combinations(
        np.array(is_every, dtype=np.bool_), start, np.array([one for each in parts for one in each], dtype=np.int64)
    )


def _comparisons_of(expression: _Between | _Combined) -> list[_Between]:
    if isinstance(expression, _Between):
        return [expression]
    return [test for part in expression.parts for test in _comparisons_of(part)]


def _expression(condition: ConditionLike, kinds: Kinds) -> _Between | _Combined | None:
    """Returns a condition as comparisons; ``None`` for one that must be called, also where that raises an error."""
    if type(condition) is RewardAtLeast:
        return _at_least(_REWARD, condition.threshold, kinds)
    if type(condition) is RewardBelow:
        return _below(_REWARD, condition.threshold, kinds)
    if type(condition) is InfoKey:
        return _at_least(("next", *_parts(condition.key)), condition.at_least, kinds)
    if type(condition) is TerminalWithReward:
        if kinds.get(_TERMINATED, (None,))[0] != torch.bool:
            return None
        return _all_of([_at_least(_TERMINATED, 0.5, kinds), _at_least(_REWARD, condition.at_least, kinds)])
    if type(condition) is KeyInRegion:
        return _region(condition, kinds)
    if type(condition) is EveryOf or type(condition) is AnyOf:
        return _all_of([_expression(one, kinds) for one in condition.conditions], type(condition) is EveryOf)
    return None


def _all_of(parts: list[Any], is_every: bool = True) -> _Combined | None:
    return None if None in parts else _Combined(is_every, parts)


def _at_least(key: Key, threshold: float, kinds: Kinds) -> _Between | None:
    dtype = _compared_as(key, kinds)
    return None if dtype is None else _Between(key, 0, dtype, _rounded(threshold, dtype), math.inf)


def _below(key: Key, threshold: float, kinds: Kinds) -> _Between | None:
    dtype = _compared_as(key, kinds)
    if dtype is None:
        return None
    limit = _rounded(threshold, dtype)
    if limit == -math.inf:
        return _Between(key, 0, dtype, math.inf, -math.inf)  # never
    return _Between(key, 0, dtype, -math.inf, float(np.nextafter(dtype.type(limit), dtype.type(-math.inf))))


def _compared_as(key: Key, kinds: Kinds) -> np.dtype | None:
    """Returns the dtype in which torch compares a column of one number a row with a number."""
    dtype, shape = kinds.get(key, (torch.complex64, torch.Size()))
    if shape.numel() != 1 or dtype.is_complex or dtype in _WITHOUT_COMPARISON:
        return None
    return (
        torch.empty(0, dtype=torch.result_type(torch.empty(1, dtype=dtype, device="cpu"), 0.5), device="cpu")
        .numpy()
        .dtype
    )


def _rounded(number: float, dtype: np.dtype) -> float:
    with np.errstate(over="ignore"):
        return float(dtype.type(number))


def _region(condition: KeyInRegion, kinds: Kinds) -> _Combined | None:
    key = _parts(condition.key)
    dtype, shape = kinds.get(key, (torch.complex64, torch.Size()))
    size = shape.numel()
    least, greatest = condition.bounds
    if dtype.is_complex or dtype in _WITHOUT_COMPARISON or not 0 < size <= _MOST_COMPONENTS:
        return None
    if least.numel() not in (1, size):
        return None
    compared_as = dtype if dtype.is_floating_point else torch.float64
    bounds = [bound.to(compared_as).double().expand(size).tolist() for bound in (least, greatest)]
    array_dtype = torch.empty(0, dtype=compared_as, device="cpu").numpy().dtype
    return _Combined(True, [_Between(key, n, array_dtype, *both) for n, both in enumerate(zip(*bounds, strict=True))])


def _parts(key: NestedKey) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)
