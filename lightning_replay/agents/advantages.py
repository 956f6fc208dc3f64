# SPDX-License-Identifier: Apache-2.0
"""Generalized advantage estimation over rollouts."""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantages(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """Returns ``A = δ + γ λ (1 - done) A'`` with ``δ = r + γ (1 - terminated) V' - V``, all ``[N, T, 1]``.

    Schulman et al. 2016, https://arxiv.org/abs/1506.02438.
    """
    differences = (reward + discount * terminated.logical_not() * next_value - value).unbind(1)
    decays = (discount * gae_lambda * done.logical_not()).unbind(1)
    advantages = [differences[-1]]
    for difference, decay in zip(differences[-2::-1], decays[-2::-1], strict=True):
        advantages.append(torch.addcmul(difference, decay, advantages[-1]))
    return torch.stack(advantages[::-1], dim=1)
