# SPDX-License-Identifier: Apache-2.0
"""What ``reset`` and ``step`` return: vectors of environments fail on anything else far from what returned it."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

__all__ = ["CheckedSteps", "checked_reset", "checked_reward", "checked_step", "with_checked_steps"]

Step = tuple[Any, Any, bool, bool, dict[str, Any]]


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


def checked_step(returned: Any, env: gymnasium.Env) -> Step:
    """Returns what ``env.step`` returned, as it is.

    Raises:
        TypeError: not ``(observation, reward, terminated, truncated, info)``, or a reward that is no number.
    """
    if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], dict):
        raise _other_interface("step", returned, "(observation, reward, terminated, truncated, info)", env)
    if not isinstance(returned[1], Real):
        checked_reward(returned[1], env)
    return returned


def checked_reset(returned: Any, env: gymnasium.Env) -> tuple[Any, dict[str, Any]]:
    """Returns what ``env.reset`` returned, as it is.

    Raises:
        TypeError: not ``(observation, info)``.
    """
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise _other_interface("reset", returned, "(observation, info)", env)
    return returned


class CheckedSteps(gymnasium.Wrapper):
    """The environment itself; what it returns in another form than Gymnasium's raises.

    Args:
        env: the environment to wrap.

    Raises:
        TypeError: in a reset or a step, see :func:`checked_reset` and :func:`checked_step`.
        ValueError: an observation of another shape than the observation space has.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._shape = env.observation_space.shape if isinstance(env.observation_space, Box) else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """A reset of the environment."""
        returned = checked_reset(self.env.reset(seed=seed, options=options), self.env)
        if self._shape is not None and np.shape(returned[0]) != self._shape:
            raise self._other_shape(returned[0], "reset")
        return returned

    def step(self, action: Any) -> Step:
        """A step of the environment."""
        returned = checked_step(self.env.step(action), self.env)
        if self._shape is not None and np.shape(returned[0]) != self._shape:
            raise self._other_shape(returned[0], "step")
        return returned

    def _other_shape(self, observation: Any, method: str) -> ValueError:
        return ValueError(
            f"{method} of {self.env} returned an observation of shape {list(np.shape(observation))}, and its "
            f"observation_space has the shape {list(self._shape or ())}. Return what the space describes, or correct it"
        )


def with_checked_steps(make: Callable[[], gymnasium.Env]) -> CheckedSteps:
    """Makes an environment and wraps it; a function of this module, so that a process of its own can import it."""
    return CheckedSteps(make())


def _other_interface(method: str, returned: Any, accepted: str, env: gymnasium.Env) -> TypeError:
    given = f"a {type(returned).__name__}"
    if isinstance(returned, tuple):
        given = f"the types {', '.join(type(value).__name__ for value in returned)}"
    return TypeError(
        f"{method} of {env} returned {given}; Gymnasium's returns {accepted} with a dictionary as info. Return these, "
        "or convert an environment of OpenAI's gym with the package shimmy"
    )
