# SPDX-License-Identifier: Apache-2.0
"""Builds Gymnasium environments by id or by a callable, one or a vector of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

import lightning_replay.envs  # noqa: F401  so that Gymnasium knows the library's own ids
from lightning_replay.envs.step_check import with_checked_steps
from lightning_replay.extras import MissingExtraError, missing_extra_of
from lightning_replay.lit.acting import Action
from lightning_replay.lit.parameterized_actions import ParameterizedActions, is_parameterized
from lightning_replay.validation import check_kind

__all__ = [
    "UnknownEnvironmentError",
    "build_environment",
    "check_env",
    "checked_arguments",
    "make_environment",
    "make_environments",
    "random_actions",
]


class UnknownEnvironmentError(gymnasium.error.UnregisteredEnv):
    """An id that is not registered with Gymnasium, or one of a module that does not exist."""


def check_env(env: Any) -> None:
    """Refuses an option ``env`` that builds no environment.

    Raises:
        TypeError: an environment, or anything else that is neither an id nor a callable.
    """
    if isinstance(env, gymnasium.Env | VectorEnv) or not (isinstance(env, str) or callable(env)):
        raise TypeError(
            f"env is {env!r}; it must be a Gymnasium id, or a callable that builds one environment, such as "
            "lambda: MyEnv(size=5), because collection and evaluation build environments of their own"
        )


def checked_arguments(name: str, arguments: Any) -> dict[str, Any]:
    """Returns arguments of an environment by name, none for ``None``.

    Raises:
        TypeError: anything else.
    """
    check_kind(name, arguments, Mapping | None, "arguments of the environment by name, or None")
    return dict(arguments or {})


def make_environment(env: str | Callable[..., gymnasium.Env], env_kwargs: dict[str, Any]) -> gymnasium.Env:
    """Returns one environment whose observations are arrays.

    Raises:
        MissingExtraError, UnknownEnvironmentError, TypeError: see :func:`build_environment`.
        ValueError: its observations are no arrays.
    """
    made = build_environment(env, env_kwargs)
    if not isinstance(made.observation_space, Box):
        made.close()
        raise ValueError(
            f"environment {env!r} has the observation space {made.observation_space}; accepted are array observations "
            "(Box). Wrap the environment in gymnasium.wrappers.FlattenObservation."
        )
    return made


def build_environment(env: str | Callable[..., gymnasium.Env], env_kwargs: dict[str, Any]) -> gymnasium.Env:
    """Returns one environment, with any spaces.

    Args:
        env: Gymnasium id, or a callable that builds one environment.
        env_kwargs: its arguments.

    Raises:
        MissingExtraError: a package that it imports is not installed, and an extra of this library brings it.
        UnknownEnvironmentError: Gymnasium does not have the id.
        TypeError: what was built is no environment, or has no spaces.
    """
    try:
        made = gymnasium.make(env, **env_kwargs) if isinstance(env, str) else env(**env_kwargs)
    except MissingExtraError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = missing_extra_of(f"environment {env!r}", error)
        if missing is not None:
            raise missing from error
        if isinstance(env, str) and _is_absent(env.partition(":")[0], error.__cause__):
            raise _unknown(env, error.__cause__) from error
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


def _is_absent(module: str, error: BaseException | None) -> bool:
    """Returns whether the import failed because of that module, and not because of one that it imports."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _unknown(env: object, error: BaseException | None) -> UnknownEnvironmentError:
    reason = str(error)
    return UnknownEnvironmentError(
        f"environment {env!r}: {reason}{'' if reason.endswith(('.', '?')) else '.'} Give a registered id, such as "
        "'CartPole-v1'; 'my_module:MyEnv-v0' imports the module that registers an id of your own"
    )


def make_environments(
    env: str | Callable[..., gymnasium.Env], env_kwargs: dict[str, Any], num_envs: int, asynchronous: bool
) -> VectorEnv:
    """A vector whose environments reset within the step that ends an episode, so that no reset is a transition."""
    # functions of Gymnasium and of lightning_replay.envs, so that a process of its own does not import torch
    constructor = (
        partial(gymnasium.make, _importable(env), **env_kwargs) if isinstance(env, str) else partial(env, **env_kwargs)
    )
    constructors = [partial(with_checked_steps, constructor)] * num_envs
    vector = AsyncVectorEnv if asynchronous else SyncVectorEnv
    return vector(constructors, autoreset_mode=AutoresetMode.SAME_STEP)


def _importable(env: str) -> str:
    """The id of one of the library's own environments with the module that registers it, for a new process."""
    package = "lightning_replay.envs"
    entry_point = getattr(gymnasium.registry.get(env), "entry_point", None)
    return f"{package}:{env}" if str(entry_point).startswith(f"{package}.") else env


def random_actions(space: Space, count: int, generator: np.random.Generator) -> Action:
    """``count`` uniformly random actions of one environment's space: Discrete, a bounded Box, or parameterized."""
    if is_parameterized(space):
        return ParameterizedActions.of(space).random(count, generator)
    if isinstance(space, Discrete):
        return generator.integers(space.start, space.start + space.n, size=count)
    if isinstance(space, Box) and space.is_bounded("both"):
        return generator.uniform(space.low, space.high, size=(count, *space.shape)).astype(space.dtype)
    raise ValueError(
        f"no uniformly random warm-up actions in the action space {space}; it must be Discrete or a bounded Box, "
        "or discrete actions with parameters, Tuple(Discrete(K), Box, ..., Box). "
        "Wrap the environment, for example in gymnasium.wrappers.RescaleAction."
    )
