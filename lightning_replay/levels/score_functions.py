# SPDX-License-Identifier: Apache-2.0
"""Scores of an episode as pure functions of tensors: the mean of one number per step.

Table 1 of Jiang et al. 2021, "Prioritized Level Replay", https://arxiv.org/abs/2010.03934; positive value loss and
MaxMC from Jiang et al. 2021, "Replay-Guided Adversarial Environment Design", https://arxiv.org/abs/2110.02439.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
    return torch.tensor(_td_errors(reward, state_value, next_state_value, terminated, discount), dtype=torch.float64)


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
    advantages = _advantages(reward, state_value, next_state_value, terminated, done, discount, gae_lambda)
    return torch.tensor(advantages, dtype=torch.float64)


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
    advantages = _advantages(reward, state_value, next_state_value, terminated, done, discount, gae_lambda)
    return _mean([abs(advantage) for advantage in advantages])


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
    advantages = _advantages(reward, state_value, next_state_value, terminated, done, discount, gae_lambda)
    return _mean([max(advantage, 0.0) for advantage in advantages])


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
    return _mean(_advantages(reward, state_value, next_state_value, terminated, done, discount, gae_lambda))


def one_step_td_error(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, *, discount: float = 0.999
) -> Tensor:
    """Mean of |δ_t|, the last step included; see :func:`td_errors`."""
    return _mean([abs(delta) for delta in _td_errors(reward, state_value, next_state_value, terminated, discount)])


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
    values = torch.tensor(_numbers(state_value), dtype=torch.float64)
    return (torch.as_tensor(best_return).to("cpu", torch.float64).reshape(-1) - values).mean()


# Lists and not tensors: a segment has tens or hundreds of steps, and one operation of torch on them costs as much as
# twenty of Python's.


def _td_errors(
    reward: Tensor, state_value: Tensor, next_state_value: Tensor, terminated: Tensor, discount: float
) -> list[float]:
    rewards, values, following, ends = map(_numbers, (reward, state_value, next_state_value, terminated))
    if not len(rewards) == len(values) == len(following) == len(ends):
        raise ValueError(
            f"reward has {len(rewards)} steps, state_value {len(values)}, next_state_value {len(following)} and "
            f"terminated {len(ends)}; give one value per step"
        )
    return [
        r + (0.0 if end else discount * after) - v
        for r, v, after, end in zip(rewards, values, following, ends, strict=True)
    ]


def _advantages(
    reward: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    discount: float,
    gae_lambda: float,
) -> list[float]:
    deltas, ends = _td_errors(reward, state_value, next_state_value, terminated, discount), _numbers(done)
    if len(ends) != len(deltas):
        raise ValueError(f"done has {len(ends)} steps and reward {len(deltas)}; give one value per step")
    decay, following = discount * gae_lambda, 0.0
    advantages = [0.0] * len(deltas)
    for t in range(len(deltas) - 1, -1, -1):
        following = deltas[t] if ends[t] else deltas[t] + decay * following
        advantages[t] = following
    return advantages


def _numbers(column: Tensor) -> list[float]:
    if column.ndim > 1 and column.shape[1:].numel() != 1:
        raise ValueError(f"a column of a segment has shape {list(column.shape)}; give [T] or [T, 1] of one episode")
    numbers: list[float] = column.reshape(-1).tolist()
    if not numbers:
        raise ValueError("a segment has no step; give at least one")
    return numbers


def _mean(terms: list[float]) -> Tensor:
    return torch.tensor(math.fsum(terms) / len(terms), dtype=torch.float64)


def _log_probabilities(logits: Tensor) -> Tensor:
    if logits.ndim != 2 or logits.shape[0] == 0 or logits.shape[1] < 2:
        raise ValueError(f"logits have shape {list(logits.shape)}; give [T, A], at least one step and two actions")
    return torch.log_softmax(logits.detach().to("cpu", torch.float64), dim=-1)
