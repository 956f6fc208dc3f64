# SPDX-License-Identifier: Apache-2.0
"""Checks the options of shards, and of the replay in each shard, before anything starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from lightning_replay.options import (
    ABOVE_ZERO,
    accepted_names,
    check_kind,
    checked_choice,
    checked_count,
    checked_number,
    checked_seed,
    refuse_unknown,
)

if TYPE_CHECKING:
    from lightning_replay.replay import Replay

PLACEMENTS = ("spread", "pack")
RESTARTS = ("empty", "last_save")
#: Options of recipes that are divided by the number of shards.
CAPACITIES = ("capacity", "capacity_per_task", "frame_capacity")
_ROWS_OF_TEMPLATE = 1024
#: A prime, so that shards draw independently of each other and of the lengths of returns.
_BETWEEN_SEEDS = 15_485_863
_OF_REPLAY = ("name", "wait_timeout_s")


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """A description of the shards: their number, their nodes, and the restart of a lost shard.

    Attributes:
        num_shards: Ray actors that hold the rows. Each has its part of every capacity, rounded up.
        num_cpus_per_shard: CPUs that Ray reserves for each shard. 0 reserves none.
        shard_placement: ``"spread"`` over the nodes, or ``"pack"`` on the nodes of the Learners as far as there is
            room.
        restart_shards: ``"empty"``, or ``"last_save"`` to start a lost shard with its rows of the last save. If the
            save is gone, the shard starts empty.
        shard_timeout_s: Seconds after which a draw goes on without a shard that has not answered. Another call of all
            shards raises an error then. After four times as long the shard is started again like a lost shard.
        save_timeout_s: Seconds that a save or a load may take.
        num_prefetch: Draws in flight ahead of the Learners. Their rows wait in the object store, and their priorities
            are older than the updates made since.
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
    """Returns the options of the shards, and the remaining options."""
    given = {name: value for name, value in options.items() if name in SHARD_OPTIONS}
    return ShardOptions(**given), {name: value for name, value in options.items() if name not in SHARD_OPTIONS}


def check_room(options: ShardOptions) -> None:
    """Raises ``ValueError`` if no node has room for a shard, because Ray would wait for it forever."""
    needed = options.num_cpus_per_shard
    if needed == 0:
        return
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    room = sum(int(cpus / needed) for cpus in nodes)
    if room < options.num_shards:
        listed = ", ".join(f"{cpus:g}" for cpus in sorted(nodes, reverse=True))
        raise ValueError(
            f"num_shards is {options.num_shards} with num_cpus_per_shard={needed:g}, and the nodes, of {listed} CPUs, "
            f"have room for {room}: the others would wait forever. Give fewer shards, lower num_cpus_per_shard (0 "
            "reserves none), or start Ray with more, ray.init(num_cpus=...)"
        )


def placement_of(shard: int, nodes: Sequence[str]) -> dict[str, Any]:
    """Returns the options by which Ray places the actor of a shard, on ``nodes`` (IDs) in turn if there are any."""
    group = ray.util.get_current_placement_group()
    # A trial of Tune has such a group, and its bundles reserve CPUs and no memory.
    if group is not None:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    strategy: Any = "SPREAD"
    if nodes:
        node = nodes[shard % len(nodes)]
        strategy = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    # One byte, because Ray chooses any node for an actor that needs nothing.
    return {"scheduling_strategy": strategy, "memory": 1}


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Options that a sharded replay is built with. :meth:`checked` makes them from the arguments of a user."""

    recipe: str
    of_recipe: dict[str, Any]  #: Options of the recipe for all shards together, with a seed.
    shards: ShardOptions
    limits: dict[str, Any]  #: ``samples_per_insert`` and ``error_buffer``, which the rate limiter checks.

    @classmethod
    def checked(cls, recipe: str, options: Mapping[str, Any], limits: dict[str, Any]) -> ReplayOptions:
        """Returns the checked options of a recipe and its shards, with a seed."""
        # RLlib's EnvRunners import this file without TorchRL.
        from lightning_replay import recipes

        shards, of_recipe = split_options(options)
        check_kind("recipe", recipe, str, "the name of a recipe, such as 'prioritized'")
        if of_recipe.get("prefetch"):
            raise ValueError("prefetch is an option of a replay in one process; use num_prefetch, or leave it out")
        names = accepted_names(recipes.by_name(recipe)) or []
        listed = [*_OF_REPLAY, *limits, *SHARD_OPTIONS, *(name for name in names if name != "prefetch")]
        refuse_unknown(f"ShardedReplay({recipe!r})", [name for name in of_recipe if name not in names], listed)
        # All shards start from one seed, a shard that is started again too. Without a seed it is drawn here.
        seed = checked_seed(of_recipe.get("seed"))
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        of_recipe["seed"] = seed
        return cls(recipe, of_recipe, shards, limits)

    @property
    def capacities(self) -> dict[str, int]:
        """Capacities of all shards together, by option."""
        return {name: int(self.of_recipe[name]) for name in CAPACITIES if self.of_recipe.get(name) is not None}

    def template(self) -> Replay:
        """Returns a replay without rows that is built like the replays of the shards. Its sampler divides draws."""
        from lightning_replay import recipes

        return recipes.by_name(self.recipe)(**options_of_shard(self.of_recipe, self.shards.num_shards))

    def check_same(self, running: ReplayOptions) -> None:
        """Raises ``ValueError`` if a running replay of this name was built with other options."""
        given = self._compared()
        present = running._compared()
        names = sorted({name for name, _ in given.items() ^ present.items()})
        ours, theirs = ({name: one.get(name) for name in names} for one in (given, present))
        if names:
            raise ValueError(
                f"a sharded replay of this name runs already, built with {theirs}; this one has {ours}. Give both the "
                "same options, or another name"
            )

    def _compared(self) -> dict[str, Any]:
        # Objects such as schedules and tables cannot be compared.
        plain = {name: value for name, value in self.of_recipe.items() if isinstance(value, str | int | float)}
        plain.pop("seed", None)
        return {**plain, **self.limits, "recipe": self.recipe, "num_shards": self.shards.num_shards}


def options_of_shard(options: Mapping[str, Any], num_shards: int, number: int | None = None) -> dict[str, Any]:
    """Returns the options of the replay in one shard, or without ``number`` of the replay that divides draws.

    Capacities, also of tables, are divided by the number of shards and rounded up. ``memmap`` gets a folder for each
    shard.
    """
    divided = dict(options)
    memmap = divided.pop("memmap", None)
    check_kind("memmap", memmap, str | os.PathLike | None, "a directory, or None")
    for name in CAPACITIES:
        if divided.get(name) is None:
            continue
        capacity = checked_count(name, divided[name], of="rows")
        if capacity < num_shards:
            raise ValueError(
                f"num_shards is {num_shards} and {name} is {capacity}; every shard holds at least one row. Give at "
                f"most {capacity} shards, or raise {name}"
            )
        if number is not None:
            divided[name] = -(-capacity // num_shards)
    if number is None:
        if divided.get("tables") is None and divided.get("capacity") is not None:
            divided["capacity"] = min(divided["capacity"], max(_ROWS_OF_TEMPLATE, divided.get("batch_size") or 0))
        return divided
    if memmap is not None:
        divided["memmap"] = os.path.join(memmap, f"shard-{number}")
    if divided.get("tables") is not None:
        parts = [(table, max(-(-table.capacity // num_shards), table.history_length)) for table in divided["tables"]]
        divided["tables"] = [
            type(table)(**{**table.init_arguments, "capacity": capacity, "min_size": None}) for table, capacity in parts
        ]
    if (seed := checked_seed(divided.get("seed"))) is not None:
        divided["seed"] = seed_of_shard(seed, number)
    # The replay that divides draws compares the rows of all shards with min_size.
    divided.pop("min_size", None)
    return divided


def seed_of_shard(seed: int, number: int) -> int:
    """Returns the seed of one shard, which differs from the seeds of other shards."""
    return (seed + (number + 1) * _BETWEEN_SEEDS) % 2**63
