# SPDX-License-Identifier: Apache-2.0
"""Options of the buffer in each shard of a sharded one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_replay.sharded.options import SHARD_OPTIONS
from lightning_replay.validation import checked_count, checked_seed
from rllib_ext.buffer.building import CAPACITIES
from rllib_ext.buffer.event_tables import built_tables

if TYPE_CHECKING:
    from lightning_replay.events import EventTable

_DIVIDED = (*CAPACITIES, "frame_capacity")
_ROWS_ON_DRIVER = 1024
_BETWEEN_SEEDS = 15_485_863  # a prime, so that shards draw independently of each other and of lengths of returns


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
