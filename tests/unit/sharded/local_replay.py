# SPDX-License-Identifier: Apache-2.0
"""A sharded replay whose coordinator and shards are in the process of the test; rows go through the object store."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from lightning_replay.sharded import ShardedReplay
from lightning_replay.sharded.coordinator import Coordinator
from lightning_replay.sharded.replay import Connection
from tests.unit.rllib_ext.local_shards import start_locally

COORDINATORS: dict[str, Coordinator] = {}  # by name of the replay


class LocalConnection(Connection):
    """Calls the coordinator here, with arguments that are copied as they would be on their way."""

    def __init__(self, name: str, wait_timeout_s: float, coordinator: Coordinator) -> None:
        self.wait_timeout_s, self.coordinator = wait_timeout_s, coordinator
        COORDINATORS[name] = coordinator

    def _call(self, method: str, arguments: tuple[Any, ...], left_s: float) -> Any:
        return self.coordinator.call("here", method, max(left_s, 0.0), arguments)

    def stop(self) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __deepcopy__(self, memo: Any) -> LocalConnection:
        return self


def started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    start_locally(monkeypatch)

    def start(name: str, wait_timeout_s: float, *arguments: Any) -> LocalConnection:
        coordinator = Coordinator(*copy.deepcopy(arguments))
        connection = LocalConnection(name, wait_timeout_s, coordinator)
        connection.call("start", timeout_s=60)
        return connection

    monkeypatch.setattr(Connection, "start", start)


def coordinator_of(replay: ShardedReplay) -> Coordinator:
    return COORDINATORS[replay.name]


def shards_of(replay: ShardedReplay) -> list[Any]:
    return [handle.shard.held for handle in coordinator_of(replay).shards.handles]


def built(recipe: str = "prioritized", num_shards: int = 2, **options: Any) -> ShardedReplay:
    """Returns an empty one of 100 rows, two shards and batches of 8."""
    given: dict[str, Any] = {"capacity": 100, "batch_size": 8, "seed": 3, "wait_timeout_s": 0.05} | options
    return ShardedReplay(recipe, num_shards, **given)


def filled(**options: Any) -> ShardedReplay:
    """Returns one of 40 rows in three episodes."""
    replay = built(**options)
    for first, count in ((0, 4), (4, 30), (34, 6)):
        replay.extend(steps(first, count))
    return replay


def numbers(replay: ShardedReplay) -> list[list[int]]:
    """The actions stored in each shard, oldest first."""
    return [one.storage.get(one.oldest_first())["action"].tolist() if len(one) else [] for one in shards_of(replay)]


def steps(first: int, count: int, trajectory: int | None = None, *, ends: bool = True, **columns: Any) -> TensorDict:
    """Rows numbered from ``first`` in ``action``; each pays its number, and the last one may end the episode."""
    number = torch.arange(first, first + count)
    terminated = torch.zeros(count, 1, dtype=torch.bool)
    terminated[-1] = ends
    following = {
        "observation": number.float()[:, None] + 1,
        "reward": number.float()[:, None],
        "terminated": terminated,
        "truncated": torch.zeros_like(terminated),
    }
    rows = TensorDict({"observation": number.float()[:, None], "action": number, "next": following}, [count])
    if trajectory is not None:
        rows["trajectory"] = torch.full((count,), trajectory)
    for name, value in columns.items():
        rows[name] = value
    return rows
