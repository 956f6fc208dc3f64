# SPDX-License-Identifier: Apache-2.0
"""Options of the buffer in each shard of a sharded one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_replay.sharded import recipe_options as of_recipe
from lightning_replay.sharded.options import SHARD_OPTIONS
from rllib_ext.buffer.event_tables import built_tables


def without_shard_options(options: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in SHARD_OPTIONS if options.get(name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} is for a replay of several shards. Add num_shards=4, or leave it out")
    return {name: value for name, value in options.items() if name not in SHARD_OPTIONS}


def check_shard_layout(layout: str | None) -> None:
    if layout not in (None, "flagged"):
        raise ValueError(
            f"layout is {layout!r}, and Learners fetch the rows of shards in blocks, layout='flagged'. Leave layout "
            "out, or num_shards"
        )


def options_of_shard(options: Mapping[str, Any], num_shards: int, number: int | None = None) -> dict[str, Any]:
    """Returns the options of the buffer in one shard, or without rows, also of single modules."""
    own = {name: value for name, value in options.items() if name != "modules"}
    if own.get("tables") is not None and number is not None:
        own["tables"] = built_tables(own["tables"])
    divided = of_recipe.options_of_shard(own, num_shards, number)
    if options.get("modules"):
        divided["modules"] = {
            name: None if special is None else options_of_shard(special, num_shards, number)
            for name, special in options["modules"].items()
        }
    return divided
