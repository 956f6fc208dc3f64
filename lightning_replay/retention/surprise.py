# SPDX-License-Identifier: Apache-2.0
"""Pure functions for surprise and on-policyness of transitions, the two factors of their retention priority."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def squared_td_error(td_error: Tensor) -> Tensor:
    """``td_error ** 2``, the surprise of agents that predict a number.

    Args:
        td_error: Signed TD errors of any shape.

    Example:
        >>> squared_td_error(torch.tensor([-2.0, 0.5]))
        tensor([4.0000, 0.2500])
    """
    return td_error.square()


def kl_divergence(target: Tensor, log_probability: Tensor) -> Tensor:
    """``sum(target * (log(target) - log_probability))``, the surprise of agents that predict a distribution.

    The result KL(target || prediction), ``[...]``, is not negative and never clipped. It is 0 if both agree.

    Args:
        target: Probabilities ``[..., atoms]``. An atom of probability 0 adds nothing.
        log_probability: Logarithms of the predicted probabilities, ``[..., atoms]``.

    Example:
        >>> kl_divergence(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]]).log())
        tensor([0.3466])
    """
    return (torch.xlogy(target, target) - _expected(target, log_probability)).sum(-1).clamp_min(0.0)


def cross_entropy(target: Tensor, log_probability: Tensor) -> Tensor:
    """``-sum(target * log_probability)``: the loss of C51, and :func:`kl_divergence` plus the target's entropy.

    It ranks transitions differently: a wide target counts as surprising even if it was expected. Shapes are the shapes
    of :func:`kl_divergence`.

    Example:
        >>> cross_entropy(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]]).log())
        tensor([1.0397])
    """
    return -_expected(target, log_probability).sum(-1)


def categorical_projection(probabilities: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """Projects the distribution ``[B, N]`` of ``reward + discount * z``, ``[B]`` each, onto the atoms z, ``[N]``.

    Each moved atom is clamped to the evenly spaced support. Its probability is divided between the two atoms around it,
    and the nearer atom gets more (Bellemare et al. 2017, algorithm 1, https://arxiv.org/abs/1707.06887).
    """
    if not (reward.shape == discount.shape == probabilities.shape[:1] and support.shape == probabilities.shape[1:]):
        raise ValueError(
            f"probabilities must be [B, N], reward and discount [B], support [N]; got {list(probabilities.shape)}, "
            f"{list(reward.shape)}, {list(discount.shape)} and {list(support.shape)}"
        )
    low = support[0]
    high = support[-1]
    moved = reward.unsqueeze(1) + discount.unsqueeze(1) * support
    place = (moved.clamp(low, high) - low) * ((len(support) - 1) / (high - low))
    # A scatter would add in another order each time on a GPU. The product gives the same bits.
    share = (1 - (place.unsqueeze(2) - torch.arange(len(support), device=place.device)).abs()).clamp_(min=0)
    return torch.bmm(probabilities.unsqueeze(1), share).squeeze(1)


def distributional_surprise(
    log_probability: Tensor,
    next_probability: Tensor,
    reward: Tensor,
    discount: Tensor,
    support: Tensor,
    *,
    measure: Callable[[Tensor, Tensor], Tensor] = kl_divergence,
) -> Tensor:
    """``measure(target, log_probability)`` with the target ``categorical_projection(next_probability, ...)``.

    Use it for agents that predict the distribution of the return (C51, Rainbow).

    Args:
        log_probability: Logarithms of the predicted probabilities of the action taken, ``[B, N]``.
        next_probability: Probabilities that the target network gives the best next action, ``[B, N]``.
        reward, discount, support: Arguments of :func:`categorical_projection`. Over n steps, they are the sum and the
            power of γ.
        measure: :func:`kl_divergence`, as in the paper, or :func:`cross_entropy`.

    Returns:
        The surprise ``[B]``, not negative.

    Raises:
        ValueError: Shapes that do not fit.

    Example:
        >>> support, certain = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([[0.0, 1.0, 0.0]])
        >>> prediction = torch.tensor([[0.25, 0.25, 0.5]]).log()
        >>> distributional_surprise(prediction, certain, torch.tensor([1.0]), torch.tensor([0.9]), support)
        tensor([0.6931])
    """
    target = categorical_projection(next_probability, reward, discount, support)
    if log_probability.shape != target.shape:
        raise ValueError(
            f"log_probability has shape {list(log_probability.shape)} and next_probability {list(target.shape)}; both "
            "must be [B, N], of one action for each row"
        )
    return measure(target, log_probability)


def surprise(
    td_error: Tensor | None = None,
    *,
    target: Tensor | None = None,
    log_probability: Tensor | None = None,
    measure: Callable[[Tensor, Tensor], Tensor] = kl_divergence,
) -> Tensor:
    """Returns δ of the retention priority: ``td_error ** 2``, or ``measure(target, log_probability)``, both ``[B]``.

    Args:
        td_error: Signed TD errors ``[B]`` of agents that predict a number.
        target, log_probability: Distributions ``[B, atoms]`` of agents that predict a distribution.
        measure: :func:`kl_divergence`, as in the paper, or :func:`cross_entropy`.

    Raises:
        ValueError: Neither TD errors nor both distributions were given, or both kinds.

    Example:
        >>> surprise(torch.tensor([-2.0]))
        tensor([4.])
    """
    if td_error is not None and target is None and log_probability is None:
        return squared_td_error(td_error)
    if td_error is None and target is not None and log_probability is not None:
        return measure(target, log_probability)
    raise ValueError("surprise is of one kind of prediction; give td_error alone, or target and log_probability")


def on_policyness(action_values: Tensor, action: Tensor, *, q_inverse_temperature: float = 1.0) -> Tensor:
    """``softmax(q_inverse_temperature * action_values)[action]``: how likely the present policy repeats an action.

    Args:
        action_values: Values Q ``[B, A]``, ``-inf`` for illegal actions. Agents that predict distributions give means.
        action: Actions, int64 ``[B]`` or ``[B, 1]``, or one-hot ``[B, A]``.
        q_inverse_temperature: Inverse temperature β of the paper, which multiplies Q. With 0, all actions are equal.

    Returns:
        The on-policyness ``[B]``, in [0, 1].

    Raises:
        ValueError: Shapes that do not fit.
        IndexError: An action that does not exist.

    Example:
        >>> on_policyness(torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([1]))
        tensor([0.6285])
    """
    index = action_index(action_values, action)
    # Infinity times a temperature of 0 would be NaN, so that illegal actions keep their value.
    logits = torch.where(torch.isneginf(action_values), action_values, action_values * q_inverse_temperature)
    return torch.softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def greedy_on_policyness(action_values: Tensor, action: Tensor, *, epsilon: float) -> Tensor:
    """Returns 1 for actions of the largest value, else ``epsilon``. It is slightly worse than softmax in the paper.

    Args:
        action_values, action: Arguments of :func:`on_policyness`.
        epsilon: On-policyness of actions that are not greedy, in [0, 1].

    Returns:
        The on-policyness ``[B]``, NaN for rows with a value of NaN. All actions with the largest value are greedy.

    Example:
        >>> greedy_on_policyness(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([1, 0]), epsilon=0.1)
        tensor([1.0000, 0.1000])
    """
    taken = action_values.gather(-1, action_index(action_values, action).unsqueeze(-1)).squeeze(-1)
    largest = action_values.amax(-1)
    weight = torch.where(taken == largest, 1.0, epsilon).to(action_values.dtype)
    return torch.where(largest.isnan(), largest, weight)


def retention_priority(surprise: Tensor, on_policyness: Tensor, *, surprise_exponent: float = 1.0) -> Tensor:
    """``on_policyness * surprise ** surprise_exponent``: the lowest row leaves when the buffer is full.

    The exponent is 1 in the paper. In long runs with large buffers, surprise keeps outliers (Battle Zone and Q*bert in
    the paper). An exponent that falls toward 0 leaves the choice to on-policyness.

    Args:
        surprise: Surprise ``[B]``, not negative.
        on_policyness: On-policyness ``[B]``, in [0, 1], and 1 for new transitions.
        surprise_exponent: Exponent. 1 leaves surprise unchanged, 0 ignores it. A power that is too large for the dtype
            becomes its largest number.

    Example:
        >>> retention_priority(torch.tensor([0.8]), torch.tensor([0.5])).item()
        0.4000000059604645
    """
    if surprise_exponent != 1.0:  # Infinity times an on-policyness of 0 would be NaN.
        surprise = (surprise**surprise_exponent).clamp_max(torch.finfo(surprise.dtype).max)
    return on_policyness * surprise


def action_index(action_values: Tensor, action: Tensor) -> Tensor:
    """Returns actions as int64 ``[B]`` beside ``action_values`` ``[B, A]``. A one-hot action becomes its position."""
    if action_values.ndim != 2 or not action_values.is_floating_point():
        raise ValueError(
            f"action_values must be floating point [B, A], one value for each action; got {action_values.dtype} "
            f"{list(action_values.shape)}. Take the mean over atoms of a distribution first"
        )
    rows, count = action_values.shape
    if action.shape == action_values.shape and count > 1:
        return action.to(torch.int64).argmax(-1)
    if action.numel() != rows or action.is_floating_point() or action.dtype == torch.bool:
        raise ValueError(
            f"action must be whole numbers [{rows}] or one-hot [{rows}, {count}], beside action_values "
            f"[{rows}, {count}]; got {action.dtype} {list(action.shape)}"
        )
    index = action.reshape(rows).to(torch.int64)
    if rows and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise IndexError(f"actions are {int(index.min())}..{int(index.max())}; action_values are of 0..{count - 1}")
    return index


def _expected(target: Tensor, log_probability: Tensor) -> Tensor:
    """Returns ``target * log_probability``, or 0 if the target is 0, even for an infinite logarithm."""
    return torch.where(target > 0, target * log_probability, 0.0)
