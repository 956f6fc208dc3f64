# SPDX-License-Identifier: Apache-2.0
"""The formulas of prioritized experience replay in float64; Schaul et al. 2016, https://arxiv.org/abs/1511.05952."""

from __future__ import annotations

from torch import Tensor, float64


def probabilities(priority: Tensor, priority_exponent: float, priority_offset: float = 0.0) -> Tensor:
    """Chance of each item, ``(priority + priority_offset) ** priority_exponent`` over the sum of these; eq. 1.

    Args:
        priority: ``[N]`` of everything stored, finite and not negative.
        priority_exponent: α.
        priority_offset: ε.

    Example:
        >>> import torch
        >>> probabilities(torch.tensor([1.0, 3.0]), priority_exponent=1.0)
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    powered = (priority.to(float64) + priority_offset) ** priority_exponent
    return powered / powered.sum()


def importance_weights(probability: Tensor, importance_exponent: float, stored: int) -> Tensor:
    """``(stored * probability) ** -importance_exponent``, not yet divided by the largest; section 3.4.

    Args:
        probability: ``[n]`` of any of the items.
        importance_exponent: β; with 1 the weighted mean over draws is the plain mean over what is stored.
        stored: items in the memory.

    Example:
        >>> import torch
        >>> importance_weights(torch.tensor([0.25, 0.75]), importance_exponent=1.0, stored=2)
        tensor([2.0000, 0.6667], dtype=torch.float64)
    """
    return (stored * probability.to(float64)) ** -importance_exponent
