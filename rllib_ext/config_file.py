# SPDX-License-Identifier: Apache-2.0
"""An algorithm's config from a YAML file whose keys are the methods of ``AlgorithmConfig``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ray._common.deprecation import DEPRECATED_VALUE
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQN, DQNConfig
from ray.rllib.algorithms.dqn.dqn import calculate_rr_weights
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from lightning_replay.options import check_kind, checked_local_path, checked_number, did_you_mean
from rllib_ext.apex import ApexDQNConfig
from rllib_ext.api import LEVEL_OPTIONS, REPLAY_OPTIONS, configure, replay_config
from rllib_ext.buffer.building import built
from rllib_ext.environments import set_class_path
from rllib_ext.rllib_compat import num_actors

REPLAY_STEPS: dict[str, type[AlgorithmConfig]] = {
    "DQN": DQNConfig,
    "ApexDQN": ApexDQNConfig,
    "SAC": SACConfig,
    "TQC": TQCConfig,
}
REPLAY_LEVELS: dict[str, type[AlgorithmConfig]] = {"PPO": PPOConfig, "APPO": APPOConfig, "IMPALA": IMPALAConfig}
ALGORITHMS = REPLAY_STEPS | REPLAY_LEVELS
METHODS = (
    *("environment", "env_runners", "learners", "training", "rl_module", "multi_agent", "evaluation"),
    *("reporting", "debugging", "fault_tolerance", "checkpointing", "resources", "framework"),
)
_CONNECTOR = "env_to_module_connector"
_FLATTEN = "ray.rllib.connectors.env_to_module.FlattenObservations"
OWN_KEYS = ("algorithm", "replay", "levels", "configure", "stop", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Stop:
    """Limits of training, which is over as soon as one of them is reached. Steps before a restore count."""

    env_steps: int | None = None  #: Environment steps.
    iterations: int | None = None  # calls of train()
    episode_return: float | None = None  # mean of the last training episodes

    def is_reached(self, result: Mapping[str, Any]) -> bool:
        """Returns whether a result of ``train()`` reaches one of the limits."""
        runners = result["env_runners"]
        reached = (
            (self.env_steps, runners["num_env_steps_sampled_lifetime"]),
            (self.iterations, result["training_iteration"]),
            (self.episode_return, runners.get("episode_return_mean", -float("inf"))),
        )
        return any(limit is not None and value >= limit for limit, value in reached)


class Settings(NamedTuple):
    """Settings in a file that are not part of the algorithm's config. Without a path no checkpoint is written."""

    stop: Stop
    checkpoint: str | None


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> tuple[AlgorithmConfig, Settings]:
    """Reads a file such as those in ``configs/rllib``.

    ``algorithm`` is DQN, ApexDQN, SAC, or TQC with ``replay`` (:func:`rllib_ext.replay_config`), or PPO, APPO, or
    IMPALA with ``levels``. ``configure`` has further arguments of :func:`rllib_ext.configure`. Each other key is a
    method of the algorithm's config with the arguments, or ``stop`` (the fields of ``Stop``) or ``checkpoint``, a path.

    Args:
        path: of the file.
        overrides: values by dotted key in place of the file's, ``{"training.gamma": 0.98}``.

    Returns:
        The config, ready for ``build_algo()``, and the other settings.

    Raises:
        FileNotFoundError: no such file. The message lists the files that come with the library.
        ValueError: a URL, no valid YAML, an unknown algorithm, key or argument, or values that are refused.
    """
    return configured(read_sections(path, overrides))


def configured(sections: Mapping[str, Any]) -> tuple[AlgorithmConfig, Settings]:
    """Returns the algorithm's config and the settings of the command that the sections of a file describe."""
    config = _algorithm(sections)
    for name in METHODS:
        if name in sections:
            _call(config, name, sections[name])
    set_class_path(config)
    options = sections.get("configure", {})
    levels = sections.get("levels")
    others = ("config", "levels", *(LEVEL_OPTIONS if levels is None else REPLAY_OPTIONS))
    _check_names("configure", options, [name for name in _arguments(configure) if name not in others])
    if levels is None:
        config.training(replay_buffer_config=replay_config(**sections["replay"]))
    config = configure(config, levels=levels, **options)
    stop = sections["stop"]
    checkpoint = sections.get("checkpoint")
    _check_names("stop", stop, [field.name for field in dataclasses.fields(Stop)])
    for name, value in stop.items():
        checked_number(f"stop.{name}", value)
    if not stop:
        raise ValueError("stop is empty: training would never end. Give stop: {env_steps: 20_000}")
    check_kind("checkpoint", checkpoint, str | None, "a path")
    return config, Settings(Stop(**stop), checkpoint)


def updates_per_env_step(config: AlgorithmConfig) -> float:
    """Returns how many gradient steps training takes for each step of an environment, once it has begun to learn.

    With several environments in a process it is slightly fewer if episodes are short, as a round of sampling then has
    more steps. NaN if the config does not say: whole episodes in a round, ApexDQN without ``samples_per_insert``.
    """
    batch: int = config.total_train_batch_size
    if isinstance(config, ApexDQNConfig):
        return (config.samples_per_insert or math.nan) / batch
    if issubclass(config.algo_class, DQN):
        # Rounds of sampling, and rounds of learning after them.
        rounds, updates = calculate_rr_weights(config)
        steps = rounds * config.get_rollout_fragment_length() * num_actors(config)
        return math.nan if config.batch_mode == "complete_episodes" else updates / steps
    minibatches = math.ceil(config.train_batch_size_per_learner / (config.minibatch_size or batch))
    return config.num_epochs * minibatches / batch


def read_sections(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the keys of a file with their values. Arguments and errors are as of :func:`load_config`."""
    path = checked_local_path("path", path)
    if not path.is_file():
        from lightning_replay.options import config_directory, config_files

        shipped = [str(config_directory() / name) for name in config_files() if name.startswith("rllib/")]
        raise FileNotFoundError(f"there is no file {path}; these come with the library: {', '.join(shipped)}")
    try:
        sections = parse(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(sections, dict):
        raise ValueError(f"{path} holds no keys; algorithm, environment, replay and stop are needed")
    for key, value in (overrides or {}).items():
        *parents, last = key.split(".")
        place: Any = sections
        for name in parents:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ValueError(f"{key} cannot be set: {name} is {place!r} and holds no arguments by name")
        place[last] = value
    _check_names("the file", sections, [*OWN_KEYS, *METHODS])
    return sections


def _algorithm(sections: Mapping[str, Any]) -> AlgorithmConfig:
    algorithm = sections.get("algorithm")
    if algorithm not in list(ALGORITHMS):  # it may be unhashable
        raise ValueError(f"algorithm is {algorithm!r}; accepted are {', '.join(ALGORITHMS)}")
    own = "replay"
    other = "levels"
    others = REPLAY_LEVELS
    if algorithm in REPLAY_LEVELS:
        own = "levels"
        other = "replay"
        others = REPLAY_STEPS
    if other in sections:
        raise ValueError(
            f"the key {other} is for {', '.join(others)}; algorithm is {algorithm}, which takes {own} in its place"
        )
    for name in ("environment", own, "stop"):
        if name not in sections:
            raise ValueError(f"the file has no key {name!r}; algorithm, environment, {own} and stop are needed")
    for name, value in sections.items():
        if name not in ("algorithm", "checkpoint") and not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}; it holds arguments by name, as {name}: {{name: value}}")
    return ALGORITHMS[algorithm]()


def _call(config: AlgorithmConfig, method: str, arguments: Mapping[str, Any]) -> None:
    if method == "training" and "replay_buffer_config" in arguments:
        raise ValueError("training.replay_buffer_config is not accepted; the key replay describes the buffer")
    functions = [vars(kind)[method] for kind in type(config).__mro__ if method in vars(kind)]
    _check_names(method, arguments, list(dict.fromkeys(name for one in functions for name in _arguments(one))))
    check_kind("env_config", arguments.get("env_config"), Mapping | None, "arguments by name, {name: value}")
    model = arguments.get("model_config", {})
    if isinstance(model, Mapping):  # RLlib ignores a misspelt one
        _check_names(f"{method}.model_config", model, [field.name for field in dataclasses.fields(DefaultModelConfig)])
    if arguments.get(_CONNECTOR) is not None:
        build = functools.partial(_connector, arguments[_CONNECTOR])
        check_kind(_CONNECTOR, build(), ConnectorV2, f"a connector by its class path, {{class_path: {_FLATTEN}}}")
        arguments = {**arguments, _CONNECTOR: build}
    getattr(config, method)(**arguments)


def _connector(described: Any, *given: Any) -> Any:
    # RLlib gives environment, spaces and device, which its own connectors do not need. Some of these are functions.
    made = built(described, _CONNECTOR, functions=True, example=_FLATTEN)
    return made() if callable(made) and not isinstance(made, ConnectorV2) else made


def _arguments(function: Callable[..., Any]) -> list[str]:
    return [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if one.name != "self" and one.default != DEPRECATED_VALUE
    ]


def _check_names(owner: str, given: Iterable[Any], accepted: list[str]) -> None:
    for name in given:
        if name not in accepted:
            hint = did_you_mean(name, accepted)
            raise ValueError(f"{owner} has no {name!r}; accepted are {', '.join(sorted(accepted))}{hint}")


def parse(text: str) -> Any:
    """Returns the value of a YAML text. ``3e-4`` is a number, and a key given twice is refused."""
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping, and raises an error for a key that is given twice."""
        names = [key.value for key, _ in node.value]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 3e-4 for a text, because it lacks the dot.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)
