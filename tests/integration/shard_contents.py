# SPDX-License-Identifier: Apache-2.0
"""What the actors of a sharded replay hold and get, for its tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

from rllib_ext.learner.remote_blocks import BlockReader
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def lose(handle: Any) -> None:
    """Ends the process of a shard, and waits until its calls raise errors."""
    ray.kill(handle)
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):
            ray.get(handle.report.remote())
            time.sleep(0.1)


def on_shards(replay: ShardedEpisodeReplayBuffer, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs a function of a shard inside every one."""
    return ray.get([handle.__ray_call__.remote(function, *arguments) for handle in replay.shards.handles])


def stored(shard: Any) -> tuple[list[int], list[int], list[float]]:
    """Step number, trajectory and leaf of the tree of each row."""
    replay = shard.held.replay
    if not len(replay):
        return [], [], []
    slots = replay.oldest_first()
    rows = replay.storage.get(slots)
    leaves = replay.sampler.priority_of(slots).double().add(replay.sampler.priority_offset).pow(0.7)
    return rows["observation"][:, 0].int().tolist(), rows["trajectory"].tolist(), leaves.tolist()


def trajectories(shard: Any) -> list[list[tuple[float, float]]]:
    """Observation and priority of each row, by trajectories."""
    replay = shard.held.replay
    found: dict[int, list[tuple[float, float]]] = {}
    if len(replay):
        slots = replay.oldest_first()
        rows, priority = replay.storage.get(slots), replay.sampler.priority_of(slots)
        columns = (rows["trajectory"], rows["observation"][:, 0], priority)
        for trajectory, observation, one in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(trajectory, []).append((observation, one))
    return sorted(found.values())


def watch(shard: Any) -> None:
    """Notes for each TD error whether it comes to the row whose observation it is."""
    replay, shard.home = shard.held.replay, []
    update = replay.update_priority

    def compared(index: Any, td_error: Any, **rest: Any) -> None:
        shard.home.extend((replay.storage.get(index)["observation"][:, 0] == td_error).tolist())
        update(index, td_error, **rest)

    replay.update_priority = compared


def homes(shard: Any) -> list[bool]:
    found, shard.home = shard.home, []
    return found


def read(blocks: list[Any]) -> list[Any]:
    blocks = list(blocks)
    BlockReader().read(blocks)
    return blocks


def observations(blocks: list[Any]) -> np.ndarray:
    return np.concatenate([one.get_observations(slice(0, len(one)))[:, 0] for one in read(blocks)])
