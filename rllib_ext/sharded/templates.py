# SPDX-License-Identifier: Apache-2.0
"""Replays without rows, as those in the shards: their samplers divide draws, and have schedules and schedulers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from lightning_replay.validation import checked_seed
from rllib_ext.buffer.module_options import ModuleOptions
from rllib_ext.sharded.options import options_of_shard

if TYPE_CHECKING:
    from lightning_replay.divided_draws import Divider
    from lightning_replay.draw_parts import GroupTotals
    from lightning_replay.sharded.reports import ShardReport
    from rllib_ext.buffer.building import Returns
    from rllib_ext.buffer.module_replay import ModuleReplay


class Templates:
    """The replay of each module, without rows, in the driver.

    Args:
        recipe, options: of the whole sharded replay.
        num_shards: S.

    Attributes:
        options: of modules.
        returns: length and discount of returns that are formed before rows are stored.
        seed: of the draws.

    Raises:
        ValueError: bad options, which are refused here and not in an actor; more shards than rows.
    """

    def __init__(self, recipe: str | None, options: Mapping[str, Any], num_shards: int) -> None:
        self._recipe, self._given, self._num_shards = recipe, dict(options), num_shards
        template = options_of_shard(options, num_shards)
        modules = template.pop("modules", None) or {}
        self.options: ModuleOptions = ModuleOptions(recipe, "flagged", template, modules)
        self._modules = {DEFAULT_MODULE_ID: self.options.build(DEFAULT_MODULE_ID)}
        options_of_shard(options, num_shards, 0)  # of tables too
        self.returns: Returns = (1, 0.99)
        seed = checked_seed(options.get("seed"))
        self.seed: int = int(np.random.randint(2**31)) if seed is None else seed  # which RLlib seeds with config.seed

    def of(self, module_id: str) -> ModuleReplay:
        """Returns the template of a module."""
        if module_id not in self._modules:
            self._modules[module_id] = self.options.build(module_id)
        return self._modules[module_id]

    def form_returns(self, n_step: int | tuple[int, int], gamma: float) -> None:
        """Sets length and discount of returns that are formed before rows are stored."""
        self.returns = (n_step, gamma)
        self._modules |= self.options.form_returns(self.returns, self._modules)

    def arguments_of(self, shard: int) -> tuple[Any, ...]:
        """Returns the arguments of a shard's actor, by its number, that the options decide."""
        return self._recipe, {**self._given, "seed": self.seed}, shard, self._num_shards, self.returns

    def divider(self, module_id: str) -> Divider:
        """Builds the divider of a module."""
        from lightning_replay.divided_draws import Divider

        # Modules draw independently of each other, as in one buffer.
        own = 0 if module_id == DEFAULT_MODULE_ID else zlib.crc32(module_id.encode())
        return Divider(self.of(module_id).replay.sampler, seed=self.seed + own)

    def set_min_sizes(self, module_id: str, batch_size: int, totals: Sequence[GroupTotals | None]) -> None:
        """Sets the least sizes of tables before a draw; totals are those of the module in each shard."""
        rows = [total.rows for total in totals if total is not None]
        self.of(module_id).set_min_sizes(batch_size, np.sum(rows, axis=0))

    def pass_signals(self, report: ShardReport) -> None:
        """Passes progress signals from a shard to the scheduler of a curriculum."""
        for name, signals in report.signals.items():
            for task, signal in signals:
                self.of(name).replay.progress(task, signal)
