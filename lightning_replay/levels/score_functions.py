# SPDX-License-Identifier: Apache-2.0
"""Scores of an episode as pure functions of tensors: the mean of one number per step.

Table 1 of Jiang et al. 2021, "Prioritized Level Replay", https://arxiv.org/abs/2010.03934; positive value loss and
MaxMC from Jiang et al. 2021, "Replay-Guided Adversarial Environment Design", https://arxiv.org/abs/2110.02439.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_replay.levels.value_columns import ValueColumns, mean, numbers

__all__ = [
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


def td_errors(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, *, discount: float
) -> Tensor:
    """δ_t = r_t + γ V(s_{t+1}) - V(s_t), float64 ``[T]``; the value after a termination is 0, after a truncation not.

    Args:
        reward: of each step, ``[T]`` or ``[T, 1]``, as all others.
        state_value: V of the observation acted on.
        next_state_value: V of the observation that followed: of an episode's last step its own last observation's.
        terminated: whether the step ended the episode for good.
        discount: γ.

    Raises:
        ValueError: no step, or tensors of different lengths.
    """
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated)
    return torch.tensor(columns.td_errors(discount), dtype=torch.float64)


def generalized_advantages(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k} up to the episode's last step, float64 ``[T]`` (Schulman et al. 2016).

    Args:
        reward: see :func:`td_errors`, as the next three.
        state_value: see there.
        next_state_value: see there.
        terminated: see there.
        done: whether the step ended the episode in any way; nothing is summed across it.
        discount: γ.
        gae_lambda: λ.
    """
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated, done)
    return torch.tensor(columns.advantages(discount, gae_lambda), dtype=torch.float64)


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
    """Mean of |A_t|, the magnitude of the generalised advantage: the paper's score; arguments as there.

    See :func:`generalized_advantages`.

    Example:
        >>> one = torch.tensor([1.0])
        >>> float(l1_value_loss(one, 0.25 * one, 9 * one, one.bool(), one.bool()))
        0.75
    """
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated, done)
    return _scalar(mean(map(abs, columns.advantages(discount, gae_lambda))))


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
    """Mean of max(A_t, 0); see :func:`generalized_advantages`."""
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated, done)
    return _scalar(mean(max(advantage, 0.0) for advantage in columns.advantages(discount, gae_lambda)))


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
    """Mean of A_t with its sign; see :func:`generalized_advantages`."""
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated, done)
    return _scalar(mean(columns.advantages(discount, gae_lambda)))


def one_step_td_error(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, *, discount: float = 0.999
) -> Tensor:
    """Mean of |δ_t|, the last step included; see :func:`td_errors`."""
    columns = ValueColumns.of(reward, state_value, next_state_value, terminated)
    return _scalar(mean(map(abs, columns.td_errors(discount))))


def policy_entropy(logits: Tensor) -> Tensor:
    """Mean entropy of the policy over ln(number of actions): 1 for a uniform one; ``logits`` is ``[T, A]``."""
    entropy = torch.special.entr(_log_probabilities(logits).exp()).sum(-1)  # 0 where an action has no chance
    return (entropy / math.log(logits.shape[-1])).mean()


def min_margin(logits: Tensor) -> Tensor:
    """Mean of 1 - (p_first - p_second) of the two likeliest actions; ``logits`` is ``[T, A]``."""
    first, second = _log_probabilities(logits).exp().topk(2, dim=-1).values.unbind(-1)
    return (1.0 - (first - second)).mean()


def least_confidence(logits: Tensor) -> Tensor:
    """Mean of 1 - p of the likeliest action; ``logits`` is ``[T, A]``."""
    return (1.0 - _log_probabilities(logits).exp().amax(-1)).mean()


def max_mc(state_value: Tensor, best_return: Tensor | float) -> Tensor:
    """Mean of R_best - V(s_t), R_best the largest return of any episode on the level; ``state_value`` is ``[T]``."""
    values = torch.tensor(numbers(state_value), dtype=torch.float64)
    return (torch.as_tensor(best_return).to("cpu", torch.float64).reshape(-1) - values).mean()


def _scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _log_probabilities(logits: Tensor) -> Tensor:
    if logits.ndim != 2 or logits.shape[0] == 0 or logits.shape[1] < 2:
        raise ValueError(f"logits have shape {list(logits.shape)}; give [T, A], at least one step and two actions")
    return torch.log_softmax(logits.detach().to("cpu", torch.float64), dim=-1)
