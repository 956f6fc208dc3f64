# SPDX-License-Identifier: Apache-2.0
"""Conditions that look at one step at a time: its reward, a region of a column, an information column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from lightning_replay.events.conditions.condition import Condition, ConditionError, column, one_number
from lightning_replay.saving.spec import recorded
from lightning_replay.validation import checked_bound, checked_entries, checked_number

Bound = float | Sequence[float | None] | None


@recorded
class RewardAtLeast(Condition):
    """True where the reward of a step is ``threshold`` or more.

    Example:
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"reward": torch.tensor([[0.5], [1.0]])}}, [2])
        >>> RewardAtLeast(1.0)(steps)
        tensor([False,  True])
    """

    def __init__(self, threshold: float) -> None:
        self.threshold: float = checked_number("threshold", threshold)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return one_number(steps, ("next", "reward")) >= self.threshold

    def __repr__(self) -> str:
        return f"reward_at_least({self.threshold})"


@recorded
class RewardBelow(Condition):
    """True where the reward of a step is less than ``threshold``."""

    def __init__(self, threshold: float) -> None:
        self.threshold: float = checked_number("threshold", threshold)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return one_number(steps, ("next", "reward")) < self.threshold

    def __repr__(self) -> str:
        return f"reward_below({self.threshold})"


@recorded
class TerminalWithReward(Condition):
    """True where a step terminated its episode with a reward of ``at_least`` or more; truncation does not count."""

    def __init__(self, at_least: float) -> None:
        self.at_least: float = checked_number("at_least", at_least)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        terminated = one_number(steps, ("next", "terminated")).bool()
        return terminated & (one_number(steps, ("next", "reward")) >= self.at_least)

    def __repr__(self) -> str:
        return f"terminal_with_reward({self.at_least})"


@recorded
class InfoKey(Condition):
    """True where the information column ``("next", key)`` is ``at_least`` or more; one number or bool for each step.

    Args:
        key: name of the information, a tuple where it is nested.
        at_least: the default reads a bool, or a 0 or 1, as it is.
    """

    def __init__(self, key: str | Sequence[str], at_least: float = 0.5) -> None:
        self.key: NestedKey = _key(key)
        self.at_least: float = checked_number("at_least", at_least)

    def __call__(self, steps: TensorDictBase) -> Tensor:
        return one_number(steps, unravel_key(("next", self.key))) >= self.at_least

    def __repr__(self) -> str:
        return f"info_key({self.key!r}, at_least={self.at_least})"


@recorded
class KeyInRegion(Condition):
    """True where every component of a column lies between its bounds, the bounds included.

    Args:
        key: the column, usually ``("next", "observation")``.
        low, high: one number for all components, or one for each; ``None`` leaves a component unbounded.

    Raises:
        ValueError: no bound at all, a bound that is NaN, ``low`` above ``high``, or another number of components.

    Example:
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"observation": torch.tensor([[6.0, 1.0], [6.0, 9.0], [5.0, 1.0]])}}, [3])
        >>> KeyInRegion(("next", "observation"), low=[6, None], high=[6, 2])(steps)
        tensor([ True, False, False])
    """

    def __init__(self, key: str | Sequence[str], low: Bound = None, high: Bound = None) -> None:
        self.key: NestedKey = _key(key)
        self.low: tuple[float | None, ...] = _bounds("low", low)
        self.high: tuple[float | None, ...] = _bounds("high", high)
        if all(bound is None for bound in self.low + self.high):
            raise ValueError("low and high bound nothing, so the region is everything; give at least one bound")
        size = max(len(self.low), len(self.high))
        if min(len(self.low), len(self.high)) not in (1, size):
            raise ValueError(
                f"low has {len(self.low)} components and high has {len(self.high)}; give one number for all, "
                "or one for each component in both, None where it does not matter"
            )
        self._least = _filled(self.low, -math.inf).expand(size)
        self._greatest = _filled(self.high, math.inf).expand(size)
        if (self._least > self._greatest).any():
            raise ValueError(f"low {low} is above high {high}, so the region is empty; give low <= high")

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Least and greatest value of each component, or of all, float64 ``[n]``."""
        return self._least, self._greatest

    def __call__(self, steps: TensorDictBase) -> Tensor:
        value = column(steps, self.key).reshape(len(steps), -1)
        if self._least.numel() not in (1, value.shape[1]):
            raise ConditionError(
                f"the region of {self.key!r} has {self._least.numel()} components; the column has {value.shape[1]}. "
                "Give a bound for each, None where it does not matter"
            )
        # In the column's own precision: 0.1 as float32 and 0.1 as float64 are different numbers.
        dtype = value.dtype if value.is_floating_point() else torch.float64
        least, greatest = self._least.to(value.device, dtype), self._greatest.to(value.device, dtype)
        return ((value >= least) & (value <= greatest)).all(1)

    def __repr__(self) -> str:
        return f"key_in_region({self.key!r}, low={list(self.low)}, high={list(self.high)})"


def _key(key: str | Sequence[str]) -> NestedKey:
    if not isinstance(key, Sequence) or not all(isinstance(part, str) for part in key):
        raise TypeError(f"key is {key!r}; it must be the name of a column, a string or a tuple of strings")
    if not key:
        raise ValueError(f"key is {key!r}; it must be the name of a column")
    return key if isinstance(key, str) else tuple(key)


def _bounds(name: str, bound: Bound) -> tuple[float | None, ...]:
    if bound is None or isinstance(bound, Real):
        return (checked_bound(name, bound),)
    entries = checked_entries(name, bound, "a number, None, or a list of these, one for each component")
    return tuple(checked_bound(f"{name}[{place}]", entry) for place, entry in enumerate(entries))


def _filled(bounds: tuple[float | None, ...], unbounded: float) -> Tensor:
    return torch.tensor([unbounded if bound is None else bound for bound in bounds], dtype=torch.float64, device="cpu")
