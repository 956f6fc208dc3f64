# SPDX-License-Identifier: Apache-2.0
"""Checks, settings and callbacks by which an algorithm's config is prepared for transitions or for levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_ext.buffer.frame_stacks import choose_module
from rllib_ext.checks import (
    check_buffer,
    check_cpus,
    check_curriculum,
    replay_options,
    trial_buffer,
    with_max_trajectories,
)
from rllib_ext.environments import check_environment, copy_results
from rllib_ext.episodes.task_assignment import assigned, begin_episode
from rllib_ext.hooks import Hook, install_levels, install_replay, sync_recreated
from rllib_ext.learner.done_flags_connector import flags_connector
from rllib_ext.levels import evaluation, playing
from rllib_ext.levels.building import checked_levels
from rllib_ext.levels.checks import check_discount
from rllib_ext.rllib_compat import num_actors
from rllib_ext.search_spaces import accepted, has_search_space, sampled_configs
from rllib_ext.sharded.episode_routing import num_shards_in, push_episodes
from rllib_ext.sharded.resources import counting_shards

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
) -> dict[str, Hook]:
    """Checks and prepares a config for its replay buffer; returns the callbacks by event."""
    samples = sampled_configs(config)
    in_tune = samples[0] is not config
    played: list[tuple[Any, Any]] = []  # most searches have one environment, which may be slow to make

    def check(sample: AlgorithmConfig) -> None:
        check_buffer(sample)
        if require_cpus:
            check_cpus(sample, in_tune=in_tune)
        if check_environments and (sample.env, sample.env_config) not in played:
            check_environment(sample, next(iter(sample.replay_buffer_config.get("tasks") or ()), None))
            played.append((sample.env, sample.env_config))

    samples = accepted(samples, check)
    environments = max(map(num_actors, samples))
    config.replay_buffer_config = with_max_trajectories(config.replay_buffer_config, environments)
    if config._learner_connector is None:
        config.learners(learner_connector=flags_connector)
    choose_module(config, samples)
    tasks = _tasks(samples)
    assigns = assign_tasks and bool(tasks) and not config.is_multi_agent
    hooks: dict[str, Hook] = {
        "on_algorithm_init": Hook(install_replay, restore=restore, incremental=incremental, assign_tasks=assigns),
        "on_environment_created": Hook(copy_results),
    }
    if any(num_shards_in(sample.replay_buffer_config) for sample in samples):
        hooks["on_sample_end"] = Hook(push_episodes)
        config.algo_class = counting_shards(config.algo_class)
    if assigns:
        replay = trial_buffer(**replay_options(samples[0])).replay
        first = assigned(replay, samples[0])
        check_curriculum(samples[0], replay, first)
        hooks["on_episode_created"] = Hook(begin_episode, target=tasks[0], first=first)
        hooks["on_env_runners_recreated"] = Hook(sync_recreated)
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
) -> dict[str, Hook]:
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
    hooks: dict[str, Hook] = {
        "on_algorithm_init": Hook(
            install_levels,
            packed=None if built_by_trials else cloudpickle.dumps(sources[0][1]),
            flush=flush,
            held_out=held_out if in_tune else None,
        ),
        "on_environment_created": Hook(playing.wrap_environments),
        "on_episode_created": Hook(playing.begin_episode, held_out=held_out),
        "on_env_runners_recreated": Hook(sync_recreated),
        "on_evaluate_start": Hook(evaluation.check_evaluation, held_out=held_out),
    }
    if generalization_gap:
        hooks["on_episode_end"] = Hook(evaluation.note_return)
        hooks["on_evaluate_end"] = Hook(evaluation.measure_gap)
    return hooks


def _tasks(samples: list[AlgorithmConfig]) -> list[str]:
    """Returns the tasks of the curriculum, none for other buffers."""
    found = [list(sample.replay_buffer_config.get("tasks") or ()) for sample in samples]
    other = next((tasks for tasks in found if tasks != found[0]), None)
    if other is not None:
        raise ValueError(
            f"the search space has buffers of different tasks, such as {found[0]} and {other}; the environments are "
            "prepared for one list. Search over each in a Tuner of its own"
        )
    return found[0]
