# SPDX-License-Identifier: Apache-2.0
"""Losses whose gradients stand for draws by priority, and losses of augmented observations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from lightning_replay.options import ABOVE_ZERO, checked_number


def pal_loss(td_error: Tensor, priority_exponent: float = 0.4, min_priority: float = 1.0) -> Tensor:
    """Returns the prioritized approximation loss (PAL) of rows that were drawn uniformly, ``[B]``; take its mean.

    The expected gradient is that of the Huber loss with threshold m under draws by loss-adjusted priorities,
    ``max(|δ|, m) ** α``, see :class:`~lightning_replay.samplers.PrioritizedSampler`, without a replay that keeps any:
    ``m ** α * δ² / 2`` up to m and ``m * |δ| ** (1 + α) / (1 + α)`` above, over the mean of ``max(|δ|, m) ** α`` in the
    batch. Fujimoto et al. 2020, section 4.2 and appendix, https://arxiv.org/abs/2007.06049.

    Args:
        td_error: δ, ``[B]``, with its graph.
        priority_exponent: α.
        min_priority: m, above 0.

    Example:
        >>> pal_loss(torch.tensor([0.5, 1.0]), priority_exponent=1.0)
        tensor([0.1250, 0.5000])
    """
    exponent = checked_number("priority_exponent", priority_exponent, 0.0)
    least = checked_number("min_priority", min_priority, ABOVE_ZERO)
    size = td_error.abs()
    # Above the threshold alone, as the gradient of a root has no value at 0.
    steep = least * size.clamp(min=least) ** (1.0 + exponent) / (1.0 + exponent)
    rows = torch.where(size <= least, least**exponent * size.square() / 2.0, steep)
    return rows / (size.detach().clamp(min=least) ** exponent).mean()


def invariance_loss(log_probs: Tensor, value: Tensor, augmented_log_probs: Tensor, augmented_value: Tensor) -> Tensor:
    """Returns ``KL(π(s), π(f(s))) + (V(s) - V(f(s)))²`` of augmented observations f(s), the mean over ``[B]``.

    Log-probabilities of all actions are ``[B, A]``, values ``[B, 1]``; those of s get no gradients. DrAC, Raileanu et
    al. 2021, section 3.1, https://arxiv.org/abs/2006.12862.
    """
    divergence = kl_div(augmented_log_probs, log_probs.detach(), reduction="batchmean", log_target=True)
    return divergence + (value.detach() - augmented_value).square().mean()
