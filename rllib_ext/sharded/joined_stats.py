# SPDX-License-Identifier: Apache-2.0
"""Statistics of the shards' replays joined into those of one replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Stats = Mapping[str, Any]

_LARGEST = {"age_max", "drawn_age_max"}
_SUMS = {
    *("admitted", "refused", "evicted", "size", "capacity", "rows", "rows_drawn", "num_episodes_lifetime"),
    *("nbytes", "late_updates_dropped", "frames_held", "frame_capacity"),
    "effective_sample_size",  # at most that; equal where the priorities of all shards are alike
}
_BY_NAME = ("tables", "tasks")
# of a table's statistics the weight of each shard's value; by rows where there is none
_WEIGHTS = {"fill": "capacity", "share_drawn": "rows_drawn", "age_mean": "size"}


def joined_stats(parts: Sequence[Stats]) -> dict[str, Any]:
    """Returns the statistics of one replay that holds the rows of all shards, under the same names.

    Counts and sizes are added up, and the largest is taken of largest ages; other numbers are means, weighted by the
    rows of each shard (of tables by what each figure is a share of). Ages count the rows of a shard.

    Example:
        >>> parts = [{"rows": 30, "evicted": 3, "age_mean": 4.0}, {"rows": 10, "evicted": 5, "age_mean": 8.0}]
        >>> joined_stats(parts)
        {'rows': 40, 'evicted': 8, 'age_mean': 5.0}
    """
    return _joined(parts, parts)


def _joined(parts: Sequence[Stats], shards: Sequence[Stats]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [(part[name], part, shard) for part, shard in zip(parts, shards, strict=True) if name in part]
        values = [value for value, _, _ in held]
        if name in _BY_NAME:
            joined[name] = {}
            for entry in dict.fromkeys(entry for value in values for entry in value):
                of_entry = [(value[entry], shard) for value, _, shard in held if entry in value]
                joined[name][entry] = _joined([value for value, _ in of_entry], [shard for _, shard in of_entry])
        elif name in _SUMS:
            joined[name] = sum(values)
        elif name in _LARGEST:
            joined[name] = max(values)
        elif all(isinstance(value, int | float) for value in values):
            weight = _WEIGHTS.get(name, "rows")
            weights = [part.get(weight, shard.get(weight, shard["rows"])) for _, part, shard in held]
            weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
            joined[name] = weighted / sum(weights) if sum(weights) else sum(values) / len(values)
    return joined
