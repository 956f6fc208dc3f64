# SPDX-License-Identifier: Apache-2.0
"""Checks of an algorithm's config, and of its replay buffer. Checks of levels are in ``levels/checks.py``."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQN
from ray.rllib.algorithms.iql import IQL
from ray.rllib.algorithms.sac import SAC

from lightning_replay.fast_path import overrides
from lightning_replay.replay import Replay
from lightning_replay.sharded.options import check_room, split_options
from lightning_replay.table_replay import CurriculumReplay
from rllib_ext.buffer.buffer import SEVERAL_LEARNERS, RecipeEpisodeReplayBuffer
from rllib_ext.buffer.building import CAPACITIES, RECIPE_DEFAULTS
from rllib_ext.rllib_compat import algorithm_name, num_actors, settings_of_buffer
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from rllib_ext.sharded.routing import counting_shards, num_shards_in
from rllib_ext.sharded.shard import check_shard_layout, options_of_shard

logger: logging.Logger = logging.getLogger(__name__)


def check_api_stack(config: AlgorithmConfig, reason: str) -> None:
    """Raises ``ValueError`` for a config on RLlib's old API stack."""
    if not (config.enable_rl_module_and_learner and config.enable_env_runner_and_connector_v2):
        raise ValueError(
            f"the config is on the old API stack, {reason}. Remove .api_stack(...), or set both of its options to True"
        )


def check_algorithm(config: AlgorithmConfig) -> None:
    """Refuses algorithms without a replay buffer, and the old API stack."""
    kind = config.algo_class
    name = algorithm_name(config)
    # IQL, which derives from SAC, reads offline data instead.
    if not (isinstance(kind, type) and issubclass(kind, DQN)) or issubclass(kind, IQL):
        raise ValueError(
            f"{name} has no replay buffer on the new API stack; DQN, SAC, TQC and CQL have one. Levels are replayed "
            "with PPO, APPO and IMPALA, rllib_ext.configure(config, levels=...)"
        )
    check_api_stack(config, "whose buffers are given sample batches and not episodes")


def check_buffer(config: AlgorithmConfig) -> None:
    """Refuses buffers of another kind, and those too small for the algorithm's environments and batches."""
    kind = config.replay_buffer_config.get("type")
    kinds = (RecipeEpisodeReplayBuffer, ShardedEpisodeReplayBuffer)
    if not (isinstance(kind, type) and issubclass(kind, kinds)):
        instead = (
            # RLlib merges a dict without a type into the algorithm's default buffer.
            "a grid of whole buffers is set as an attribute, config.replay_buffer_config = tune.grid_search([...])"
            if "grid_search" in config.replay_buffer_config
            else 'first give .training(replay_buffer_config=rllib_ext.replay_config("prioritized", capacity=100_000))'
        )
        raise ValueError(f"replay_buffer_config is of type {kind!r}; {instead}")
    given = config.replay_buffer_config
    environments = num_actors(config)
    most = given.get("max_trajectories")
    if given.get("recipe") == "event_tables" and most is not None and most < environments:
        raise ValueError(
            f"max_trajectories is {most}, and {environments} environments run an episode each. Give at least "
            f"{environments}; lost EnvRunners leave episodes that count for a while, so twice that is better"
        )
    every = [given, *({**given, **(special or {})} for special in (given.get("modules") or {}).values())]
    found = [(options, name) for options in every for name in CAPACITIES if options.get(name) is not None]
    options, name = min(found, key=lambda one: one[0][one[1]])
    capacity = options[name]
    fragment = config.get_rollout_fragment_length()
    # Of a curriculum the capacity is that of each task, and a round brings steps of all of them.
    tasks = len(options.get("tasks") or ()) if name == "capacity_per_task" else 1
    steps = math.ceil(environments / max(tasks, 1)) * fragment
    if capacity < steps:
        raise ValueError(
            f"{name} is {capacity}, and one round of sampling brings {steps} steps ({environments} environments, "
            f"{fragment} steps each). Raise the capacity to that of several rounds"
        )
    if capacity < config.total_train_batch_size:
        raise ValueError(
            f"{name} is {capacity}, below the {config.total_train_batch_size} rows of a train batch. "
            "Raise the capacity or lower train_batch_size_per_learner"
        )
    number = num_shards_in(given)
    if number and config.batch_mode == "truncate_episodes":
        least = trial_buffer(**replay_options(config)).modules
        rows = min(module.max_rows for module in least.values())
        if rows < fragment:
            raise ValueError(
                f"num_shards is {number}, which leaves {rows} rows to a shard, and an EnvRunner sends {fragment} steps "
                "of an episode at once, which go to one shard. Give fewer shards, or raise the capacity"
            )


def check_discounts(config: AlgorithmConfig, replays: Sequence[Replay]) -> None:
    """Refuses rewards that are shaped with another discount than the algorithm's."""
    for _, discount in (one for replay in replays for one in replay.returns):
        if discount != config.gamma:
            raise ValueError(
                f"a transform of the replay has the discount {discount}, and gamma is {config.gamma}, so that other "
                "policies would be the best ones. Give both the same"
            )


def check_recurrent(config: AlgorithmConfig, modules: Sequence[str]) -> None:
    """Refuses algorithms and buffers from which these modules, recurrent ones, cannot learn."""
    from rllib_ext.buffer.sequences import check_sequences

    # The Learner of SAC, TQC and CQL has no mask for steps that fill up sequences.
    if issubclass(config.algo_class, SAC) and config.learner_class is config.get_default_learner_class():
        raise ValueError(
            f"{algorithm_name(config)} of RLlib learns from single steps alone, and the modules {list(modules)} are "
            "recurrent. Train with DQN, where actions are discrete, or use modules without state (use_lstm=False)"
        )
    if config.is_multi_agent and config.num_learners > 1:
        raise ValueError(SEVERAL_LEARNERS)
    if num_shards_in(config.replay_buffer_config):
        raise ValueError(
            "a recurrent module learns from sequences, which are not drawn from shards. Leave num_shards out, or use a "
            "module without state"
        )
    if not config.model_config.get("max_seq_len"):
        raise ValueError(
            "a recurrent module learns from sequences, and the config has no length for them. Give "
            '.rl_module(model_config={"max_seq_len": 20, ...})'
        )
    trial = trial_buffer(**replay_options(config))
    for module in filter(trial.options.stores, modules):
        check_sequences(trial.options.build(module).replay, config.n_step)


def replay_options(config: AlgorithmConfig) -> dict[str, Any]:
    """Returns the options of a config's buffer, without options that RLlib reads or adds."""
    of_rllib = ("type", "metrics_num_episodes_for_smoothing")
    return {name: value for name, value in config.replay_buffer_config.items() if name not in of_rllib}


def trial_buffer(recipe: str | None = None, **options: Any) -> RecipeEpisodeReplayBuffer:
    """Builds a temporary buffer (of shards, that of one), so that wrong values are refused here and not in an actor."""
    if options.get("num_shards") is not None:
        shards, options = split_options(options)
        check_shard_layout(options.get("layout"))
        options = options_of_shard(options, shards.num_shards, 0)
    # With a seed, because without one it would draw its own from torch's global generator.
    trial = {**options, "seed": 0 if options.get("seed") is None else options["seed"]}
    if "memmap" in options:
        trial["memmap"] = None
    return RecipeEpisodeReplayBuffer(recipe, **trial)


def with_max_trajectories(given: dict[str, Any], environments: int) -> dict[str, Any]:
    """Returns a ``replay_buffer_config`` whose event tables hold the histories of all running and lost episodes."""
    if given.get("recipe") != "event_tables" or given.get("max_trajectories") is not None:
        return given
    return {**given, "max_trajectories": max(2 * environments, RECIPE_DEFAULTS["event_tables"]["max_trajectories"])}


def check_curriculum(config: AlgorithmConfig, replay: CurriculumReplay, first: Sequence[str]) -> None:
    """Warns of a curriculum without progress signals, or with tasks that no environment plays ``first``."""
    from lightning_replay.schedulers import Scheduler

    # The base class ignores signals.
    uses_progress = overrides(replay.sampler.scheduler, Scheduler, "progress")
    if uses_progress and config.replay_buffer_config.get("progress") is None:
        logger.warning(
            "the curriculum's scheduler gets no progress signals: give replay_config(progress="
            "lightning_replay.schedulers.MeanReturn(low=..., high=...)), or call replay.progress(task, signal) yourself"
        )
    unplayed = [task for task in replay.tasks if task not in first]
    if unplayed and len(replay.tables) >= len(replay.tasks):  # not in stages
        logger.warning(
            f"{len(first)} environments play the tasks {list(first)}; none plays {unplayed}. Give an environment to "
            f"each of the {len(replay.tasks)} tasks: .env_runners(num_env_runners={len(replay.tasks)})"
        )


def check_cpus(config: AlgorithmConfig, *, in_tune: bool = False) -> None:
    """Refuses more actors than Ray has CPUs for, as it would wait forever. A trial of Tune also takes a CPU."""
    if not ray.is_initialized() and os.environ.get("RAY_ADDRESS", "local") != "local":
        return  # a cluster that is not connected yet
    driver, *actors = counting_shards(config.algo_class).default_resource_request(config).bundles
    needed = sum(bundle.get("CPU", 0) for bundle in ([driver, *actors] if in_tune else actors))
    holders = ""
    if num_shards_in(settings_of_buffer(config)):
        shards, _ = split_options(replay_options(config))
        holders = f", {shards.num_shards} shards (num_cpus_per_shard={shards.num_cpus_per_shard:g})"
    if ray.is_initialized():
        present = ray.cluster_resources().get("CPU", 0)
        remedy = "start Ray with more, ray.init(num_cpus=...), or a larger cluster; or use fewer"
    else:
        present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        remedy = f"call ray.init(num_cpus={needed:g}) first (CPUs are counted, not pinned), or use fewer"
    if needed > present:
        raise ValueError(
            f"{config.num_env_runners} EnvRunners, {config.num_learners} Learners{holders} and evaluation need "
            f"{needed:g} CPUs and Ray has {present:g}: {'the trial' if in_tune else 'build_algo()'} would wait for "
            f"ever. Either {remedy}; require_cpus=False leaves this check out"
        )
    if holders and ray.is_initialized():
        check_room(shards)
