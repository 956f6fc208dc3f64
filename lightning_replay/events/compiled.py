# SPDX-License-Identifier: Apache-2.0
"""Conditions without memory as comparisons of numbers, evaluated together in one compiled pass over columns."""

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

_REWARD, _TERMINATED = ("next", "reward"), ("next", "terminated")
_MOST_COMPONENTS = 256  # of a region; a larger one, as of images, is evaluated by itself
_WITHOUT_COMPARISON = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

Kinds = Mapping[Key, tuple[torch.dtype, torch.Size]]


class _Between(NamedTuple):
    """``low <= component <= high`` for one component of a column, converted to ``dtype`` first; false for NaN."""

    key: Key
    component: int
    dtype: np.dtype
    low: float
    high: float


class _Combined(NamedTuple):
    """Whether every, or any, of several parts holds."""

    is_every: bool
    parts: tuple[Any, ...]


class ConditionBlock:
    """Evaluates the V conditions that can be written as comparisons, all of them at once.

    These are thresholds, flags, regions and combinations of them, exactly of the classes of this library. Numbers are
    compared in the precision in which the condition by itself compares them.
    """

    def __init__(self, conditions: Sequence[ConditionLike], kinds: Kinds) -> None:
        expressions = [_expression(condition, kinds) for condition in conditions]
        #: Places of the conditions that must be called.
        self.others: list[int] = [place for place, one in enumerate(expressions) if one is None]
        self._places = np.array([place for place, one in enumerate(expressions) if one is not None], dtype=np.int64)
        self._num_conditions = len(expressions)
        # Equal expressions are evaluated once, and parts before what is combined of them.
        results: dict[_Between | _Combined, int] = {}
        self._results = np.array([_add(one, results) for one in expressions if one is not None], dtype=np.int64)
        tests = [one for one in results if isinstance(one, _Between)]
        self._is_plain = self._results.tolist() == list(range(len(conditions))) and len(results) == len(conditions)
        # Numbers are read once for all comparisons: the components of each column, in each dtype they are compared in.
        read: dict[tuple[Key, np.dtype], set[int]] = {}
        for test in tests:
            read.setdefault((test.key, test.dtype), set()).add(test.component)
        keys = list(kinds)
        self._columns = [(keys.index(key), dtype, sorted(components)) for (key, dtype), components in read.items()]
        numbers = [(key, dtype, one) for (key, dtype), components in read.items() for one in sorted(components)]
        self._num_numbers, self._num_results = len(numbers), len(results)
        columns = [
            numbers.index((one.key, one.dtype, one.component)) if isinstance(one, _Between) else -1 for one in results
        ]
        parts = [[results[part] for part in one.parts] if isinstance(one, _Combined) else [] for one in results]
        self._program = (
            np.array(columns, dtype=np.int64),
            np.array([one.low if isinstance(one, _Between) else 0.0 for one in results], dtype=np.float64),
            np.array([one.high if isinstance(one, _Between) else 0.0 for one in results], dtype=np.float64),
            np.array([isinstance(one, _Combined) and one.is_every for one in results], dtype=np.bool_),
            np.cumsum([0, *map(len, parts)], dtype=np.int64),
            np.array([one for each in parts for one in each], dtype=np.int64),
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
        held = np.empty((self._num_results, count), dtype=np.bool_)
        if len(held):
            _evaluate(numbers, *self._program, held)
        if self._is_plain:
            return held
        happened = np.zeros((self._num_conditions, count), dtype=np.bool_)
        happened[self._places] = held[self._results]
        return happened


@compiled
def _evaluate(numbers, columns, lows, highs, are_every, start, parts, held):  # type: ignore[no-untyped-def]
    # Result r is a comparison of numbers, or where the column is -1 of results parts[start[r] : start[r + 1]].
    for result in range(columns.size):
        column, low, high, is_every = columns[result], lows[result], highs[result], are_every[result]
        if column >= 0:
            for row in range(numbers.shape[1]):
                held[result, row] = (numbers[column, row] >= low) & (numbers[column, row] <= high)
            continue
        held[result] = is_every
        for place in range(start[result], start[result + 1]):
            for row in range(numbers.shape[1]):
                if is_every:
                    held[result, row] &= held[parts[place], row]
                else:
                    held[result, row] |= held[parts[place], row]


def _add(expression: _Between | _Combined, results: dict[_Between | _Combined, int]) -> int:
    if isinstance(expression, _Combined):
        for part in expression.parts:
            _add(part, results)
    return results.setdefault(expression, len(results))


def _expression(condition: ConditionLike, kinds: Kinds) -> _Between | _Combined | None:
    """Returns a condition as comparisons; ``None`` for one that must be called, also where that raises an error."""
    if type(condition) is RewardAtLeast:
        return _at_least(_REWARD, condition.threshold, kinds)
    if type(condition) is RewardBelow:
        return _below(_REWARD, condition.threshold, kinds)
    if type(condition) is InfoKey:
        return _at_least(("next", *checked_key("key", condition.key)), condition.at_least, kinds)
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
    return None if None in parts else _Combined(is_every, tuple(parts))


def _at_least(key: Key, threshold: float, kinds: Kinds) -> _Between | None:
    dtype = _compared_as(key, kinds)
    return None if dtype is None else _Between(key, 0, dtype, _rounded(threshold, dtype), math.inf)


def _below(key: Key, threshold: float, kinds: Kinds) -> _Between | None:
    dtype = _compared_as(key, kinds)
    if dtype is None:
        return None
    limit = _rounded(threshold, dtype)
    if limit == -math.inf:  # nothing lies below it
        return _Between(key, 0, dtype, math.inf, -math.inf)  # never
    return _Between(key, 0, dtype, -math.inf, float(np.nextafter(dtype.type(limit), dtype.type(-math.inf))))


def _compared_as(key: Key, kinds: Kinds) -> np.dtype | None:
    """Returns the dtype in which torch compares a column of one number a row with a number."""
    dtype, shape = kinds.get(key, (torch.complex64, torch.Size()))
    if shape.numel() != 1 or dtype.is_complex or dtype in _WITHOUT_COMPARISON:
        return None  # called by itself, the condition raises its own error
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
