# SPDX-License-Identifier: Apache-2.0
"""The function by which PPO, APPO and IMPALA replay levels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig

from lightning_replay.levels.level_ids import checked_held_out
from lightning_replay.validation import checked_flag
from rllib_ext.checks import check_cpus
from rllib_ext.class_paths import call, imported
from rllib_ext.levels import evaluation, install, playing
from rllib_ext.levels.checks import (
    check_algorithm,
    check_apart,
    check_config,
    check_discount,
    check_environment,
    check_evaluated,
    check_score,
    check_updates,
    draw_levels,
)
from rllib_ext.search_spaces import accepted, has_search_space, sampled_configs

if TYPE_CHECKING:
    from lightning_replay.levels import LevelSelector

C = TypeVar("C", bound=AlgorithmConfig)

_HELD_OUT = 100
_EXAMPLES = {  # of class paths
    "levels": "lightning_replay.levels.UniformLevels",
    "levels.score": "lightning_replay.levels.scores.L1ValueLoss",
    "levels.prioritization": "lightning_replay.levels.Rank",
    "levels.editor": "my_project.my_module.edited",
    "levels.generate": "my_project.my_module.new_level",
}


def configure_levels(
    config: C,
    levels: LevelSelector | Mapping[str, Any],
    *,
    held_out_levels: int | Iterable[int] | None = None,
    generalization_gap: bool = True,
    flush: bool = False,
    check_environments: bool = True,
    require_cpus: bool = True,
) -> C:
    """Has every environment of an algorithm play the levels of one level buffer; call it last, before ``build_algo()``.

    * Each episode's level is chosen before its environment is reset, and set by ``reset(seed=level_id)`` or by the
      environment's method ``set_level(level_id)``. Infos and the episode's ``custom_data`` have it as ``level_id``.
    * Before a Learner learns from an episode's steps, its module values them, and the level buffer gets the values.
    * ``algorithm.levels`` is the buffer, see :class:`~rllib_ext.levels.remote.RemoteLevels`; results have figures under
      ``levels``.
    * ``save_to_path``, ``restore_from_path``, ``from_checkpoint`` and Tune save and restore the buffer.
    * Evaluation never plays levels of the buffer, but held-out ones, and adds the gap to the returns on training
      levels, see :class:`~rllib_ext.levels.evaluation.GeneralizationGap`.

    Results get ``num_updates_lifetime``, gradient steps, and ``timesteps_total``, environment steps, see
    :func:`~rllib_ext.clocks.add_clocks`.

    The config may hold search spaces of Ray Tune, and so may levels that are given by arguments,
    ``{"levels": 200, "staleness_weight": tune.uniform(0.1, 0.5)}``: these become the setting ``levels`` of the config,
    where Tune finds them. They are checked by samples, as in :func:`rllib_ext.configure`, and each trial checks its own
    values when it is built.

    The user's callbacks stay as they are.

    Args:
        config: of PPO, APPO or IMPALA on the new API stack, for one agent; changed in place.
        levels: of :mod:`lightning_replay.levels`; the algorithm works on a copy. Or the arguments of
            :class:`~lightning_replay.levels.LevelBuffer`, or a class path with arguments,
            ``{"class_path": "lightning_replay.levels.UniformLevels", "init_args": {"levels": 200}}``, and values may be
            class paths too: then a ``seed`` that is not given is the config's, and a ``score`` that is not given the L1
            value loss with the config's ``gamma``, and ``lambda_`` of PPO.
        held_out_levels: ids that evaluation plays, or how many: then the largest ids there are, below 2^31; 100 if
            absent. They need ``.evaluation(evaluation_interval=...)``, and are warned of without it.
        generalization_gap: whether evaluations play levels that were trained on too.
        flush: makes scores of unfinished episodes after every update, as the paper's released code does; for PPO with
            at most one Learner.
        check_environments: make the environment once, here, and see that its first observation follows the level.
        require_cpus: refuse configs whose EnvRunners and Learners take more CPUs than Ray has; pass ``False`` for a
            cluster that grows.

    Returns:
        The config.

    Raises:
        ValueError: another algorithm, the old API stack, several agents, what the level buffer refuses, an environment
            that ignores its level, held-out levels that are trained on, or too few CPUs (Ray would wait for ever).
        TypeError: levels that are none, or something that is no config.

    Example:
        >>> from ray.rllib.algorithms.ppo import PPOConfig
        >>> config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        >>> config = configure_levels(config, {"levels": 200, "staleness_weight": 0.3}, held_out_levels=50)
        >>> config.callbacks_on_algorithm_init[0].func.__name__
        'install'
    """
    check_config(config)
    checked_flag("generalization_gap", generalization_gap)
    checked_flag("flush", flush)
    checked_flag("check_environments", check_environments)
    checked_flag("require_cpus", require_cpus)
    held_out = checked_held_out(_HELD_OUT if held_out_levels is None else held_out_levels)
    vars(config).pop("levels", None)  # of an earlier call
    built_by_trials = isinstance(levels, Mapping) and has_search_space({**vars(config), "levels": levels})
    if built_by_trials:
        config.levels = levels

    def check(sample: AlgorithmConfig) -> LevelSelector:
        given = sample.levels if built_by_trials else levels
        source = checked_levels(given, sample, held_out, flush=flush, check_environments=check_environments)
        if require_cpus:
            check_cpus(sample, in_tune=sample is not config)
        return source

    samples = sampled_configs(config)
    in_tune = samples[0] is not config
    sample = accepted(samples, check)[0]
    source = built_levels(sample.levels if built_by_trials else levels, sample)
    check_discount(sample, source)
    if held_out_levels is not None:
        check_evaluated(sample)
    ours = {
        "on_algorithm_init": functools.partial(
            install.install,
            packed=None if built_by_trials else cloudpickle.dumps(source),
            flush=flush,
            held_out=held_out if in_tune else None,
        ),
        "on_environment_created": functools.partial(playing.wrap_environments),
        "on_episode_created": functools.partial(playing.begin_episode, held_out=held_out),
        "on_episode_end": functools.partial(evaluation.note_return) if generalization_gap else None,
        "on_env_runners_recreated": functools.partial(install.tell_recreated),
        "on_train_result": functools.partial(install.add_results),
        "on_evaluate_start": functools.partial(evaluation.check_evaluation, held_out=held_out),
        "on_evaluate_end": functools.partial(evaluation.measure_gap) if generalization_gap else None,
    }
    for event, hook in ours.items():
        present = _as_list(getattr(config, f"callbacks_{event}"))
        others = [one for one in present if not _is_ours(one)]
        config.callbacks(**{event: others if hook is None else [*others, hook]})
    return config


def checked_levels(
    levels: LevelSelector | Mapping[str, Any],
    config: AlgorithmConfig,
    held_out: Sequence[int],
    *,
    flush: bool,
    check_environments: bool,
) -> LevelSelector:
    """Builds levels and checks that the algorithm can play and score them.

    Args:
        levels, flush, check_environments: as :func:`configure_levels`.
        config: of the algorithm, without search spaces.
        held_out: ids that evaluation plays.

    Raises:
        ValueError, TypeError: as :func:`configure_levels`.
    """
    source = built_levels(levels, config)
    check_algorithm(config, source.plays_unlearned)
    check_updates(config, flush)
    trial = cloudpickle.loads(cloudpickle.dumps(source))
    drawn = draw_levels(trial)
    check_apart(held_out, trial)
    actions = check_environment(config, drawn, held_out) if check_environments else config.action_space
    check_score(trial, drawn[0], actions)
    return source


def built_levels(levels: LevelSelector | Mapping[str, Any], config: AlgorithmConfig) -> LevelSelector:
    """Builds the level buffer of :func:`configure_levels`, unless an object was given.

    Args:
        levels: as there.
        config: of the algorithm that plays them.

    Raises:
        ValueError: a class or an argument that does not exist, or values that are refused.
        TypeError: something that is no source of levels.
    """
    from lightning_replay.levels import LevelBuffer, LevelSelector
    from lightning_replay.levels.scores import L1ValueLoss

    built = levels
    if isinstance(levels, Mapping):
        kind: Any = LevelBuffer
        options = dict(levels)
        if "class_path" in options:
            kind, options = _class_and_arguments(options, "levels")
        accepted = inspect.signature(kind).parameters
        if "seed" in accepted:
            options.setdefault("seed", config.seed)
        if "score" in accepted and options.get("score") is None:
            options["score"] = L1ValueLoss(config.gamma, config.lambda_ if isinstance(config, PPOConfig) else 0.95)
        built = call(kind, {name: _built(value, f"levels.{name}") for name, value in options.items()}, "levels")
    if not isinstance(built, LevelSelector):
        raise TypeError(
            f"levels is {levels!r}; accepted are LevelBuffer(...), UniformLevels(...) and SequentialLevels(...) of "
            "lightning_replay.levels, or the arguments of LevelBuffer by name"
        )
    return built


def _built(value: Any, name: str) -> Any:
    """The value itself, or the object its class path describes; of a function, the function."""
    if not (isinstance(value, Mapping) and "class_path" in value):
        return value
    kind, arguments = _class_and_arguments(value, name)
    if not inspect.isclass(kind):
        return kind
    return call(kind, {key: _built(item, f"{name}.{key}") for key, item in arguments.items()}, name)


def _class_and_arguments(value: Mapping[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """Returns what a class path names, and its ``init_args``."""
    beyond = set(value) - {"class_path", "init_args"}
    if beyond:
        raise ValueError(f"{name} has {sorted(beyond)}; beside class_path only init_args is accepted")
    arguments = value.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise TypeError(f"init_args of {name} is {arguments!r}; it must be arguments by name")
    return imported(value["class_path"], name, _EXAMPLES.get(name, _EXAMPLES["levels"])), dict(arguments)


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func.__module__.startswith(f"{__package__}.")


def _as_list(hooks: Any) -> list[Any]:
    if hooks is None:
        return []
    return list(hooks) if isinstance(hooks, list | tuple) else [hooks]
