# SPDX-License-Identifier: Apache-2.0
"""Options of shards: how many there are, where they run, and what becomes of one that is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from lightning_replay.options import ABOVE_ZERO, checked_choice, checked_count, checked_number

PLACEMENTS = ("spread", "pack")
RESTARTS = ("empty", "last_save")


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """How many shards there are, where they run, and what becomes of one that is lost.

    Attributes:
        num_shards: Ray actors that hold the rows; each has its part of every capacity, rounded up.
        num_cpus_per_shard: that Ray reserves for each; 0 reserves none.
        shard_placement: ``"spread"`` over the nodes, or ``"pack"`` on the nodes of the Learners as far as there is
            room.
        restart_shards: a shard that is lost starts again ``"empty"``, or with its rows of the ``"last_save"`` of the
            algorithm, if there is one.
        shard_timeout_s: seconds after which a draw goes on without a shard that has not answered, and another call of
            all shards raises an error; after four times as long the shard is ended and started again, as one that is
            lost.
        save_timeout_s: seconds that a save or a load may take.
        num_prefetch: draws in flight ahead of the Learners. Their rows wait in the object store, and are as old as the
            updates that have been made since.
    """

    num_shards: int
    num_cpus_per_shard: float = 1
    shard_placement: str = "spread"
    restart_shards: str = "empty"
    shard_timeout_s: float = 60.0
    save_timeout_s: float = 1800.0
    num_prefetch: int = 0

    def __post_init__(self) -> None:
        checked_count("num_shards", self.num_shards, of="shards")
        checked_number("num_cpus_per_shard", self.num_cpus_per_shard, 0.0)
        checked_choice("shard_placement", self.shard_placement, PLACEMENTS)
        checked_choice("restart_shards", self.restart_shards, RESTARTS)
        checked_number("shard_timeout_s", self.shard_timeout_s, ABOVE_ZERO)
        checked_number("save_timeout_s", self.save_timeout_s, ABOVE_ZERO)
        checked_count("num_prefetch", self.num_prefetch, 0, of="draws")


SHARD_OPTIONS = tuple(field.name for field in dataclasses.fields(ShardOptions))


def split_options(options: Mapping[str, Any]) -> tuple[ShardOptions, dict[str, Any]]:
    given = {name: value for name, value in options.items() if name in SHARD_OPTIONS}
    return ShardOptions(**given), {name: value for name, value in options.items() if name not in SHARD_OPTIONS}


def check_room(options: ShardOptions) -> None:
    # Ray would wait for a shard that no node has room for without an end.
    needed = options.num_cpus_per_shard
    if needed == 0:
        return
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    room = sum(int(cpus / needed) for cpus in nodes)
    if room < options.num_shards:
        listed = ", ".join(f"{cpus:g}" for cpus in sorted(nodes, reverse=True))
        raise ValueError(
            f"num_shards is {options.num_shards} with num_cpus_per_shard={needed:g}, and the nodes, of {listed} CPUs, "
            f"have room for {room}: the others would wait for ever. Give fewer shards, lower num_cpus_per_shard (0 "
            "reserves none), or start Ray with more, ray.init(num_cpus=...)"
        )


def placement_of(shard: int, nodes: Sequence[str]) -> dict[str, Any]:
    group = ray.util.get_current_placement_group()
    if group is not None:  # as of a trial of Tune: a shard has one of its bundles, which reserve CPUs and no memory
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    strategy: Any = "SPREAD"
    if nodes:
        node = nodes[shard % len(nodes)]
        strategy = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    return {"scheduling_strategy": strategy, "memory": 1}  # a byte: Ray chooses any node if nothing is needed
