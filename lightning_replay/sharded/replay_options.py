# SPDX-License-Identifier: Apache-2.0
"""Options of a :class:`~lightning_replay.sharded.replay.ShardedReplay`, checked before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_replay import recipes
from lightning_replay.argument_names import accepted_names, refuse_unknown
from lightning_replay.sharded.options import SHARD_OPTIONS, ShardOptions, split_options
from lightning_replay.sharded.recipe_options import CAPACITIES, options_of_shard
from lightning_replay.validation import check_kind, checked_seed

if TYPE_CHECKING:
    from lightning_replay.replay import Replay

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
        """Returns the options in the arguments of a ``ShardedReplay``; a missing seed is drawn."""
        shards, of_recipe = split_options(options)
        check_kind("recipe", recipe, str, "the name of a recipe, such as 'prioritized'")
        if of_recipe.get("prefetch"):
            raise ValueError("prefetch is of a replay in one process; use num_prefetch, or leave it out")
        names = accepted_names(recipes.by_name(recipe)) or []
        listed = [*_OF_REPLAY, *limits, *SHARD_OPTIONS, *(name for name in names if name != "prefetch")]
        refuse_unknown(f"ShardedReplay({recipe!r})", [name for name in of_recipe if name not in names], listed)
        seed = checked_seed(of_recipe.get("seed"))
        of_recipe["seed"] = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
        return cls(recipe, of_recipe, shards, limits)

    @property
    def capacities(self) -> dict[str, int]:
        return {name: int(self.of_recipe[name]) for name in CAPACITIES if self.of_recipe.get(name) is not None}

    def template(self) -> Replay:
        """Builds a replay as those of the shards, but without rows, whose sampler divides draws."""
        return recipes.by_name(self.recipe)(**options_of_shard(self.of_recipe, self.shards.num_shards))

    def check_same(self, running: ReplayOptions) -> None:
        """Refuses options that differ from those of the running replay of the same name.

        The seed, where shards run, and objects, such as schedules and tables, are not compared.
        """
        given, present = self._compared(), running._compared()
        names = [name for name in sorted({*given, *present}) if given.get(name) != present.get(name)]
        if names:
            ours, theirs = ({name: one.get(name) for name in names} for one in (given, present))
            raise ValueError(
                f"a sharded replay of this name runs already, built with {theirs}; this one has {ours}. Give both the "
                "same options, or another name"
            )

    def _compared(self) -> dict[str, Any]:
        plain = {name: value for name, value in self.of_recipe.items() if isinstance(value, str | int | float)}
        plain.pop("seed", None)
        return {**plain, **self.limits, "recipe": self.recipe, "num_shards": self.shards.num_shards}
