# SPDX-License-Identifier: Apache-2.0
"""Results of a replay in shards beside those of one buffer with the same steps: the same keys, and sums where exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_replay.schedulers import MeanReturn
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer, joined_stats
from tests.recipe_options import required_options

from .episodes import numbered

pytestmark = pytest.mark.usefixtures("local_shards")


def reported(recipe: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flat metrics of one buffer and of three shards, after equal episodes and a repetition."""
    given = required_options(recipe, 90) | {"seed": 0} | options
    found = []
    for buffer in (
        RecipeEpisodeReplayBuffer(recipe, layout="flagged", **given),
        ShardedEpisodeReplayBuffer(recipe, num_shards=3, **given),
    ):
        buffer.form_returns(1, 0.99)
        for number in range(24):
            episode = numbered(f"e{number}", 6, offset=100.0 * number, terminated=number < 23)
            episode.custom_data["task"] = number // 3 % 2
            buffer.add([episode])
        buffer.add([episode])
        buffer.draws_per_report = 1
        for _ in range(11):
            buffer.sample(num_items=60)
            buffer.update_priorities(np.ones(60), "default_policy")
            metrics = flat(buffer.get_metrics())
        found.append(metrics)
    return found[0], found[1]


def flat(metrics: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(metrics, dict):
        return {prefix: metrics.peek()}
    return {name: value for key, part in metrics.items() for name, value in flat(part, f"{prefix}/{key}").items()}


@pytest.mark.parametrize("recipe", ["prioritized", "surprise_retention", "event_tables", "parallel_curriculum"])
def test_results_have_the_keys_of_one_buffer(recipe: str) -> None:
    progress = {"progress": MeanReturn(low=0.0, high=1000.0, every=1)} if recipe == "parallel_curriculum" else {}
    single, sharded = reported(recipe, **progress)
    assert {name for name in sharded if not name.startswith("/shards/")} == set(single)
    same = [
        name
        for name in single
        if name.endswith(("_lifetime", "_stored", "/size", "/fill", "/admitted", "/refused", "/evicted", "_exponent"))
        and "sampled" not in name
        and name != "/bytes_stored"
        and "/tables/high" not in name  # whose capacity is rounded up in each shard
    ]
    assert same and {name: sharded[name] for name in same} == pytest.approx({name: single[name] for name in same})
    for name in single:
        if recipe == "parallel_curriculum" and name.endswith("share_drawn"):  # of eleven batches, each of one task
            continue
        if name.endswith(("share_drawn", "event_share", "terminal_share", "age_over_capacity", "/probability")):
            assert sharded[name] == pytest.approx(single[name], abs=0.1), name


def test_shares_of_tables_are_weighted_by_what_they_are_shares_of() -> None:
    parts = [
        {"rows": 7, "rows_drawn": 90, "tables": {"goal": {"size": 1, "capacity": 2, "fill": 0.5, "share_drawn": 0.2}}},
        {"rows": 9, "rows_drawn": 10, "tables": {"goal": {"size": 0, "capacity": 6, "fill": 0.0, "share_drawn": 0.7}}},
    ]
    table = joined_stats(parts)["tables"]["goal"]
    assert (table["size"], table["capacity"]) == (1, 8)
    assert (table["fill"], table["share_drawn"]) == (0.125, pytest.approx(0.25))
