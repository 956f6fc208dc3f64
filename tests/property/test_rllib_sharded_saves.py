# SPDX-License-Identifier: Apache-2.0
"""Any episodes in shards, saved to another file system and read by any number of shards."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from lightning_replay.saving.folders import Folder
from rllib_ext.checkpoints import WarmUp
from rllib_ext.sharded.shard import EpisodeShard
from tests.integration.shard_contents import trajectories
from tests.unit.rllib_ext.episodes import numbered


def shard(number: int, count: int) -> EpisodeShard:
    options = {"capacity": 400, "seed": 0, "priority_exponent": 1.0, "returns": (1, 0.99)}
    return EpisodeShard("prioritized", options, number, count, 60.0, None)


def stored(shards: list[EpisodeShard]) -> list[Any]:
    return list(map(trajectories, shards))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 12), max_size=14),
    places=st.lists(st.integers(0, 2), min_size=14, max_size=14),
    before=st.integers(1, 3),
    after=st.integers(1, 3),
    data=st.data(),
)
def test_the_rows_of_all_shards_are_those_saved(lengths, places, before, after, data) -> None:
    shards = [shard(number, before) for number in range(before)]
    for number, length in enumerate(lengths):
        episode = numbered(f"e{number}", length, offset=100.0 * number, terminated=number % 3 > 0)
        shards[places[number] % before].held.add([episode])
    for one in shards:
        replay, rows = one.held.replay, len(one.held)
        if rows:
            priorities = data.draw(st.lists(st.floats(0.0, 1e3, width=32), min_size=rows, max_size=rows))
            replay.update_priority(replay.oldest_first(), torch.tensor(priorities))
    expected = stored(shards)
    with tempfile.TemporaryDirectory() as directory:
        folder = Folder.at("save", fs.SubTreeFileSystem(directory, fs.LocalFileSystem()))
        folders = [folder / f"shard-{number}" for number in range(before)]
        for one, place in zip(shards, folders, strict=True):
            one.save(place, None, WarmUp(1, 1))
        again = [shard(number, after) for number in range(after)]
        for one in again:
            one.stage(folders, {})
    for one in again:
        one.take_over()
    if before == after:
        assert stored(again) == expected
    every = sorted(rows for one in stored(again) for rows in one)
    for rows, of_save in zip(every, sorted(rows for one in expected for rows in one), strict=True):
        assert [observation for observation, _ in rows] == [observation for observation, _ in of_save]
        assert [priority for _, priority in rows] == pytest.approx([priority for _, priority in of_save], rel=1e-6)
