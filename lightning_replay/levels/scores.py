# SPDX-License-Identifier: Apache-2.0
"""Scores of levels, means over the steps of an episode: how much a policy could still learn from a level.

Classes take a segment, a TensorDict ``[T]`` in TorchRL's layout; :class:`~lightning_replay.levels.LevelBuffer` takes
them, or any function from a segment to a number. Functions compute the same scores from tensors. Table 1 of Jiang et
al. 2021, "Prioritized Level Replay", https://arxiv.org/abs/2010.03934; positive value loss and MaxMC from Jiang et al.
2021, "Replay-Guided Adversarial Environment Design", https://arxiv.org/abs/2110.02439.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.levels.segment import ValueColumns, generalized_advantages, key_names, numbers, td_errors
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
    "SegmentScore",
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

# Any for a tensor or a float: jsonargparse takes a union in this place for a class to be built
Score = Callable[[TensorDictBase], Any]


class SegmentScore(ABC):
    """Base class of the scores of a segment.

    Attributes:
        needs_best_return: whether the level buffer adds the key ``best_return``, see :class:`MaxMC`.
    """

    needs_best_return: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Computes the score of a segment ``[T]``."""


class ValueScore(SegmentScore):
    """Base class of the scores of rewards and values; a subclass computes its score from their lists.

    Needs ``state_value`` and ``("next", "reward" | "state_value" | "terminated" | "done")``.

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
        """Computes the score of a segment ``[T]``."""
        keys = (("next", "reward"), "state_value", ("next", "state_value"), ("next", "terminated"), ("next", "done"))
        return self._of_tensors(*(_leaf(steps, key) for key in keys))

    def _of_tensors(self, *tensors: Tensor) -> Tensor:
        return torch.tensor(self.of_columns(ValueColumns.of(*tensors)), dtype=torch.float64)

    @abstractmethod
    def of_columns(self, columns: ValueColumns) -> float:
        """Computes the score from lists, which the level buffer has read already."""


class OneStepTdError(ValueScore):
    """Mean of |δ_t|, the last step included; see :func:`td_errors`."""

    def of_columns(self, columns: ValueColumns) -> float:
        """Computes the score from lists."""
        return _mean(map(abs, columns.td_errors(self.discount)))


class _AdvantageScore(ValueScore):
    """Mean of a term of each generalised advantage.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def __init__(self, discount: float = 0.999, gae_lambda: float = 0.95) -> None:
        super().__init__(discount)
        checked_share("gae_lambda", gae_lambda)
        self.gae_lambda = gae_lambda

    def of_columns(self, columns: ValueColumns) -> float:
        """Computes the score from lists."""
        return _mean(map(self._term, columns.advantages(self.discount, self.gae_lambda)))

    @abstractmethod
    def _term(self, advantage: float) -> float: ...


class L1ValueLoss(_AdvantageScore):
    """Mean of |A_t|, the default of level replay. Give it the learner's γ and λ."""

    def _term(self, advantage: float) -> float:
        return abs(advantage)


class PositiveValueLoss(_AdvantageScore):
    """Mean of max(A_t, 0)."""

    def _term(self, advantage: float) -> float:
        return max(advantage, 0.0)


class SignedGae(_AdvantageScore):
    """Mean of A_t, which may be negative."""

    def _term(self, advantage: float) -> float:
        return advantage


def policy_entropy(logits: Tensor) -> Tensor:
    """Mean entropy of the policy over ln(number of actions): 1 for a uniform one; ``logits`` is ``[T, A]``."""
    entropy = torch.special.entr(_probabilities(logits)).sum(-1)  # 0 where an action has no chance
    return (entropy / math.log(logits.shape[-1])).mean()


def min_margin(logits: Tensor) -> Tensor:
    """Mean of 1 - (p_first - p_second) of the two likeliest actions; ``logits`` is ``[T, A]``."""
    first, second = _probabilities(logits).topk(2, dim=-1).values.unbind(-1)
    return (1.0 - (first - second)).mean()


def least_confidence(logits: Tensor) -> Tensor:
    """Mean of 1 - p of the likeliest action; ``logits`` is ``[T, A]``."""
    return (1.0 - _probabilities(logits).amax(-1)).mean()


class _PolicyScore(SegmentScore):
    """Score of a segment's ``logits``, ``[T, A]``."""

    _of_logits: Callable[[Tensor], Tensor]

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Computes the score of a segment ``[T]``."""
        return type(self)._of_logits(_leaf(steps, "logits"))


class PolicyEntropy(_PolicyScore):
    """:func:`policy_entropy` of a segment's ``logits``, ``[T, A]``."""

    _of_logits = staticmethod(policy_entropy)


class MinMargin(_PolicyScore):
    """:func:`min_margin` of a segment's ``logits``, ``[T, A]``."""

    _of_logits = staticmethod(min_margin)


class LeastConfidence(_PolicyScore):
    """:func:`least_confidence` of a segment's ``logits``, ``[T, A]``."""

    _of_logits = staticmethod(least_confidence)


class MaxMC(SegmentScore):
    """Mean of R_best - V(s_t), R_best the largest undiscounted return of an episode on the level.

    The level buffer adds the key ``best_return``, ``[T]``: of finished episodes and of this one, once it is done;
    before any has finished, the return so far.
    """

    needs_best_return = True

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Computes the score of a segment ``[T]``."""
        return max_mc(_leaf(steps, "state_value"), _leaf(steps, "best_return"))


def l1_value_loss(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    discount: float = 0.999,
    gae_lambda: float = 0.95,
) -> Tensor:
    """:class:`L1ValueLoss` of tensors; arguments as :func:`generalized_advantages`.

    Example:
        >>> one = torch.tensor([1.0])
        >>> float(l1_value_loss(one, 0.25 * one, 9 * one, one.bool(), one.bool()))
        0.75
    """
    score = L1ValueLoss(discount, gae_lambda)
    return score._of_tensors(reward, state_value, next_state_value, terminated, done)


def positive_value_loss(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    discount: float = 0.999,
    gae_lambda: float = 0.95,
) -> Tensor:
    """:class:`PositiveValueLoss` of tensors; arguments as :func:`generalized_advantages`."""
    score = PositiveValueLoss(discount, gae_lambda)
    return score._of_tensors(reward, state_value, next_state_value, terminated, done)


def gae(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    discount: float = 0.999,
    gae_lambda: float = 0.95,
) -> Tensor:
    """:class:`SignedGae` of tensors; arguments as :func:`generalized_advantages`."""
    score = SignedGae(discount, gae_lambda)
    return score._of_tensors(reward, state_value, next_state_value, terminated, done)


def one_step_td_error(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, *, discount: float = 0.999
) -> Tensor:
    """:class:`OneStepTdError` of tensors; arguments as :func:`td_errors`."""
    return OneStepTdError(discount)._of_tensors(reward, state_value, next_state_value, terminated)


def max_mc(state_value: Tensor, best_return: Tensor | float) -> Tensor:
    """Mean of R_best - V(s_t), R_best the largest return of any episode on the level; ``state_value`` is ``[T]``."""
    values = torch.tensor(numbers(state_value), dtype=torch.float64)
    return (torch.as_tensor(best_return).to("cpu", torch.float64).reshape(-1) - values).mean()


def _probabilities(logits: Tensor) -> Tensor:
    if logits.ndim != 2 or logits.shape[0] == 0 or logits.shape[1] < 2:
        raise ValueError(f"logits have shape {list(logits.shape)}; give [T, A], at least one step and two actions")
    return torch.log_softmax(logits.detach().to("cpu", torch.float64), dim=-1).exp()


def _mean(terms: Iterable[float]) -> float:
    values = list(terms)
    return math.fsum(values) / len(values)  # fsum rounds once


def _leaf(steps: TensorDictBase, key: str | tuple[str, str]) -> Tensor:
    leaf = steps.get(key, None)
    if leaf is None:
        raise KeyError(f"the score needs {key!r}, which the segment lacks; it has {key_names(steps)}")
    return leaf
