# SPDX-License-Identifier: Apache-2.0
"""Divides rewards by the spread of discounted returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_replay.validation import ABOVE_ZERO, checked_number, checked_share

__all__ = ["ReturnNormalization"]


class ReturnNormalization:
    """``r / sqrt(var(R) + 1e-8)``, R the discounted sum of rewards of each running episode, clipped to ``±clip``.

    The variance is over all R of all environments and steps so far. Prioritized Level Replay trains on such rewards
    (appendix of https://arxiv.org/abs/2010.03934); values and scores of levels are then in these units and drift with
    the variance.

    Args:
        discount: γ of the sum; the agent's.
        clip: largest magnitude of a normalised reward.

    Raises:
        ValueError: a discount outside [0, 1], or a bound that is not positive.

    Example:
        >>> normalization = ReturnNormalization(discount=0.5)
        >>> normalization(np.array([2.0, 0.0]), np.array([False, False]))  # R is 2 and 0, its variance 1
        array([2., 0.], dtype=float32)
    """

    def __init__(self, discount: float = 0.999, clip: float = 10.0) -> None:
        self.discount: float = checked_share("discount", discount)
        self.clip: float = checked_number("clip", clip, ABOVE_ZERO)
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._returns = np.zeros(0)

    @property
    def scale(self) -> float:
        """Divisor of the rewards; 1 before the first."""
        return float(np.sqrt(self._squares / self._count + 1e-8)) if self._count else 1.0

    def __call__(self, reward: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Adds one step's rewards to the returns and normalises them, float32 ``[N]``; ``done`` ends episodes."""
        if len(self._returns) != len(reward):
            self._returns = np.zeros(len(reward))
        self._returns = self.discount * self._returns + reward
        mean, count = self._returns.mean(), len(reward)
        together, shift = self._count + count, mean - self._mean
        self._squares += ((self._returns - mean) ** 2).sum() + shift**2 * self._count * count / together
        self._mean += shift * count / together
        self._count = together
        self._returns[done] = 0.0
        return np.clip(reward / self.scale, -self.clip, self.clip).astype(np.float32)

    def restart(self) -> None:
        """Clears the running sums; all environments begin new episodes."""
        self._returns = np.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        """Moments of the returns; the running sums belong to episodes that are not resumed."""
        return {"count": self._count, "mean": float(self._mean), "squares": float(self._squares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
        self.restart()
