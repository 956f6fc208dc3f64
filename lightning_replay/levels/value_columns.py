# SPDX-License-Identifier: Apache-2.0
"""Rewards and values of an episode's steps as lists: one operation of torch on so few costs as twenty of Python's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from torch import Tensor

from lightning_replay.validation import checked_share

__all__ = ["ValueColumns", "mean", "numbers"]


class ValueColumns(NamedTuple):
    """Of each step of an episode, what scores of values are made of; all of one length.

    Attributes:
        reward: of the step.
        state_value: V of the observation acted on.
        next_state_value: V of the observation that followed: of an episode's last step its own last observation's.
        terminated: whether the step ended the episode for good.
        done: whether it ended the episode in any way.
    """

    reward: list[float]
    state_value: list[float]
    next_state_value: list[float]
    terminated: list[bool]
    done: list[bool]

    @classmethod
    def of(
        cls,
        reward: Tensor,
        state_value: Tensor,
        next_state_value: Tensor,
        terminated: Tensor,
        done: Tensor | None = None,
    ) -> Self:
        """The same of tensors ``[T]`` or ``[T, 1]``; without ``done`` only terminations are ends.

        Raises:
            ValueError: no step, or tensors of different lengths.
        """
        tensors = (reward, state_value, next_state_value, terminated, done)
        columns: list[list[Any]] = [numbers(tensor) for tensor in tensors if tensor is not None]
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            steps = ", ".join(f"{name} has {length}" for name, length in zip(cls._fields, lengths, strict=False))
            raise ValueError(f"of steps, {steps}; give one value per step")
        return cls(columns[0], columns[1], columns[2], columns[3], columns[-1])

    def td_errors(self, discount: float) -> list[float]:
        """δ_t = r_t + γ V(s_{t+1}) - V(s_t); the value after a termination is 0, after a truncation not."""
        checked_share("discount", discount)
        return [
            reward + (0.0 if terminated else discount * following) - value
            for reward, value, following, terminated, _ in zip(*self, strict=True)
        ]

    def advantages(self, discount: float, gae_lambda: float) -> list[float]:
        """A_t = Σ_k (γλ)^k δ_{t+k} up to the episode's last step; nothing is summed across an end."""
        checked_share("gae_lambda", gae_lambda)
        advantages = self.td_errors(discount)
        decay, following = discount * gae_lambda, 0.0
        for t in range(len(advantages) - 1, -1, -1):
            following = advantages[t] if self.done[t] else advantages[t] + decay * following
            advantages[t] = following
        return advantages


def numbers(column: Tensor) -> list[float]:
    """A column ``[T]`` or ``[T, 1]``.

    Raises:
        ValueError: another shape, or no step.
    """
    if column.ndim > 1 and column.shape[1:].numel() != 1:
        raise ValueError(f"a column of a segment has shape {list(column.shape)}; give [T] or [T, 1] of one episode")
    values: list[float] = (column if column.ndim == 1 else column.reshape(-1)).tolist()
    if not values:
        raise ValueError("a segment has no step; give at least one")
    return values


def mean(terms: Iterable[float]) -> float:
    """Of at least one number, rounded once."""
    values = list(terms)
    return math.fsum(values) / len(values)
