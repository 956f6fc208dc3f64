# SPDX-License-Identifier: Apache-2.0
"""Environments of an algorithm's config, tried once before any EnvRunner starts, and samples of search spaces."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from copy import deepcopy
from typing import Any, TypeVar

import gymnasium
import numpy as np
import tree
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import VectorWrapper
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.tune.search.variant_generator import RecursiveDependencyError, generate_variants, parse_spec_vars

from lightning_replay.envs.building import UnknownEnvironmentError, build_environment, copied_info
from rllib_ext.buffer.building import imported
from rllib_ext.rllib_compat import is_registered, observes_by_connector, registered_environment

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
# Entry of the environment's config.
_CLASS_PATH = "class_path"
_EXAMPLE = "my_module.MyEnv"
_SAMPLES = 8
_TRIES = 32  # actions of an environment that may be illegal and are not masked


def check_environment(config: AlgorithmConfig, task: str | None = None) -> None:
    """Makes the environment once and takes a step: if that fails on an EnvRunner, RLlib restarts it without end."""
    mode = gymnasium.VectorizeMode(config.gym_env_vectorize_mode)
    if config.env is None or mode is gymnasium.VectorizeMode.VECTOR_ENTRY_POINT:
        return
    _warn_of_local_registration(config)
    refused = (
        f"the environment {config.env!r} with env_config={dict(config.env_config)!r} cannot be made, reset and stepped"
    )
    failed = None
    try:
        with closing(make_environment(config)) as environment:
            tasks = environment.get_wrapper_attr("TASKS") if environment.has_wrapper_attr("TASKS") else [task]
            if task in tasks and task is not None and environment.has_wrapper_attr("task"):
                # The task is set before the reset, because there may be no default task.
                environment.set_wrapper_attr("task", task)
            if isinstance(environment, MultiAgentEnv):
                environment.reset()
            else:
                failed = _play_step(environment)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{refused}: {error!r}. RLlib calls a class with one dict, env_config; an environment with arguments of "
            "its own is given by the name it is registered under, 'my_module:MyEnv-v0', or, in a YAML file, by class "
            "path, 'my_module.MyEnv'"
        ) from error
    if failed is not None:
        raise ValueError(
            f"{refused}: the action {failed[0]} raised {failed[1]!r}. If only some actions are legal, give their "
            'mask as info["action_mask"] or as the entry "action_mask" of a Dict observation. '
            "configure(config, check_environments=False) leaves this check out"
        ) from failed[1]
    check_observations(config, environment)


def _play_step(environment: gymnasium.Env[Any, Any]) -> tuple[Any, Exception] | None:
    """Resets an environment and plays a legal action. Returns the last action tried, with its error, if all raise."""
    space = environment.action_space
    tries = min(int(space.n), _TRIES) if isinstance(space, Discrete) else _TRIES
    failed: tuple[Any, Exception] | None = None
    for attempt in range(tries):
        observation, info = environment.reset()
        found = [one for one in (info, observation) if isinstance(one, Mapping) and one.get("action_mask") is not None]
        if found:
            action = _legal_action(space, found[0]["action_mask"])
        elif isinstance(space, Discrete):
            action = np.int64(int(space.start) + attempt)  # each, as only one may be legal
        else:
            action = space.sample()
        try:
            if action is not None:
                environment.step(action)
            return None
        except ModuleNotFoundError:
            raise
        except Exception as error:
            failed = action, error
    return failed


def _legal_action(space: gymnasium.Space[Any], mask: Any) -> Any:
    # None if the mask allows nothing, or is of another form than Gymnasium's.
    with suppress(Exception):
        given = mask if isinstance(mask, tuple | dict) else np.asarray(mask)
        parts = tree.map_structure(lambda part: np.asarray(part, dtype=np.int8), given)
        if all(part.any() for part in tree.flatten(parts)):
            return space.sample(mask=parts)
    return None


def check_observations(config: AlgorithmConfig, environment: gymnasium.Env[Any, Any]) -> None:
    """Refuses observations of any agent of which RLlib's catalog makes no default module."""
    if observes_by_connector(config):
        return
    owner: Any = environment
    is_multi = isinstance(environment, MultiAgentEnv)
    if is_multi:
        pairs = [(space, owner.get_action_space(one)) for one, space in (owner.observation_spaces or {}).items()]
    else:
        pairs = [(owner.observation_space, owner.action_space)]
    for spaces in pairs:
        space = spaces[0]
        kind = type(spaces[0]).__name__
        if isinstance(space, Box) and len(space.shape) == 2:
            kind = f"Box {list(space.shape)}"
        elif not isinstance(space, Dict | Tuple):
            continue
        try:
            spec = config.get_rl_module_spec(spaces={DEFAULT_MODULE_ID: spaces}, inference_only=True)
            if spec.module_class is config.get_default_rl_module_spec().module_class:  # the user's own stays untried
                spec.build()
        except Exception as error:  # others are for RLlib to report
            if "No default encoder config" in str(error):
                flatten = f"FlattenObservations({'multi_agent=True' if is_multi else ''})"
                raise ValueError(
                    f"the observations of {config.env!r} are a {kind}, for which RLlib has no default module. Flatten "
                    f"them, .env_runners(env_to_module_connector=lambda env, spaces, device: {flatten}) of "
                    "ray.rllib.connectors.env_to_module, or, with images, give a module of your own, "
                    ".rl_module(rl_module_spec=...)"
                ) from error


def make_environment(config: AlgorithmConfig) -> gymnasium.Env[Any, Any]:
    """Returns an environment as an EnvRunner makes it from the config."""
    environment: gymnasium.Env[Any, Any] | None = registered_environment(config)
    if environment is not None:
        return environment
    try:
        return build_environment(config.env, dict(config.env_config))
    except UnknownEnvironmentError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise error.__cause__ from None  # a module that the user's id names, or one that it imports
        raise


def _warn_of_local_registration(config: AlgorithmConfig) -> None:
    # Other processes lack a name that is neither Gymnasium's nor begins with a module.
    if not isinstance(config.env, str) or config.num_env_runners == 0 or config.env not in gymnasium.registry:
        return
    entry_point = gymnasium.spec(config.env).entry_point
    module = entry_point.partition(":")[0] if isinstance(entry_point, str) else entry_point.__module__
    module = "my_module" if module == "__main__" else module
    if module.partition(".")[0] not in ("gymnasium", "shimmy"):
        logger.warning(
            f"the name {config.env!r} is registered in this process; EnvRunners in other processes find it if it "
            f"begins with the module that registers it, such as '{module}:{config.env}'"
        )


def set_class_path(config: AlgorithmConfig) -> None:
    """Replaces the environment's class path, ``my_module.MyEnv``, which RLlib would look up among registered names."""
    path = config.env
    if not isinstance(path, str) or "." not in path or ":" in path:
        return
    if path in gymnasium.registry or is_registered(path):
        return
    cls = imported(path, "environment.env", _EXAMPLE)
    if not (inspect.isclass(cls) and issubclass(cls, gymnasium.Env)):
        raise ValueError(f"environment.env names {path!r}, which is no class of gymnasium.Env")
    # These get the whole env_config, as RLlib passes it, and others its entries as arguments.
    if issubclass(cls, MultiAgentEnv) or {"config", "env_config"} & set(inspect.signature(cls).parameters):
        config.environment(cls)
    else:
        config.environment(EnvironmentFromPath, env_config={**config.env_config, _CLASS_PATH: path})


class EnvironmentFromPath(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium environment made of RLlib's one dict: a ``class_path`` and the arguments of the class by name."""

    def __init__(self, config: dict[str, Any]) -> None:
        arguments = dict(config)
        super().__init__(imported(arguments.pop(_CLASS_PATH), "environment.env", _EXAMPLE)(**arguments))


def copy_results(*, env_runner: Any, env: Any, **ignored: Any) -> None:
    """Copies what environments may return as the same object at each step. The callback ``on_environment_created``."""
    config = env_runner.config
    if config.is_multi_agent:
        env.envs = [_CopiedInfos(single) for single in env.envs]
    elif gymnasium.VectorizeMode(config.gym_env_vectorize_mode) is gymnasium.VectorizeMode.VECTOR_ENTRY_POINT:
        env_runner.env = _CopiedObservations(env_runner.env)


class _CopiedInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        """Returns the step with copied infos."""
        observations, rewards, terminated, truncated, infos = self.env.step(action)
        return observations, rewards, terminated, truncated, copied_info(infos)


class _CopiedObservations(VectorWrapper):
    def reset(self, **options: Any) -> Any:
        """Returns copied observations, and infos."""
        observations, infos = self.env.reset(**options)
        return deepcopy(observations), infos

    def step(self, actions: Any) -> Any:
        """Returns the step with copied observations."""
        observations, *others = self.env.step(actions)
        return (deepcopy(observations), *others)


def has_search_space(values: Mapping[str, Any]) -> bool:
    """Returns whether a value, or an entry of one, is a search space of Tune."""
    _, sampled, grids = parse_spec_vars(dict(values))
    return bool(sampled or grids)


def samples_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns up to eight samples of values by name, the same in every process.

    Returns the values if nothing is searched.
    """
    _, sampled, grids = parse_spec_vars(dict(values))
    if not sampled and not grids:
        return [dict(values)]
    generator = np.random.default_rng(0)
    # Without anything to draw, one pass has the whole grid.
    passes = (
        generate_variants({"config": dict(values)}, random_state=generator) for _ in range(_SAMPLES if sampled else 1)
    )
    try:
        variants = itertools.islice(itertools.chain.from_iterable(passes), _SAMPLES)
        return [spec["config"] for _, spec in variants]
    except RecursiveDependencyError as error:
        raise ValueError(str(error)) from error


def sampled_configs(config: AlgorithmConfig) -> list[AlgorithmConfig]:
    """Returns samples of a config as Tune's trials get them, or the config itself if nothing is searched."""
    if not has_search_space(vars(config)):
        return [config]
    try:
        samples = samples_of(config.to_dict())
    except ValueError as error:
        raise ValueError(
            f"the search spaces of the config cannot be sampled: {error}. Functions of tune.sample_from read the "
            "config as spec.config, such as lambda spec: spec.config.lr / 10"
        ) from error
    return [config.algo_class.get_default_config().update_from_dict(sample) for sample in samples]


def accepted(samples: list[T], check: Callable[[T], object]) -> list[T]:
    """Returns the samples for which a check raises nothing, and warns of the others. Raises if there are none."""
    passed = []
    refusals = []
    for sample in samples:
        try:
            check(sample)
            passed.append(sample)
        except Exception as error:
            refusals.append(error)
    if not passed:
        raise refusals[0]
    if refusals:
        logger.warning(
            f"{len(refusals)} of {len(samples)} samples of the search space are refused, and such trials will fail: "
            f"{refusals[0]}"
        )
    return passed
