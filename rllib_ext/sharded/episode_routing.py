# SPDX-License-Identifier: Apache-2.0
"""Choice of a shard for the steps of each episode, made in the EnvRunner that collects them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import ray

from lightning_replay.sharded.routing import Router
from rllib_ext.rllib_compat import Attached

NUM_SHARDS = "num_shards"


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeReference:
    """Fragments of episodes of one shard in Ray's object store, in place of the fragments themselves.

    Not a tuple, as RLlib flattens what its EnvRunners return.
    """

    shard: int
    reference: ray.ObjectRef[Any]  # of a list of episodes
    num_steps: int  # theirs together


def put_episodes(router: Router, episodes: Sequence[Any]) -> list[EpisodeReference]:
    """Puts episodes into the object store, one object for each shard that gets some."""
    by_shard: dict[int, list[Any]] = {}
    for episode in episodes:
        if len(episode):
            shard = router.shard_of(episode.id_, len(episode), ended=episode.is_done)
            by_shard.setdefault(shard, []).append(episode)
    return [EpisodeReference(shard, ray.put(parts), sum(map(len, parts))) for shard, parts in sorted(by_shard.items())]


_ROUTER = Attached[Router]("episode_router")  # of EnvRunners


def push_episodes(*, env_runner: Any, samples: MutableSequence[Any], **ignored: Any) -> None:
    """Replaces collected episodes by references; the callback ``on_sample_end``.

    The episodes themselves are left as they are, because metrics are computed from them. EnvRunners that evaluate
    return theirs.
    """
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
    return int(replay_buffer_config.get(NUM_SHARDS) or 0)
