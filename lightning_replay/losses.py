# SPDX-License-Identifier: Apache-2.0
"""Losses of augmented observations."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div


def invariance_loss(log_probs: Tensor, value: Tensor, augmented_log_probs: Tensor, augmented_value: Tensor) -> Tensor:
    """Returns ``KL(π(s), π(f(s))) + (V(s) - V(f(s)))²`` of augmented observations f(s), the mean over ``[B]``.

    Log-probabilities of all actions are ``[B, A]``, values ``[B, 1]``. The values of s get no gradients. DrAC, Raileanu
    et al. 2021, section 3.1, https://arxiv.org/abs/2006.12862.
    """
    divergence = kl_div(augmented_log_probs, log_probs.detach(), reduction="batchmean", log_target=True)
    return divergence + (value.detach() - augmented_value).square().mean()
