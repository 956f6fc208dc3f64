# SPDX-License-Identifier: Apache-2.0
"""Options of the replay in one shard: its part of every capacity, a folder and a seed of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_replay.events import EventTable
from lightning_replay.validation import check_kind, checked_count, checked_seed

#: Options of recipes that are divided by the number of shards.
CAPACITIES = ("capacity", "capacity_per_task", "frame_capacity")
_ROWS_OF_TEMPLATE = 1024
_BETWEEN_SEEDS = 15_485_863  # a prime, so that shards draw independently of each other and of lengths of returns


def options_of_shard(options: Mapping[str, Any], num_shards: int, number: int | None = None) -> dict[str, Any]:
    """Returns the options of the replay in one shard.

    Every capacity is divided by the number of shards and rounded up, also those of tables, which hold at least a
    history. Files of ``memmap`` lie in a folder for each shard, on the shard's node. Without a ``number``, they are the
    options of the replay without rows by whose sampler draws are divided.

    Raises:
        ValueError: more shards than rows.
    """
    check_kind("memmap", options.get("memmap"), str | os.PathLike | None, "a directory, or None")
    parts = num_shards if number is not None else 1
    divided = {name: _part(name, value, num_shards, parts) for name, value in options.items()}
    if number is None:
        divided.pop("memmap", None)
        if divided.get("tables") is None and divided.get("capacity") is not None:
            divided["capacity"] = min(divided["capacity"], max(_ROWS_OF_TEMPLATE, divided.get("batch_size") or 0))
        return divided
    if divided.get("memmap") is not None:
        divided["memmap"] = os.path.join(divided["memmap"], f"shard-{number}")
    if divided.get("tables") is not None:
        divided["tables"] = [_table_part(table, num_shards) for table in divided["tables"]]
    seed = checked_seed(divided.get("seed"))
    if seed is not None:
        divided["seed"] = seed_of_shard(seed, number)
    divided.pop("min_size", None)  # of all shards together, which the one that divides draws compares
    return divided


def seed_of_shard(seed: int, number: int) -> int:
    return (seed + (number + 1) * _BETWEEN_SEEDS) % 2**63


def _part(name: str, value: Any, num_shards: int, parts: int) -> Any:
    if name not in CAPACITIES or value is None:
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
