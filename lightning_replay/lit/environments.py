# SPDX-License-Identifier: Apache-2.0
"""Environments for collection and evaluation, one or a vector of them, and random actions in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

import lightning_replay.envs  # noqa: F401  registers the library's own ids
from lightning_replay.agents.parameterized_actions import ParameterizedActions, is_parameterized
from lightning_replay.envs.building import build_environment, flat_advice
from lightning_replay.envs.step_check import with_checked_steps
from lightning_replay.lit.policy import Action

__all__ = ["make_environment", "make_environments", "random_actions"]


def make_environment(
    env: str | Callable[..., gymnasium.Env[Any, Any]], env_kwargs: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    """Builds one environment, see :func:`~lightning_replay.envs.building.build_environment`.

    Raises:
        ValueError: its observations are not arrays.
    """
    made = build_environment(env, env_kwargs)
    if not isinstance(made.observation_space, Box):
        made.close()
        raise ValueError(
            f"environment {env!r} has the observation space {made.observation_space}; accepted are array observations "
            f"(Box). {flat_advice(made.observation_space)}"
        )
    return made


def make_environments(
    env: str | Callable[..., gymnasium.Env[Any, Any]], env_kwargs: dict[str, Any], num_envs: int, asynchronous: bool
) -> VectorEnv[Any, Any, Any]:
    """Returns a vector whose environments reset in the step that ends an episode, so that no reset is a transition."""
    # functions of Gymnasium and of lightning_replay.envs, so that a process of its own does not import torch
    if isinstance(env, str):
        spec, package = gymnasium.registry.get(env), "lightning_replay.envs"
        if spec is not None and str(spec.entry_point).startswith(f"{package}."):
            env = f"{package}:{env}"  # with the module that registers it, for a new process
        env = partial(gymnasium.make, env)
    constructors = [partial(with_checked_steps, partial(env, **env_kwargs))] * num_envs
    vector = AsyncVectorEnv if asynchronous else SyncVectorEnv
    return vector(constructors, autoreset_mode=AutoresetMode.SAME_STEP)


def random_actions(space: Space[Any], count: int) -> Action:
    """Draws ``count`` actions of one environment's space by its ``sample``, ``[N, *space.shape]``.

    Raises:
        ValueError: a space whose actions are neither arrays nor parameterized.
    """
    if is_parameterized(space):
        return ParameterizedActions.of(space).random(count, space.np_random)
    if space.shape is not None:
        return np.stack([space.sample() for _ in range(count)])
    raise ValueError(
        f"no random warm-up actions in the action space {space}; it must be one of arrays, such as Discrete, "
        "MultiDiscrete, MultiBinary and Box, or discrete actions with parameters, Tuple(Discrete(K), Box, ..., Box). "
        "Convert the actions in a wrapper, such as gymnasium.wrappers.TransformAction."
    )
