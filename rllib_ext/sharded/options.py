# SPDX-License-Identifier: Apache-2.0
"""Options of a sharded replay, and those of the buffer in each of its shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from lightning_replay.validation import ABOVE_ZERO, checked_choice, checked_count, checked_number, checked_seed
from rllib_ext.buffer.building import CAPACITIES
from rllib_ext.buffer.event_tables import built_tables

if TYPE_CHECKING:
    from lightning_replay.events import EventTable

PLACEMENTS = ("spread", "pack")
RESTARTS = ("empty", "last_save")
_DIVIDED = (*CAPACITIES, "frame_capacity")
_ROWS_ON_DRIVER = 1024
_BETWEEN_SEEDS = 15_485_863  # a prime, so that shards draw independently of each other and of lengths of returns


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
        shard_timeout_s: seconds after which a draw goes on without a shard that has not answered.

    Raises:
        ValueError: another choice, or numbers out of range.
        TypeError: values of another kind.
    """

    num_shards: int
    num_cpus_per_shard: float = 1
    shard_placement: str = "spread"
    restart_shards: str = "empty"
    shard_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        checked_count("num_shards", self.num_shards, of="shards")
        checked_number("num_cpus_per_shard", self.num_cpus_per_shard, 0.0)
        checked_choice("shard_placement", self.shard_placement, PLACEMENTS)
        checked_choice("restart_shards", self.restart_shards, RESTARTS)
        checked_number("shard_timeout_s", self.shard_timeout_s, ABOVE_ZERO)


SHARD_OPTIONS = tuple(field.name for field in dataclasses.fields(ShardOptions))


def split_options(options: Mapping[str, Any]) -> tuple[ShardOptions, dict[str, Any]]:
    """Returns the options of shards, and those of the buffer in them."""
    given = {name: value for name, value in options.items() if name in SHARD_OPTIONS}
    return ShardOptions(**given), {name: value for name, value in options.items() if name not in SHARD_OPTIONS}


def refuse_shard_options(options: Mapping[str, Any]) -> None:
    """Refuses options of shards where there are none."""
    given = [name for name in SHARD_OPTIONS if options.get(name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} is for a replay of several shards. Add num_shards=4, or leave it out")


def options_of_shard(options: Mapping[str, Any], num_shards: int, number: int | None = None) -> dict[str, Any]:
    """Returns the options of the buffer in one shard.

    Every capacity is divided by the number of shards and rounded up, also those of single modules and of tables, which
    hold at least a history. Files of ``memmap`` lie in a folder for each shard, on the shard's node.

    Args:
        options: of the whole.
        num_shards: S.
        number: of the shard; ``None`` for the buffer without rows by which the driver divides draws.

    Raises:
        ValueError: more shards than rows.
    """
    parts = num_shards if number is not None else 1
    divided = {name: _part(name, value, num_shards, parts) for name, value in options.items()}
    if divided.get("modules"):
        divided["modules"] = {
            name: None if special is None else options_of_shard(special, num_shards, number)
            for name, special in divided["modules"].items()
        }
    if number is None:
        divided.pop("memmap", None)
        if divided.get("tables") is None and divided.get("capacity") is not None:
            divided["capacity"] = min(divided["capacity"], _ROWS_ON_DRIVER)
        return divided
    if divided.get("memmap") is not None:
        divided["memmap"] = os.path.join(divided["memmap"], f"shard-{number}")
    if divided.get("tables") is not None:
        divided["tables"] = [_table_part(table, num_shards) for table in built_tables(divided["tables"])]
    seed = checked_seed(divided.get("seed"))
    if seed is not None:
        divided["seed"] = (seed + (number + 1) * _BETWEEN_SEEDS) % 2**63
    divided.pop("min_size", None)  # of all shards together, which the driver compares
    return divided


def _part(name: str, value: Any, num_shards: int, parts: int) -> Any:
    if name not in _DIVIDED or value is None:
        return value
    capacity = checked_count(name, value, of="rows")
    if capacity < num_shards:
        raise ValueError(
            f"num_shards is {num_shards} and {name} is {capacity}; every shard holds at least one row. Give at most "
            f"{capacity} shards, or raise {name}"
        )
    return -(-capacity // parts)


def _table_part(table: EventTable, num_shards: int) -> EventTable:
    capacity = max(-(-table.capacity // num_shards), table.history_length)
    return type(table)(**{**table.init_arguments, "capacity": capacity, "min_size": None})  # type: ignore[attr-defined]


def check_room(options: ShardOptions) -> None:
    """Refuses shards that no node has room for, because Ray would wait for one for ever.

    Raises:
        ValueError: with the CPUs needed and those of the nodes.
    """
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
