# SPDX-License-Identifier: Apache-2.0
"""Options of a sharded replay and of the replay in each shard, checked before anything starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_replay import recipes
from lightning_replay.events import EventTable
from lightning_replay.options import accepted_names, check_kind, checked_count, checked_seed, refuse_unknown
from lightning_replay.sharded.options import SHARD_OPTIONS, ShardOptions, split_options

if TYPE_CHECKING:
    from lightning_replay.replay import Replay


#: Options of recipes that are divided by the number of shards.
CAPACITIES = ("capacity", "capacity_per_task", "frame_capacity")
_ROWS_OF_TEMPLATE = 1024
_BETWEEN_SEEDS = 15_485_863  # a prime, so that shards draw independently of each other and of lengths of returns
_OF_REPLAY = ("name", "wait_timeout_s")


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Options that a sharded replay is built with; :meth:`checked` makes them from the arguments of a user.

    Attributes:
        recipe: name.
        of_recipe: its arguments for all shards together, among them a seed.
        shards: options of the shards.
        limits: ``samples_per_insert`` and ``error_buffer``, checked by the
            :class:`~lightning_replay.sharded.rate_limiter.RateLimiter`.
    """

    recipe: str
    of_recipe: dict[str, Any]
    shards: ShardOptions
    limits: dict[str, Any]

    @classmethod
    def checked(cls, recipe: str, options: Mapping[str, Any], limits: dict[str, Any]) -> ReplayOptions:
        shards, of_recipe = split_options(options)
        check_kind("recipe", recipe, str, "the name of a recipe, such as 'prioritized'")
        if of_recipe.get("prefetch"):
            raise ValueError("prefetch is of a replay in one process; use num_prefetch, or leave it out")
        names = accepted_names(recipes.by_name(recipe)) or []
        listed = [*_OF_REPLAY, *limits, *SHARD_OPTIONS, *(name for name in names if name != "prefetch")]
        refuse_unknown(f"ShardedReplay({recipe!r})", [name for name in of_recipe if name not in names], listed)
        # Drawn where it is missing, as all shards start from it and one that is started again does too.
        seed = checked_seed(of_recipe.get("seed"))
        of_recipe["seed"] = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
        return cls(recipe, of_recipe, shards, limits)

    @property
    def capacities(self) -> dict[str, int]:
        return {name: int(self.of_recipe[name]) for name in CAPACITIES if self.of_recipe.get(name) is not None}

    def template(self) -> Replay:
        # A replay as in the shards, but without rows: its sampler divides draws.
        return recipes.by_name(self.recipe)(**options_of_shard(self.of_recipe, self.shards.num_shards))

    def check_same(self, running: ReplayOptions) -> None:
        given, present = self._compared(), running._compared()
        names = [name for name in sorted({*given, *present}) if given.get(name) != present.get(name)]
        if names:
            ours, theirs = ({name: one.get(name) for name in names} for one in (given, present))
            raise ValueError(
                f"a sharded replay of this name runs already, built with {theirs}; this one has {ours}. Give both the "
                "same options, or another name"
            )

    def _compared(self) -> dict[str, Any]:
        # Without the seed and objects such as schedules and tables, which cannot be compared.
        plain = {name: value for name, value in self.of_recipe.items() if isinstance(value, str | int | float)}
        plain.pop("seed", None)
        return {**plain, **self.limits, "recipe": self.recipe, "num_shards": self.shards.num_shards}


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
