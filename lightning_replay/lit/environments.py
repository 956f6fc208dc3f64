# SPDX-License-Identifier: Apache-2.0
"""Environments for collection and evaluation, one or a vector of them, and random actions in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

import lightning_replay.envs  # noqa: F401  registers the library's own ids
from lightning_replay.agents.foreign import entry_point_of
from lightning_replay.agents.parameterized_actions import ParameterizedActions, is_parameterized
from lightning_replay.envs.building import build_environment
from lightning_replay.envs.step_check import with_checked_steps
from lightning_replay.lit.policy import Action
from lightning_replay.validation import check_kind

__all__ = ["checked_arguments", "make_environment", "make_environments", "random_actions"]


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
        MissingExtraError, UnknownEnvironmentError, TypeError: see
            :func:`~lightning_replay.envs.building.build_environment`.
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
    return f"{package}:{env}" if entry_point_of(env).startswith(f"{package}.") else env


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
