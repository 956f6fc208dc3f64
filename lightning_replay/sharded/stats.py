# SPDX-License-Identifier: Apache-2.0
"""Statistics of the shards of a replay, and of what was lost with some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_replay.sharded.actors import ShardActors
    from lightning_replay.sharded.draws import DividedDraws


def stats_of(shards: ShardActors, draws: DividedDraws) -> dict[str, Any]:
    """Returns what the shards hold and what was lost, after everything sent has been answered.

    * ``num_shards``, ``num_rows`` and ``bytes`` stored;
    * of each shard ``rows``, ``mass`` (what its rows are drawn in proportion to), ``alive`` and ``epochs`` (how often
      it was started; of a ``ShardedReplay`` saves that were loaded count as well);
    * ``draws_in_flight``, which the shards have made ahead;
    * ``rows_lost`` with shards, and steps that these had been sent;
    * ``td_errors_dropped`` because their shard was lost, ``late_updates_dropped`` because their row had left;
    * ``fragments_lost`` with EnvRunners before a shard had fetched them.

    Shards that are late or are being started are left out of ``bytes`` and ``late_updates_dropped``.
    """
    answers: list[dict[str, dict[str, Any]]] = []
    for shard in range(len(shards.handles)):
        shards.send(shard, "stats", then=answers.append)
    shards.settle()
    replays = [stats for answer in answers for stats in answer.values()]
    rows = [report.num_rows for report in shards.reports]
    return {
        "num_shards": len(shards),
        "num_rows": sum(rows),
        "rows": rows,
        "mass": [float(sum(total.mass.sum() for total in report.totals.values())) for report in shards.reports],
        "alive": shards.alive,
        "epochs": shards.epochs.tolist(),
        "draws_in_flight": draws.num_in_flight,
        "rows_lost": shards.lost.rows,
        "td_errors_dropped": shards.lost.td_errors,
        "late_updates_dropped": sum(one["late_updates_dropped"] for one in replays),
        "fragments_lost": sum(report.fragments_lost for report in shards.reports),
        "bytes": sum(one["nbytes"] for one in replays),
    }
