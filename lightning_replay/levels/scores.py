# SPDX-License-Identifier: Apache-2.0
"""How much a policy could still learn from a level: scores of one episode, as pure functions and for segments.

A score is the mean of one number per step. The functions take tensors; the classes take a segment of an episode in
TorchRL's layout, a TensorDict ``[T]``, and are what :class:`~lightning_replay.levels.LevelBuffer` is given. Any
function from a segment to a number may take their place.

Table 1 of Jiang et al. 2021, "Prioritized Level Replay", https://arxiv.org/abs/2010.03934; positive value loss and
MaxMC from Jiang et al. 2021, "Replay-Guided Adversarial Environment Design", https://arxiv.org/abs/2110.02439.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

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
    log_probabilities = _log_probabilities(logits)
    entropy = -(log_probabilities.exp() * log_probabilities).nan_to_num(0.0).sum(-1)
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
    return (torch.as_tensor(best_return, dtype=torch.float64).reshape(-1) - values).mean()


class _ValueScore:
    """A score of rewards and values.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def __init__(self, discount: float = 0.999, gae_lambda: float = 0.95) -> None:
        _check_share("discount", discount)
        _check_share("gae_lambda", gae_lambda)
        self.discount = discount
        self.gae_lambda = gae_lambda

    def _inputs(self, steps: TensorDictBase) -> dict[str, Any]:
        values = _value_columns(steps)
        return values | {"done": values.pop("done"), "discount": self.discount, "gae_lambda": self.gae_lambda}


class L1ValueLoss(_ValueScore):
    """:func:`l1_value_loss` of a segment, the default of level replay.

    Needs ``state_value`` and ``("next", "reward" | "state_value" | "terminated" | "done")``, and the learner's γ and λ.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return l1_value_loss(**self._inputs(steps))


class PositiveValueLoss(_ValueScore):
    """:func:`positive_value_loss` of a segment; keys as for :class:`L1ValueLoss`.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return positive_value_loss(**self._inputs(steps))


class SignedGae(_ValueScore):
    """:func:`gae` of a segment, which may be negative; keys as for :class:`L1ValueLoss`.

    Args:
        discount: γ of the learner.
        gae_lambda: λ of the learner's advantage estimate.
    """

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        return gae(**self._inputs(steps))


class OneStepTdError:
    """:func:`one_step_td_error` of a segment; keys as for :class:`L1ValueLoss`.

    Args:
        discount: γ of the learner.
    """

    def __init__(self, discount: float = 0.999) -> None:
        _check_share("discount", discount)
        self.discount = discount

    def __call__(self, steps: TensorDictBase) -> Tensor:
        """Score of a segment ``[T]``."""
        values = _value_columns(steps)
        del values["done"]
        return one_step_td_error(**values, discount=self.discount)


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


def _value_columns(steps: TensorDictBase) -> dict[str, Tensor]:
    following = steps.get("next", None)
    if following is None:
        raise KeyError(f"a segment has no 'next'; it has {sorted(steps.keys())}. Give TorchRL's layout")
    return {
        "reward": _leaf(following, "reward"),
        "state_value": _leaf(steps, "state_value"),
        "next_state_value": _leaf(following, "state_value"),
        "terminated": _leaf(following, "terminated"),
        "done": _leaf(following, "done"),
    }


def _leaf(steps: TensorDictBase, key: str) -> Tensor:
    leaf = steps.get(key, None)
    if leaf is None:
        raise KeyError(f"the score needs {key!r}, which the segment lacks; it has {sorted(map(str, steps.keys(True)))}")
    return leaf


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}; it must be in [0, 1]")
