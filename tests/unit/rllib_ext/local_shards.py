# SPDX-License-Identifier: Apache-2.0
"""Shards in the process of the test, which start in no time: a call is made when it is sent, in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

from lightning_replay.sharded.actors import ShardActors
from lightning_replay.sharded.rows import RowIds, row_ids_of
from rllib_ext.learner.remote_blocks import BlockReader
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer


class LocalShard:
    """An actor's handle whose methods run here; answers go through the object store."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    def __getattr__(self, name: str) -> Any:
        return LocalMethod(getattr(self.shard, name))


class LocalMethod:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> ray.ObjectRef:
        return ray.put(self._method(*arguments))


def start_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(actors: Any, shard: int) -> LocalShard:
        return LocalShard(actors.kind(*actors.arguments_of(shard)))

    monkeypatch.setattr(ShardActors, "new_actor", local)


def replays(replay: ShardedEpisodeReplayBuffer, module_id: str = "default_policy") -> list[Any]:
    return [handle.shard.held.modules[module_id].replay for handle in replay.shards.handles]


def awaited(replay: ShardedEpisodeReplayBuffer, module_id: str = "default_policy") -> RowIds:
    """The rows whose TD errors come next."""
    return row_ids_of(*replay.expected[module_id])


def read(blocks: list[Any]) -> list[Any]:
    """The blocks as a Learner gets them."""
    blocks = list(blocks)
    BlockReader().read(blocks)
    return blocks


def first_numbers(block: Any) -> np.ndarray:
    return block.get_observations(slice(0, len(block)))[:, 0]
