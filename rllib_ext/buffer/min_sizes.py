# SPDX-License-Identifier: Apache-2.0
"""The least sizes of tables that are drawn from, where these follow RLlib's batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rllib_ext.buffer.event_tables import built_tables

if TYPE_CHECKING:
    import numpy as np

    from lightning_replay.replay import Replay
    from lightning_replay.samplers.scheduled import ScheduledSampler
    from lightning_replay.samplers.table_shares import TableShares


class MinSizes:
    """Sets the least sizes that were not given to the size of the batch, which RLlib passes with each draw.

    RLlib draws as soon as its warm-up is over: while no table with a share holds a whole batch, the longest is drawn
    from. A ``min_size`` that is given in the ``options`` of the recipe is kept.
    """

    def __init__(self, replay: Replay, options: Mapping[str, Any]) -> None:
        from lightning_replay.samplers.scheduled import ScheduledSampler
        from lightning_replay.samplers.table_shares import TableShares
        from lightning_replay.writers.event_tables import DEFAULT_TABLE

        sampler, is_unset = replay.sampler, options.get("min_size") is None
        self._replay = replay
        self._scheduled: ScheduledSampler | None = None
        self._shares: TableShares | None = None
        if isinstance(sampler, ScheduledSampler) and "tasks" in options and is_unset:
            self._scheduled = sampler
        if isinstance(sampler, TableShares) and "tables" in options:
            self._shares = sampler
            self._unset = [table.name for table in built_tables(options["tables"]) if table.min_size is None]
            if is_unset:
                self._unset.append(DEFAULT_TABLE)

    def update(self, batch_size: int, held: np.ndarray | None = None) -> None:
        """Sets the sizes before a draw; ``held`` are the entries of each table, where they lie in other replays."""
        if self._scheduled is None and self._shares is None:
            return
        tables = self._replay.tables
        assert tables is not None
        held = tables.length if held is None else held
        if self._shares is not None:
            held = held[[self._shares.table_shares[name] > 0 for name in tables.names]]
        reachable = min(batch_size, max(1, int(held.max())))
        if self._scheduled is not None:
            self._scheduled.min_size = min(reachable, int(tables.capacity[0]))
        if self._shares is not None:
            sizes = {name: min(reachable, int(tables.capacity[tables.number(name)])) for name in self._unset}
            if not sizes.items() <= self._shares.min_sizes.items():
                self._shares.set_min_sizes(sizes)
