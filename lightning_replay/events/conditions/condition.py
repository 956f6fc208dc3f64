# SPDX-License-Identifier: Apache-2.0
"""What a condition is, and what asking one and reading columns for it must guard against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor


class ConditionError(ValueError):
    """A condition raised, or returned what is not one truth value for each step."""


class Condition(ABC):
    """A predicate over steps. A plain function of the same signature does as well, where nothing needs saving.

    A step is a row of a TensorDict ``[N]``; its event is what is true of its *next* state, so conditions read
    ``("next", ...)`` and are never asked about the state after a reset. Stratified Sampling from Event Tables,
    definition 5.
    """

    @abstractmethod
    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Whether the event happened at each step: bool ``[N]``."""

    def fresh(self) -> Condition:
        """One that decides alike and remembers nothing; itself where there is nothing to remember."""
        return self

    def end_episodes(self, trajectories: Sequence[int | None]) -> None:  # noqa: B027, most have nothing to end
        """Told that these running episodes were given up without a done step. Ignored where nothing is remembered."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; empty where nothing is remembered."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027, most have nothing to restore
        """Restores what :meth:`state_dict` returned."""


# The class first: a command line then takes a condition by class path, and a function by import path.
ConditionLike = Condition | Callable[[TensorDictBase], Tensor]


def holds(condition: ConditionLike, steps: TensorDictBase) -> Tensor:
    """Asks a condition and checks its answer.

    Args:
        condition: any condition; it may answer with ``[N]`` or ``[N, 1]``.
        steps: ``[N]``.

    Returns:
        bool ``[N]``.

    Raises:
        ConditionError: the condition raised, wrote into the steps, or answered with another shape or dtype.

    Example:
        >>> from tensordict import TensorDict
        >>> steps = TensorDict({"next": {"reward": torch.tensor([[0.0], [1.0]])}}, [2])
        >>> holds(lambda steps: steps["next", "reward"] > 0, steps)
        tensor([False,  True])
    """
    try:
        answer = condition(steps) if isinstance(condition, Condition) else _ask_function(condition, steps)
    except ConditionError:
        raise
    except Exception as error:
        raise ConditionError(
            f"the condition {condition!r} raised {type(error).__name__}: {error}. It was given {len(steps)} steps with "
            f"{_columns(steps)}"
        ) from error
    if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
        given = f"a {answer.dtype} tensor" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
        raise ConditionError(
            f"the condition {condition!r} returned {given}; return a bool tensor, one value for each step"
        )
    if answer.ndim == 1 and len(answer) == len(steps):
        return answer
    if answer.shape != (len(steps), 1):
        raise ConditionError(
            f"the condition {condition!r} returned the shape {list(answer.shape)} for {len(steps)} steps; "
            f"return [{len(steps)}], one value for each step"
        )
    return answer.reshape(-1)


def _ask_function(function: Callable[[TensorDictBase], Tensor], steps: TensorDictBase) -> Tensor:
    """Asks a user's function, which may only read: what it would write into the steps would be stored."""
    columns = [column for column in steps.values(True, True) if not column.is_inference()]  # those have no version
    before = [column._version for column in columns]
    answer = function(steps.clone(recurse=False).lock_())
    if before != [column._version for column in columns]:
        raise ConditionError(
            f"the condition {function!r} changed a column of the steps in place; compute a new one, as add() for add_()"
        )
    return answer


def column(steps: TensorDictBase, key: NestedKey) -> Tensor:
    """Reads a column.

    Raises:
        ConditionError: the steps have no such column; the message names those they have.
    """
    value = steps.get(key, None)
    if not isinstance(value, Tensor):
        raise ConditionError(f"the steps have no column {key!r}; stored are {_columns(steps)}")
    return value


def one_number(steps: TensorDictBase, key: NestedKey) -> Tensor:
    """Reads a column that has one number for each step, as ``[N]``.

    Raises:
        ConditionError: there is no such column, or it has several numbers for each step.
    """
    value = column(steps, key)
    if value.numel() != len(steps):
        raise ConditionError(
            f"the column {key!r} has the shape {list(value.shape)}; this condition needs one number for each step. "
            "For one component of several use key_in_region with None for the others"
        )
    return value.reshape(-1)


def own(condition: ConditionLike, name: str = "condition") -> ConditionLike:
    """The condition, with a memory of its own where it has one: it must see every step exactly once.

    Args:
        condition: any condition.
        name: of the option, for the error.

    Raises:
        TypeError: it cannot be called, or is the class of a condition.
    """
    given: Any = condition
    if not callable(given) or (isinstance(given, type) and issubclass(given, Condition)):
        raise TypeError(
            f"{name} is {condition!r}; it must be a condition such as reward_at_least(1.0), or a function of steps "
            "TensorDict[N] that returns bool [N]"
        )
    return condition.fresh() if isinstance(condition, Condition) else condition


def state_of(condition: ConditionLike) -> dict[str, Any]:
    """Returns what a condition remembers; nothing where it is a plain function."""
    return condition.state_dict() if isinstance(condition, Condition) else {}


def load_state_of(condition: ConditionLike, state: dict[str, Any]) -> None:
    """Restores what :func:`state_of` returned."""
    if isinstance(condition, Condition):
        condition.load_state_dict(state)


def _columns(steps: TensorDictBase) -> str:
    return ", ".join(repr(key) for key in steps.keys(include_nested=True, leaves_only=True))
