# SPDX-License-Identifier: Apache-2.0
"""Environments as an algorithm's config names them: made once before any EnvRunner starts, and given by class path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gymnasium
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.tune.registry import ENV_CREATOR, _global_registry

from rllib_ext.class_paths import imported

_CLASS_PATH = "class_path"  # of the environment's config
_EXAMPLE = "my_module.MyEnv"


class EnvironmentFromPath(gymnasium.Wrapper):
    """A Gymnasium environment made of a class path and arguments.

    RLlib calls an environment's class with one dict; this one passes the entries of the dict on as arguments.

    Args:
        config: ``class_path``, and the arguments of the class by name.

    Raises:
        ValueError: no class can be imported from there.

    Example:
        >>> path = "gymnasium.envs.classic_control.MountainCarEnv"
        >>> EnvironmentFromPath({"class_path": path, "goal_velocity": 0.01}).unwrapped.goal_velocity
        0.01
    """

    def __init__(self, config: dict[str, Any]) -> None:
        arguments = dict(config)
        super().__init__(imported(arguments.pop(_CLASS_PATH), "environment.env", _EXAMPLE)(**arguments))


def set_class_path(config: AlgorithmConfig) -> None:
    """Makes an environment of its class path, ``my_module.MyEnv``; RLlib takes such a name for a registered one.

    Classes with an argument ``config`` or ``env_config`` are RLlib's kind and get ``env_config`` whole; others get its
    entries as arguments.

    Args:
        config: changed in place; other environments stay.

    Raises:
        ValueError: nothing can be imported from there, or no environment.
    """
    path = config.env
    if (
        not isinstance(path, str)
        or "." not in path
        or ":" in path
        or path in gymnasium.registry
        or _is_registered(path)
    ):
        return
    cls = imported(path, "environment.env", _EXAMPLE)
    if not (inspect.isclass(cls) and issubclass(cls, gymnasium.Env)):
        raise ValueError(f"environment.env names {path!r}, which is no class of gymnasium.Env")
    if issubclass(cls, MultiAgentEnv) or {"config", "env_config"} & set(inspect.signature(cls).parameters):
        config.environment(cls)
    else:
        config.environment(EnvironmentFromPath, env_config={**config.env_config, _CLASS_PATH: path})


def environment_maker(config: AlgorithmConfig) -> Callable[[], gymnasium.Env]:
    """What makes one environment as the first EnvRunner does."""
    context = EnvContext(config.env_config, worker_index=1, num_workers=config.num_env_runners)
    if isinstance(config.env, str) and not _is_registered(config.env):
        return lambda: gymnasium.make(config.env, **config.env_config)
    creator = _global_registry.get(ENV_CREATOR, config.env) if isinstance(config.env, str) else config.env
    return lambda: creator(context)


def check_environment(config: AlgorithmConfig) -> None:
    """Makes the environment once, because an error on an EnvRunner ends ``build_algo()`` with an IndexError.

    Args:
        config: without search spaces; without an environment, or with one that exists as a vector alone, nothing is
            made.

    Raises:
        ModuleNotFoundError: a package that the environment needs is not installed.
        ValueError: the environment cannot be made; the message has the reason.
    """
    alone = gymnasium.VectorizeMode(config.gym_env_vectorize_mode) is not gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
    if config.env is None or not alone:
        return
    try:
        environment_maker(config)().close()
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"the environment {config.env!r} cannot be made with env_config={dict(config.env_config)!r}: {error!r}. "
            "Own environments are given as a class, by the name they are registered under, "
            "'my_module:MyEnv-v0', or in a YAML file by class path, 'my_module.MyEnv'"
        ) from error


def _is_registered(name: str) -> bool:
    """Whether ``ray.tune.register_env`` was called with this name."""
    return bool(_global_registry.contains(ENV_CREATOR, name))
