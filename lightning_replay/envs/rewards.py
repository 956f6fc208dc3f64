# SPDX-License-Identifier: Apache-2.0
"""Rewards that are numbers: vectors of environments fail on anything else far from the environment that gave it."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import gymnasium

__all__ = ["NumberRewards", "checked_reward", "with_number_rewards"]


def checked_reward(reward: Any, env: gymnasium.Env) -> Any:
    """Returns the reward of a step as it is.

    Args:
        reward: a number, or an array or a tensor without dimensions.
        env: that gave it, for the error.

    Raises:
        TypeError: anything else, such as an array of shape ``[1]``, a list or ``None``.
    """
    if isinstance(reward, Real) or (getattr(reward, "ndim", None) == 0 and isinstance(reward.item(), Real)):
        return reward
    raise TypeError(
        f"{env} returned the reward {reward!r}; it must be one number. Return float(...) from its step, or wrap it in "
        "gymnasium.wrappers.TransformReward"
    )


class NumberRewards(gymnasium.Wrapper):
    """The environment itself; a step whose reward is no number raises.

    Args:
        env: the environment to wrap.

    Raises:
        TypeError: in a step, see :func:`checked_reward`.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """A step of the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, checked_reward(reward, self.env), terminated, truncated, info


def with_number_rewards(make: Callable[[], gymnasium.Env]) -> NumberRewards:
    """Makes an environment and wraps it; a function of this module, so that a process of its own can import it."""
    return NumberRewards(make())
