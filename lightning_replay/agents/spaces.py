# SPDX-License-Identifier: Apache-2.0
"""Reads an agent's sizes from Gymnasium spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from lightning_replay.agents.parameterized_actions import ParameterizedActions, is_parameterized
from lightning_replay.envs.building import build_environment, check_env, flat_advice


class SizeReader(Protocol):
    """Reads an agent's sizes from spaces; the name of the agent is for messages."""

    def __call__(self, observation_space: Space[Any], action_space: Space[Any], agent: str, /) -> dict[str, Any]:
        """Returns the sizes by the names of the agent's arguments."""
        ...


def spaces_of(
    env: str
    | gymnasium.Env[Any, Any]
    | gymnasium.vector.VectorEnv[Any, Any, Any]
    | Callable[[], gymnasium.Env[Any, Any]],
) -> tuple[Space[Any], Space[Any]]:
    """Returns observation and action space of an environment, its id, a vector of them, or a callable that makes one.

    Raises:
        TypeError: ``env`` is something else.
        MissingExtraError, UnknownEnvironmentError: see :func:`~lightning_replay.envs.building.build_environment`.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        return env.single_observation_space, env.single_action_space
    if isinstance(env, gymnasium.Env):
        return env.observation_space, env.action_space
    check_env(env)
    made = build_environment(env, {})
    spaces = (made.observation_space, made.action_space)
    made.close()
    return spaces


def continuous_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Returns ``observation_size``, ``action_low`` and ``action_high`` of a bounded Box action space."""
    if not isinstance(action_space, Box) or len(action_space.shape) != 1 or not action_space.is_bounded("both"):
        raise ValueError(
            f"{agent} got the action space {action_space}; it needs a bounded, one-dimensional Box. "
            "Use DQN for Discrete actions, or wrap the environment."
        )
    return {
        "observation_size": _flat_size(observation_space, agent),
        "action_low": [float(value) for value in action_space.low],
        "action_high": [float(value) for value in action_space.high],
    }


def discrete_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Returns ``observation_size`` and ``num_actions`` of a Discrete action space."""
    num_actions = _num_actions(action_space, agent)
    return {"observation_size": _flat_size(observation_space, agent), "num_actions": num_actions}


def flat_or_image_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Returns ``observation_shape``, ``observation_high`` of images and ``num_actions`` of a Discrete action space."""
    num_actions = _num_actions(action_space, agent)
    if not isinstance(observation_space, Box) or not (_is_flat(observation_space) or _is_image(observation_space)):
        raise ValueError(
            f"{agent} got the observation space {observation_space}; it needs flat observations, a one-dimensional "
            "Box of floats, or images, a Box of uint8 whose shape is (height, width, channels). "
            + flat_advice(observation_space)
        )
    shape = [int(size) for size in observation_space.shape]
    high = float(observation_space.high.max()) if _is_image(observation_space) else None
    return {"observation_shape": shape, "observation_high": high, "num_actions": num_actions}


def image_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Returns ``observation_shape``, ``observation_high`` and ``num_actions`` of images and a Discrete action space."""
    num_actions = _num_actions(action_space, agent)
    is_image = len(observation_space.shape or ()) == 3 and observation_space.dtype == np.uint8
    if not isinstance(observation_space, Box) or not is_image:
        raise ValueError(
            f"{agent} got the observation space {observation_space}; it needs images, a Box of uint8 whose shape is "
            "(channels, height, width), such as those of Atari-v0 and MinAtar-v0. Use DQN for flat observations."
        )
    shape, high = [int(size) for size in observation_space.shape], float(observation_space.high.max())
    return {"observation_shape": shape, "observation_high": high, "num_actions": num_actions}


def parameterized_sizes(observation_space: Space[Any], action_space: Space[Any], agent: str) -> dict[str, Any]:
    """Returns ``observation_size``, ``parameter_sizes`` and both bounds of discrete actions with parameters."""
    if not is_parameterized(action_space):
        raise ValueError(
            f"{agent} got the action space {action_space}; it needs discrete actions with parameters, "
            "Tuple(Discrete(K), Box, ..., Box). Use DQN for Discrete, TD3 or SAC for a Box."
        )
    actions = ParameterizedActions.of(action_space)
    return {
        "observation_size": _flat_size(observation_space, agent),
        "parameter_sizes": list(actions.sizes),
        "parameter_low": [float(value) for value in actions.low],
        "parameter_high": [float(value) for value in actions.high],
    }


def _is_flat(space: Box) -> bool:
    return len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)


def _is_image(space: Box) -> bool:
    return len(space.shape) == 3 and space.dtype == np.uint8 and space.shape[0] >= space.shape[2]


def _num_actions(space: Space[Any], agent: str) -> int:
    if not isinstance(space, Discrete) or space.start != 0:
        raise ValueError(
            f"{agent} got the action space {space}; it needs Discrete actions that start at 0. "
            "Use TD3 or SAC for a Box, or wrap the environment."
        )
    return int(space.n)


def _flat_size(space: Space[Any], agent: str) -> int:
    if not isinstance(space, Box) or len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(
            f"{agent} got the observation space {space}; it needs a one-dimensional Box of floats. {flat_advice(space)}"
        )
    return int(space.shape[0])
