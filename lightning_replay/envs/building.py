# SPDX-License-Identifier: Apache-2.0
"""Builds a Gymnasium environment from an id or a callable, with errors that name what is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space
from gymnasium.spaces.utils import flatten_space
from gymnasium.vector import VectorEnv

import lightning_replay.envs  # noqa: F401  registers the library's own ids with Gymnasium
from lightning_replay.extras import MissingExtraError, missing_extra_of


class UnknownEnvironmentError(gymnasium.error.UnregisteredEnv):
    """An id that is not registered with Gymnasium, or one of a module that does not exist."""


def check_env(env: Any) -> None:
    """Raises ``TypeError`` if an option ``env`` is neither an id nor a callable that builds an environment."""
    if isinstance(env, gymnasium.Env | VectorEnv) or not (isinstance(env, str) or callable(env)):
        raise TypeError(
            f"env is {env!r}; it must be a Gymnasium id, or a callable that builds one environment, such as "
            "lambda: MyEnv(size=5), because collection and evaluation build environments of their own"
        )


def flat_advice(space: Space[Any]) -> str:
    """Returns how to wrap an environment so that its observations are a one-dimensional Box of floats."""
    if not space.is_np_flattenable:
        return "Convert the observations to arrays by gymnasium.wrappers.TransformObservation."
    wrapped = "env"
    if not isinstance(space, Box) or len(space.shape) != 1:
        wrapped = "gymnasium.wrappers.FlattenObservation(env)"
    if not np.issubdtype(flatten_space(space).dtype, np.floating):  # one-hot numbers of Discrete are integers
        wrapped = f"gymnasium.wrappers.DtypeObservation({wrapped}, numpy.float32)"
    return f"Wrap the environment: {wrapped}."


def build_environment(
    env: str | Callable[..., gymnasium.Env[Any, Any]], env_kwargs: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    """Returns the environment of a Gymnasium id, or of a callable, with these arguments."""
    try:
        made = gymnasium.make(env, **env_kwargs) if isinstance(env, str) else env(**env_kwargs)
    except MissingExtraError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = missing_extra_of(f"environment {env!r}", error)
        if missing is not None:
            raise missing from error
        cause, module = error.__cause__, str(env).partition(":")[0]
        # the module in the id is missing, not one that it imports
        if (
            isinstance(env, str)
            and isinstance(cause, ModuleNotFoundError)
            and f"{module}.".startswith(f"{cause.name}.")
        ):
            raise _unknown(env, cause) from error
        raise
    except gymnasium.error.UnregisteredEnv as error:
        raise _unknown(env, error) from error
    if not isinstance(made, gymnasium.Env):
        given = "None" if made is None else f"a {type(made).__module__}.{type(made).__qualname__}"
        raise TypeError(
            f"env is {env!r}, which returned {given}; it must build and return one gymnasium.Env. num_envs steps "
            "several of them, and the package shimmy converts environments of OpenAI's gym"
        )
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(made, name, None), Space):
            raise TypeError(
                f"environment {env!r} has no {name}; set it in its __init__, such as "
                f"self.{name} = gymnasium.spaces.Box(-1.0, 1.0, shape=(3,))"
            )
    return made


def _unknown(env: object, error: BaseException) -> UnknownEnvironmentError:
    reason = str(error)
    return UnknownEnvironmentError(
        f"environment {env!r}: {reason}{'' if reason.endswith(('.', '?')) else '.'} Give a registered id, such as "
        "'CartPole-v1'; 'my_module:MyEnv-v0' imports the module that registers an id of your own"
    )
