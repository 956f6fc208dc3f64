# SPDX-License-Identifier: Apache-2.0
"""Choice of a shard for the steps of each episode, and the CPUs that shards need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune import PlacementGroupFactory

from lightning_replay.sharded.options import split_options
from lightning_replay.sharded.rows import Router
from rllib_ext.rllib_compat import Attached, settings_of_buffer

NUM_SHARDS = "num_shards"


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeReference:
    """Fragments of episodes of one shard in Ray's object store. It is no tuple, which RLlib would flatten."""

    shard: int
    reference: ray.ObjectRef[Any]  #: Reference of a list of episodes.
    num_steps: int  # theirs together


def put_episodes(router: Router, episodes: Sequence[Any]) -> list[EpisodeReference]:
    """Puts episodes into the object store, one object for each shard that gets some."""
    by_shard: dict[int, list[Any]] = {}
    for episode in episodes:
        if len(episode):
            shard = router.shard_of(episode.id_, len(episode), ended=episode.is_done)
            by_shard.setdefault(shard, []).append(episode)
    return [EpisodeReference(shard, ray.put(parts), sum(map(len, parts))) for shard, parts in sorted(by_shard.items())]


# The router of each EnvRunner.
_ROUTER = Attached[Router]("episode_router")


def push_episodes(*, env_runner: Any, samples: MutableSequence[Any], **ignored: Any) -> None:
    """Replaces collected episodes by references, except in evaluation. The callback ``on_sample_end``."""
    config = env_runner.config
    if config.in_evaluation:
        return
    router = _ROUTER.of(env_runner)
    num_shards = num_shards_in(config.replay_buffer_config)
    if router is None or len(router.num_steps) != num_shards:
        first = max(env_runner.worker_index or 0, 1) - 1
        router = Router(num_shards, first * config.num_envs_per_env_runner)
        _ROUTER.set(env_runner, router)
    samples[:] = put_episodes(router, samples)


def num_shards_in(replay_buffer_config: Mapping[str, Any]) -> int:
    """Returns the number of shards of a ``replay_buffer_config``, 0 for a buffer in the driver."""
    return int(replay_buffer_config.get(NUM_SHARDS) or 0)


class CountsShards:
    """An algorithm, mixed into its class, that requests a bundle of CPUs for each shard beside RLlib's bundles."""

    @classmethod
    def default_resource_request(cls, config: AlgorithmConfig | Mapping[str, Any]) -> PlacementGroupFactory:
        """Adds the CPUs of shards to the resources that Tune reserves for a trial."""
        # Called by Tune with the trial's values.
        request = super().default_resource_request(config)  # type: ignore[misc]
        of_trial = cls.get_default_config().update_from_dict(config)  # type: ignore[attr-defined]
        return PlacementGroupFactory([*request.bundles, *bundles_of_shards(of_trial)], strategy=request.strategy)


@functools.cache
def counting_shards(algorithm: type) -> Any:
    """Returns the class of an algorithm whose resource request counts shards."""
    if issubclass(algorithm, CountsShards):
        return algorithm
    return type(f"Sharded{algorithm.__name__}", (CountsShards, algorithm), {"__doc__": algorithm.__doc__})


def bundles_of_shards(config: AlgorithmConfig) -> list[dict[str, float]]:
    """Returns the CPUs that shards reserve, one bundle for each."""
    # Of each shard. There is none for a buffer in the driver, or if shards reserve none.
    settings = settings_of_buffer(config)
    if not num_shards_in(settings):
        return []
    options, _ = split_options({name: value for name, value in settings.items() if name != "type"})
    cpus = options.num_cpus_per_shard
    return [{"CPU": cpus}] * options.num_shards if cpus else []


def check_trial(config: AlgorithmConfig) -> None:
    """Refuses a trial of Tune that has no CPUs for its shards: they would wait forever."""
    group = ray.util.get_current_placement_group()
    of_shards = bundles_of_shards(config)
    if group is None or not of_shards:
        return
    request = counting_shards(config.algo_class).default_resource_request(config)
    needed = sum(bundle.get("CPU", 0) for bundle in request.bundles)
    present = sum(bundle.get("CPU", 0) for bundle in group.bundle_specs)
    if present < needed:
        raise ValueError(
            f"the trial has {present:g} CPUs, and it needs {needed:g} with those of {len(of_shards)} shards, which "
            "would wait for ever. Give the class that counts them, tune.Tuner(config.algo_class, param_space=config) "
            "after configure(config), and not the name of the algorithm; or num_cpus_per_shard=0, which reserves none"
        )
