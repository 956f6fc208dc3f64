# SPDX-License-Identifier: Apache-2.0
"""How much a policy could still learn from a level: scores of one episode, for segments and as pure functions.

The classes take a segment of an episode in TorchRL's layout, a TensorDict ``[T]``, and are what
:class:`~lightning_replay.levels.LevelBuffer` is given; any function from a segment to a number may take their place.
The pure functions, of tensors, are those of :mod:`~lightning_replay.levels.score_functions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.levels.key_names import key_names
from lightning_replay.levels.score_functions import (
    gae,
    generalized_advantages,
    l1_value_loss,
    least_confidence,
    max_mc,
    min_margin,
    one_step_td_error,
    policy_entropy,
    positive_value_loss,
    td_errors,
)
from lightning_replay.levels.value_columns import ValueColumns, mean
from lightning_replay.validation import checked_share

__all__ = [
    "L1ValueLoss",
    "LeastConfidence",
    "MaxMC",
    "MinMargin",
    "OneStepTdError",
    "PolicyEntropy",
    "PositiveValueLoss",
    "Score",
    "SignedGae",
    "ValueScore",
    "gae",
    "generalized_advantages",
    "l1_value_loss",
    "least_confidence",
    "max_mc",
    "min_margin",
    "one_step_td_error",
    "policy_entropy",
    "positive_value_loss",
    "td_errors",
]

# what it returns is a tensor or a float; jsonargparse takes a union in this place for a class that is to be built
Score = Callable[[TensorDictBase], Any]


class ValueScore(ABC):
    """A score of rewards and values: what a subclass makes of their lists.

    Args:
        discount: γ of the learner.

    Raises:
        TypeError: a discount that is no number.
        ValueError: one outside [0, 1]; when called, columns that are not one number per step.

    Example:
        >>> class LargestReward(ValueScore):
        ...     def of_columns(self, columns):
        ...         return max(columns.reward)
    """

    def __init__(self, discount: float = 0.999) -> None:
        checked_share("discount", discount)
        self.discount = discount

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return torch.tensor(self.of_columns(_value_columns(steps)), dtype=torch.float64)

    @abstractmethod
    def of_columns(self, columns: ValueColumns) -> float:
        """The same of lists, as the level buffer has read them already."""


class _AdvantageScore(ValueScore):
    """A score of generalised advantages.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def __init__(self, discount: float = 0.999, gae_lambda: float = 0.95) -> None:
        super().__init__(discount)
        checked_share("gae_lambda", gae_lambda)
        self.gae_lambda = gae_lambda


class L1ValueLoss(_AdvantageScore):
    """:func:`l1_value_loss` of a segment, the default of level replay.

    Needs ``state_value`` and ``("next", "reward" | "state_value" | "terminated" | "done")``, and the learner's γ and λ.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def of_columns(self, columns: ValueColumns) -> float:
        """Mean of |A_t|."""
        return mean(map(abs, columns.advantages(self.discount, self.gae_lambda)))


class PositiveValueLoss(_AdvantageScore):
    """:func:`positive_value_loss` of a segment; keys as for :class:`L1ValueLoss`.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def of_columns(self, columns: ValueColumns) -> float:
        """Mean of max(A_t, 0)."""
        return mean(max(advantage, 0.0) for advantage in columns.advantages(self.discount, self.gae_lambda))


class SignedGae(_AdvantageScore):
    """:func:`gae` of a segment, which may be negative; keys as for :class:`L1ValueLoss`.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def of_columns(self, columns: ValueColumns) -> float:
        """Mean of A_t."""
        return mean(columns.advantages(self.discount, self.gae_lambda))


class OneStepTdError(ValueScore):
    """:func:`one_step_td_error` of a segment; keys as for :class:`L1ValueLoss`.

    Args:
        discount: γ of the learner.
    """

    def of_columns(self, columns: ValueColumns) -> float:
        """Mean of |δ_t|."""
        return mean(map(abs, columns.td_errors(self.discount)))


class PolicyEntropy:
    """:func:`policy_entropy` of a segment's ``logits``, ``[T, A]``."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return policy_entropy(_leaf(steps, "logits"))


class MinMargin:
    """:func:`min_margin` of a segment's ``logits``, ``[T, A]``."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return min_margin(_leaf(steps, "logits"))


class LeastConfidence:
    """:func:`least_confidence` of a segment's ``logits``, ``[T, A]``."""

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return least_confidence(_leaf(steps, "logits"))


class MaxMC:
    """:func:`max_mc` of a segment.

    The level buffer adds the key ``best_return``, ``[T]``: the largest undiscounted return of an episode on this level,
    this one included once it is done. Before any was finished, the return so far.
    """

    needs_best_return = True

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return max_mc(_leaf(steps, "state_value"), _leaf(steps, "best_return"))


def _value_columns(steps: TensorDictBase) -> ValueColumns:
    return ValueColumns.of(
        reward=_leaf(steps, ("next", "reward")),
        state_value=_leaf(steps, "state_value"),
        next_state_value=_leaf(steps, ("next", "state_value")),
        terminated=_leaf(steps, ("next", "terminated")),
        done=_leaf(steps, ("next", "done")),
    )


def _leaf(steps: TensorDictBase, key: str | tuple[str, str]) -> Tensor:
    leaf = steps.get(key, None)
    if leaf is None:
        raise KeyError(f"the score needs {key!r}, which the segment lacks; it has {key_names(steps)}")
    return leaf
