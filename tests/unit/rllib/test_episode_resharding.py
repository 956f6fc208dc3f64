# SPDX-License-Identifier: Apache-2.0
"""Saves of shards: read by as many, and dealt out anew to another number, as inside the actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.rllib.core import DEFAULT_MODULE_ID

import rllib_ext
from lightning_replay.sharded.folders import Folder
from rllib_ext.checkpoints import WarmUp, write_buffer
from rllib_ext.sharded.shard import EpisodeShard
from tests.integration.shard_contents import trajectories

from .episodes import numbered

WARM_UP = WarmUp(10, 10)
OPTIONS = {"capacity": 120, "seed": 0}
LENGTHS = (5, 3, 8, 1, 7, 2, 6, 4, 9, 5)


def shard(number: int, count: int, recipe: str = "prioritized", **options: Any) -> EpisodeShard:
    return EpisodeShard(recipe, {**OPTIONS, "returns": (1, 0.99), **options}, number, count, 60.0, None)


def fill(buffers: list[Any]) -> None:
    """Adds ten episodes, in turn, whose observations are 100 e + t, and gives each row its observation as priority."""
    for number, length in enumerate(LENGTHS):
        buffers[number % len(buffers)].add([numbered(f"e{number}", length, offset=100.0 * number, terminated=True)])
    for buffer in buffers:
        replay = buffer.replay
        slots = replay.oldest_first()
        replay.update_priority(slots, replay.storage.get(slots)["observation"][:, 0] + 1.0)


def saved(shards: list[EpisodeShard], folder: Path) -> list[Folder]:
    folders = [Folder.at(folder / str(number)) for number in range(len(shards))]
    for one, path in zip(shards, folders, strict=True):
        one.save(path, None, WARM_UP)
    return folders


def restored(folders: list[Folder], count: int, recipe: str = "prioritized", **options: Any) -> list[EpisodeShard]:
    shards = [shard(number, count, recipe, **options) for number in range(count)]
    for one in shards:
        assert len(one.report().report.rows) and not sum(one.report().report.rows.values())
        one.stage(folders, {})
        assert not sum(one.report().report.rows.values())  # nothing is used yet
    for one in shards:
        one.take_over()
    return shards


def test_counters_are_divided_and_new_episodes_get_new_numbers(tmp_path: Path) -> None:
    shards = [shard(number, 3) for number in range(3)]
    fill([one.held for one in shards])
    again = restored(saved(shards, tmp_path), 2)
    sizes = [len(one.held) for one in again]
    assert max(sizes) - min(sizes) <= max(LENGTHS)
    reports = [one.report().report for one in again]
    assert sum(report.rows[DEFAULT_MODULE_ID] for report in reports) == sum(LENGTHS)
    assert sum(report.counts["steps_added", ""] for report in reports) == sum(LENGTHS)
    assert sum(report.counts["episodes_added", ""] for report in reports) == len(LENGTHS)
    again[0].held.add([numbered("e0", 2, offset=5000.0, terminated=True)])  # an id that was seen before the save
    assert [5000.0, 5001.0] in [[observation for observation, _ in rows] for rows in trajectories(again[0])]


def test_a_save_without_shards_is_dealt_out(tmp_path: Path) -> None:
    buffer = rllib_ext.RecipeEpisodeReplayBuffer("prioritized", **OPTIONS)
    buffer.is_in_checkpoints = True
    fill([buffer])
    write_buffer(buffer, tmp_path / "whole", WARM_UP)
    again = restored([Folder.at(tmp_path / "whole")], 2)
    rows = [row for one in again for trajectory in trajectories(one) for row in trajectory]
    expected = [100.0 * number + t for number, length in enumerate(LENGTHS) for t in range(length)]
    assert sorted(rows) == [(value, pytest.approx(value + 1.0, rel=1e-4)) for value in expected]


def test_rows_kept_by_importance_go_to_the_same_number_alone(tmp_path: Path) -> None:
    def built(number: int, count: int) -> EpisodeShard:
        return shard(number, count, "surprise_retention", returns=(3, 0.99))

    shards = [built(number, 2) for number in range(2)]
    for one in shards:
        one.held.add([numbered("e", 9, terminated=True)])
    folders = saved(shards, tmp_path)
    with pytest.raises(ValueError, match="NStepTransitions formed before they were stored"):
        built(0, 3).stage(folders, {})
    again = built(1, 2)
    again.stage(folders, {})
    again.take_over()
    assert len(again.held) == len(shards[1].held) > 0
