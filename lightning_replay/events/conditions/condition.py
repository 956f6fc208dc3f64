# SPDX-License-Identifier: Apache-2.0
"""Conditions over steps, evaluated and checked."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

_DONE = ("next", "done")


class ConditionError(ValueError):
    """A condition raised, or did not return one truth value for each step."""


class Condition(ABC):
    """A predicate over steps; a plain function of the same signature serves too where nothing needs saving.

    A step is a row of a TensorDict ``[N]``; an event is a property of its *next* state, so conditions read
    ``("next", ...)`` and never get the state after a reset. Stratified Sampling from Event Tables, definition 5.
    """

    @abstractmethod
    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Returns whether the event happened at each step, bool ``[N]``."""

    def fresh(self) -> Condition:
        """Returns the same condition without memory; itself where it has none."""
        return self

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:  # noqa: B027, most have nothing to end
        """Discards these running episodes, which got no done step; does nothing by default."""

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values; empty by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027, most have nothing to restore
        """Restores what :meth:`state_dict` returned."""


# The class first: a command line then takes a condition by class path, and a function by import path.
ConditionLike = Condition | Callable[[TensorDictBase], Tensor]


def holds(condition: ConditionLike, steps: TensorDictBase) -> Tensor:
    """Evaluates a condition at steps ``[N]``; returns bool ``[N]``, also of a condition that returns ``[N, 1]``.

    Raises:
        ConditionError: the condition raised, wrote into the steps, or returned another shape or dtype.

    Example:
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"reward": torch.tensor([[0.0], [1.0]])}}, [2])
        >>> holds(lambda steps: steps["next", "reward"] > 0, steps)
        tensor([False,  True])
    """
    try:
        result = condition(steps) if isinstance(condition, Condition) else _call_function(condition, steps)
    except ConditionError:
        raise
    except Exception as error:
        raise ConditionError(
            f"the condition {condition!r} raised {type(error).__name__}: {error}. It was given {len(steps)} steps with "
            f"{_columns(steps)}"
        ) from error
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        given = f"a {result.dtype} tensor" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise ConditionError(
            f"the condition {condition!r} returned {given}; return a bool tensor, one value for each step"
        )
    if result.ndim == 1 and len(result) == len(steps):
        return result
    if result.shape != (len(steps), 1):
        raise ConditionError(
            f"the condition {condition!r} returned the shape {list(result.shape)} for {len(steps)} steps; "
            f"return [{len(steps)}], one value for each step"
        )
    return result.reshape(-1)


def _call_function(function: Callable[[TensorDictBase], Tensor], steps: TensorDictBase) -> Tensor:
    """Calls a user's function, which may only read: values that it wrote into the steps would be stored."""
    columns = [column for column in steps.values(True, True) if not column.is_inference()]  # those have no version
    before = [column._version for column in columns]
    result = function(steps.clone(recurse=False).lock_())
    if before != [column._version for column in columns]:
        raise ConditionError(
            f"the condition {function!r} changed a column of the steps in place; compute a new one, as add() for add_()"
        )
    return result


def column(steps: TensorDictBase, key: NestedKey) -> Tensor:
    """Reads a column; raises ConditionError, with the names of all columns, where there is none."""
    value = steps.get(key, None)
    if not isinstance(value, Tensor):
        raise ConditionError(f"the steps have no column {key!r}; stored are {_columns(steps)}")
    return value


def one_number(steps: TensorDictBase, key: NestedKey) -> Tensor:
    """Reads a column as ``[N]``; raises ConditionError where there is none, or where it has several numbers a step."""
    value = column(steps, key)
    if value.numel() != len(steps):
        raise ConditionError(
            f"the column {key!r} has the shape {list(value.shape)}; this condition needs one number for each step. "
            "For one component of several use key_in_region with None for the others"
        )
    return value.reshape(-1)


def own(condition: ConditionLike, name: str = "condition") -> ConditionLike:
    """Returns the condition of the option ``name``, with a memory of its own; raises TypeError for anything else."""
    given: Any = condition
    if not callable(given) or (isinstance(given, type) and issubclass(given, Condition)):
        raise TypeError(
            f"{name} is {condition!r}; it must be a condition such as reward_at_least(1.0), or a function of steps "
            "TensorDict[N] that returns bool [N]"
        )
    return condition.fresh() if isinstance(condition, Condition) else condition


def state_of(condition: ConditionLike) -> dict[str, Any]:
    """Returns the state of a condition; empty for a plain function."""
    return condition.state_dict() if isinstance(condition, Condition) else {}


def load_state_of(condition: ConditionLike, state: dict[str, Any]) -> None:
    """Restores what :func:`state_of` returned."""
    if isinstance(condition, Condition):
        condition.load_state_dict(state)


def warn_of_unmet(
    what: str, condition: ConditionLike, rows: int, stored: TensorDictBase, slots: Tensor, done_key: NestedKey = _DONE
) -> bool:
    """Warns of a condition that was true of no row, once episodes have ended; returns whether they have.

    Args:
        what: has the condition, for the message.
        condition: that was never true.
        rows: for which it was evaluated.
        stored: all slots of the storage.
        slots: int64 ``[n]``, those that hold a row.
        done_key: the flag of rows that ended their episode.
    """
    done, reward = stored.get(done_key, None), stored.get(("next", "reward"), None)
    if done is None or not bool(done[slots].any()):
        return False
    largest = "" if reward is None else f"; the largest reward stored is {float(reward[slots].max()):g}"
    warnings.warn(
        f"{what} {condition!r} was true at none of {rows:,} steps, although episodes end{largest}. If it cannot be "
        "true in this environment, give another: lightning_replay.events.suggest_events(replay) proposes thresholds",
        stacklevel=3,
    )
    return True


def _columns(steps: TensorDictBase) -> str:
    return ", ".join(repr(key) for key in steps.keys(include_nested=True, leaves_only=True))
