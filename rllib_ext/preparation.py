# SPDX-License-Identifier: Apache-2.0
"""Checks, settings and callbacks by which an algorithm's config is prepared for transitions or for levels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_ext.buffer.episode_buffer import RecipeEpisodeReplayBuffer
from rllib_ext.buffer.frame_stacks import choose_module
from rllib_ext.checks import (
    check_buffer,
    check_capacity,
    check_cpus,
    check_curriculum,
    check_returns,
    check_room_for_episodes,
    with_room_for_episodes,
)
from rllib_ext.environments import check_environment
from rllib_ext.episodes.task_assignment import assigned, begin_episode
from rllib_ext.hooks import install, sync_recreated
from rllib_ext.learner.done_flags_connector import flags_connector
from rllib_ext.levels import evaluation, playing
from rllib_ext.levels.building import checked_levels
from rllib_ext.levels.checks import check_discount
from rllib_ext.rllib_compat import num_actors
from rllib_ext.search_spaces import accepted, has_search_space, sampled_configs

if TYPE_CHECKING:
    from lightning_replay.levels import LevelSelector


def prepare_replay(
    config: AlgorithmConfig,
    *,
    restore: bool,
    incremental: bool,
    assign_tasks: bool,
    require_cpus: bool,
    check_environments: bool,
) -> dict[str, Callable[..., None]]:
    """Checks and prepares a config for its replay buffer; returns the callbacks by event."""
    samples = sampled_configs(config)
    in_tune = samples[0] is not config
    played: list[tuple[Any, Any]] = []  # most searches have one environment, which may be slow to make

    def check(sample: AlgorithmConfig) -> None:
        check_buffer(sample)
        check_room_for_episodes(sample)
        check_capacity(sample)
        if require_cpus:
            check_cpus(sample, in_tune=in_tune)
        check_returns(sample, functools.partial(trial_buffer, **_given(sample)))
        if check_environments and (sample.env, sample.env_config) not in played:
            check_environment(sample)
            played.append((sample.env, sample.env_config))

    samples = accepted(samples, check)
    environments = max(map(num_actors, samples))
    config.replay_buffer_config = with_room_for_episodes(config.replay_buffer_config, environments)
    if config._learner_connector is None:
        config.learners(learner_connector=flags_connector)
    choose_module(config, samples)
    tasks = _tasks(samples)
    assigns = assign_tasks and bool(tasks) and not config.is_multi_agent
    hooks: dict[str, Callable[..., None]] = {
        "on_algorithm_init": functools.partial(install, restore=restore, incremental=incremental, assign_tasks=assigns),
    }
    if assigns:
        replay = trial_buffer(**_given(samples[0])).replay
        first = assigned(replay, samples[0])
        check_curriculum(samples[0], replay, first)
        hooks["on_episode_created"] = functools.partial(begin_episode, target=tasks[0], first=first)
        hooks["on_env_runners_recreated"] = functools.partial(sync_recreated)
    return hooks


def prepare_levels(
    config: AlgorithmConfig,
    levels: LevelSelector | Mapping[str, Any],
    held_out: Sequence[int],
    *,
    flush: bool,
    generalization_gap: bool,
    require_cpus: bool,
    check_environments: bool,
) -> dict[str, Callable[..., None]]:
    """Checks and prepares a config for levels; returns the callbacks by event."""
    vars(config).pop("levels", None)  # of an earlier call
    built_by_trials = isinstance(levels, Mapping) and has_search_space({**vars(config), "levels": levels})
    if built_by_trials:
        config.levels = levels
    samples = sampled_configs(config)
    in_tune = samples[0] is not config
    sources: list[tuple[AlgorithmConfig, LevelSelector]] = []

    def check(sample: AlgorithmConfig) -> None:
        given = sample.levels if built_by_trials else levels
        source = checked_levels(given, sample, held_out, flush=flush, check_environments=check_environments)
        if require_cpus:
            check_cpus(sample, in_tune=in_tune)
        sources.append((sample, source))

    accepted(samples, check)
    check_discount(*sources[0])
    hooks: dict[str, Callable[..., None]] = {
        "on_algorithm_init": functools.partial(
            install,
            packed=None if built_by_trials else cloudpickle.dumps(sources[0][1]),
            flush=flush,
            held_out=held_out if in_tune else None,
        ),
        "on_environment_created": functools.partial(playing.wrap_environments),
        "on_episode_created": functools.partial(playing.begin_episode, held_out=held_out),
        "on_env_runners_recreated": functools.partial(sync_recreated),
        "on_evaluate_start": functools.partial(evaluation.check_evaluation, held_out=held_out),
    }
    if generalization_gap:
        hooks["on_episode_end"] = functools.partial(evaluation.note_return)
        hooks["on_evaluate_end"] = functools.partial(evaluation.measure_gap)
    return hooks


def _given(config: AlgorithmConfig) -> dict[str, Any]:
    """Returns the arguments of :func:`replay_config` in a config without search spaces."""
    return {name: value for name, value in config.replay_buffer_config.items() if name != "type"}


def _tasks(samples: list[AlgorithmConfig]) -> list[str]:
    """Returns tasks of the curriculum, empty where there is none.

    Raises:
        ValueError: trials would have different tasks.
    """
    found = [list(sample.replay_buffer_config.get("tasks") or ()) for sample in samples]
    if any(tasks != found[0] for tasks in found):
        raise ValueError(
            f"the search space has buffers of different tasks, such as {found[0]} and "
            f"{next(tasks for tasks in found if tasks != found[0])}; the environments are prepared for one list. "
            "Search over each in a Tuner of its own"
        )
    return found[0]


def trial_buffer(recipe: str | None = None, **options: Any) -> RecipeEpisodeReplayBuffer:
    """Builds a temporary buffer, so that wrong values raise an error here and not inside a Ray actor."""
    # With a seed, because without one it would draw its own from torch's global generator.
    trial = {**options, "seed": 0 if options.get("seed") is None else options["seed"]}
    if "memmap" in options:
        trial["memmap"] = None
    return RecipeEpisodeReplayBuffer(recipe, **trial)
