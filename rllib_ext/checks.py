# SPDX-License-Identifier: Apache-2.0
"""What an algorithm's config must fulfil before a replay buffer of ours can work in it."""

from __future__ import annotations

import os

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_ext.episode_buffer import RecipeEpisodeReplayBuffer


def check_algorithm(config: AlgorithmConfig) -> None:
    """Refuses algorithms without a replay buffer, the old API stack, and buffers of another kind.

    Raises:
        ValueError: with the reason.
    """
    from ray.rllib.algorithms.cql import CQL
    from ray.rllib.algorithms.dqn import DQN
    from ray.rllib.algorithms.iql import IQL

    algorithm = config.algo_class
    name = getattr(algorithm, "__name__", str(algorithm))
    if isinstance(algorithm, type) and issubclass(algorithm, CQL | IQL):
        raise ValueError(
            f"{name} reads offline data and has no replay buffer on the new API stack; its data set is given with "
            ".offline_data(...). Replay buffers work with DQN, SAC and TQC"
        )
    if not (isinstance(algorithm, type) and issubclass(algorithm, DQN)):
        raise ValueError(f"{name} has no replay buffer on the new API stack; DQN, SAC and TQC have one")
    if not (config.enable_rl_module_and_learner and config.enable_env_runner_and_connector_v2):
        raise ValueError(
            "the config is on the old API stack, whose buffers are given sample batches and not episodes. Remove "
            ".api_stack(...), or set both of its options to True"
        )
    kind = config.replay_buffer_config.get("type")
    if kind is not RecipeEpisodeReplayBuffer:
        raise ValueError(
            f"replay_buffer_config is of type {kind!r}; first give "
            '.training(replay_buffer_config=rllib_ext.replay_config("prioritized", capacity=100_000))'
        )


def check_capacity(config: AlgorithmConfig) -> None:
    """Refuses a capacity below the steps of one round of sampling, or below the rows of a batch.

    Raises:
        ValueError: with both numbers.
    """
    given = config.replay_buffer_config
    special = [
        options["capacity"] for options in (given.get("modules") or {}).values() if "capacity" in (options or {})
    ]
    capacity = min(given["capacity"], *special) if special else given["capacity"]
    environments = max(config.num_env_runners, 1) * config.num_envs_per_env_runner
    steps = environments * config.get_rollout_fragment_length()
    if capacity < steps:
        raise ValueError(
            f"capacity is {capacity}, and one round of sampling brings {steps} steps ({environments} environments, "
            f"{config.get_rollout_fragment_length()} steps each). Give the buffer room for several rounds"
        )
    if capacity < config.total_train_batch_size:
        raise ValueError(
            f"capacity is {capacity}, below the {config.total_train_batch_size} rows of a train batch. "
            "Raise the capacity or lower train_batch_size_per_learner"
        )


def check_cpus(config: AlgorithmConfig) -> None:
    """Refuses more actors than Ray has CPUs for: it would wait for ever, without a word.

    The driver itself asks for nothing outside Tune.

    Raises:
        ValueError: with both numbers.
    """
    if not ray.is_initialized() and os.environ.get("RAY_ADDRESS", "local") != "local":
        return  # a cluster that is not known yet
    actors = config.algo_class.default_resource_request(config).bundles[1:]
    needed = sum(bundle.get("CPU", 0) for bundle in actors)
    if ray.is_initialized():
        present = ray.cluster_resources().get("CPU", 0)
        remedy = "start Ray with more, ray.init(num_cpus=...), or a larger cluster; or use fewer"
    else:
        present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        remedy = f"call ray.init(num_cpus={needed:g}) before configure() (CPUs are counted, not pinned), or use fewer"
    if needed > present:
        raise ValueError(
            f"{config.num_env_runners} EnvRunners, {config.num_learners} Learners and what evaluates ask for "
            f"{needed:g} CPUs and Ray has {present:g}: build_algo() would wait for ever. Either {remedy}; "
            "configure(require_cpus=False) leaves this check out"
        )
