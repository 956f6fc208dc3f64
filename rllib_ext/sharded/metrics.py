# SPDX-License-Identifier: Apache-2.0
"""Counters of a sharded replay, summed over its shards."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ray.rllib.utils import metrics as keys

from lightning_replay.declared import declared_sampler
from rllib_ext.buffer.metrics import CounterLog
from rllib_ext.sharded.joined_stats import joined_stats

if TYPE_CHECKING:
    from lightning_replay.sharded.actors import ShardActors
    from lightning_replay.sharded.draws import RemoteBatch
    from lightning_replay.sharded.reports import Counts
    from rllib_ext.buffer.module_replay import ModuleReplay

_SAMPLED = "steps_sampled"


class ShardMetrics:
    """Counters under RLlib's usual keys, see :class:`~rllib_ext.buffer.metrics.BufferMetrics`, and under ``shards``.

    ``shards`` has ``num_alive``, ``rows_lost``, ``rows_smallest``, ``rows_largest`` and ``td_errors_dropped``. Current
    values, such as ages and figures of tables, are joined by :func:`~rllib_ext.sharded.joined_stats.joined_stats` from
    those that each shard sends at every tenth of its draws.

    ``template`` returns the replay of a module without rows, whose sampler has the schedules of all shards.
    """

    def __init__(self, template: Callable[[str], ModuleReplay]) -> None:
        self._template = template
        self._stats: dict[str, dict[int, Mapping[str, Any]]] = {}  # by module and shard
        self.sampled: Counts = Counter()  # rows, by module, and of all under the module ""
        self._mean_n_step = 1.0  # of the last draw
        self._log = CounterLog()
        self._calls = self._reported = 0

    def count_draw(self, batches: Mapping[str, RemoteBatch]) -> None:
        steps = 0.0
        for name, batch in batches.items():
            self.sampled[_SAMPLED, name] += len(batch)
            self.sampled[_SAMPLED, ""] += len(batch)
            steps += sum(part.mean_n_step * len(part.slot) for part in batch.parts) / len(batch)
            first = 0
            for part in batch.parts:
                if part.stats is not None:
                    self._stats.setdefault(name, {})[int(batch.ids.shard[first])] = part.stats
                first += len(part.slot)
        self._mean_n_step = steps / len(batches)

    def report(self, shards: ShardActors, draws_per_report: int) -> dict[str, Any]:
        # Where they are due, and nothing otherwise; called once per draw.
        self._calls += 1
        return self._reduce(shards) if self._calls - self._reported >= draws_per_report else {}

    def remaining(self, shards: ShardActors) -> dict[str, Any]:
        return self._reduce(shards) if self._calls > self._reported else {}

    def state(self) -> dict[str, Any]:
        return {
            "sampled": [[*key, amount] for key, amount in self.sampled.items()],
            "logged": [[*key, amount] for key, amount in self._log.logged.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.sampled, self._log.logged = (
            Counter({(counter, module): amount for counter, module, amount in state[name]})
            for name in ("sampled", "logged")
        )

    def _reduce(self, shards: ShardActors) -> dict[str, Any]:
        self._reported = self._calls
        stored = sum(report.env_steps_stored for report in shards.reports)
        self._log.totals(Counter({**shards.counts, **self.sampled}), stored, shards.rows)
        log = functools.partial(self._log.logger.log_value, reduce="item")
        self._log.items({name: self._joined(name, parts) for name, parts in self._stats.items()})
        log(keys.ACTUAL_N_STEP, self._mean_n_step)
        rows = [report.num_rows for report in shards.reports]
        log(("shards", "num_alive"), sum(shards.alive))
        log(("shards", "rows_lost"), shards.lost.rows)
        log(("shards", "rows_smallest"), min(rows))
        log(("shards", "rows_largest"), max(rows))
        log(("shards", "td_errors_dropped"), shards.lost.td_errors)
        return self._log.logger.reduce()

    def _joined(self, name: str, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        joined = joined_stats(list(parts.values()))
        replay = self._template(name).replay
        if replay.is_prioritized:
            joined["importance_exponent"] = declared_sampler(replay.sampler).base_sampler.beta
        if "tasks" in joined:
            for task, probability in replay.probabilities().items():
                joined["tasks"][task]["probability"] = probability
        return joined
