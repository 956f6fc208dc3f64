# SPDX-License-Identifier: Apache-2.0
"""Returns over several steps and the factors of the values after them; Sutton and Barto 2018, section 7.1."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["bootstrap_discounts", "n_step_returns", "refuse_formed"]

# Columns of rows whose rewards are returns, as this library, TorchRL's transform and its collectors' MultiStep have.
_FORMED = ("steps_to_next_obs", ("next", "original_reward"))


def refuse_formed(rows: TensorDictBase, n_steps: int) -> None:
    """Raises ``ValueError`` for rows whose rewards are returns already, where ``n_steps`` is above 1."""
    found = next((key for key in _FORMED if rows.get(key, None) is not None), None)
    if n_steps > 1 and found is not None:
        raise ValueError(
            f"the rewards of the transitions are returns over several steps already, as their column {found!r} shows, "
            f"and returns over n_steps={n_steps} would sum them again; nothing was stored. Form returns once: store "
            "single steps, without MultiStep or another n-step transform, or build the buffer with n_steps=1"
        )


def n_step_returns(reward: Tensor, steps_used: Tensor, discount: float) -> Tensor:
    """Computes ``sum(discount**t * reward[:, t] for t < steps_used)`` of each row.

    Args:
        reward: ``[B, n]``, the rewards along :meth:`EpisodeLinks.chain`; those after ``steps_used`` are ignored.
        steps_used: int64 ``[B]``, 1 to n.
        discount: γ.

    Returns:
        ``[B]`` of the dtype of the rewards; float32 for integers and for floats of fewer bits, in which a sum may be
        infinite.

    Example:
        >>> n_step_returns(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([2]), discount=0.5)
        tensor([2.])
    """
    if not reward.is_floating_point() or reward.itemsize < torch.float32.itemsize:
        reward = reward.to(torch.float32)  # powers of a discount below 1 are no integers
    step = torch.arange(reward.shape[1], device=reward.device)
    factors = torch.pow(torch.tensor(discount, dtype=torch.float64, device=reward.device), step).to(reward.dtype)
    # where, not a product: the ignored rewards may be anything, NaN included.
    return torch.where(step < steps_used.unsqueeze(1), reward * factors, 0).sum(1)


def bootstrap_discounts(steps_used: Tensor, terminated: Tensor, discount: float) -> Tensor:
    """Computes the factor of the bootstrap value: ``discount**steps_used``, and 0 where the last step terminated.

    Args:
        steps_used: int64 ``[B]``.
        terminated: bool ``[B]``, of the last step used; truncation does not count.
        discount: γ.

    Returns:
        float64 ``[B]``.

    Example:
        >>> bootstrap_discounts(torch.tensor([2, 1]), torch.tensor([False, True]), discount=0.5)
        tensor([0.2500, 0.0000], dtype=torch.float64)
    """
    factors = torch.pow(torch.tensor(discount, dtype=torch.float64, device=steps_used.device), steps_used)
    return factors.masked_fill(terminated, 0.0)
