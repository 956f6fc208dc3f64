# SPDX-License-Identifier: Apache-2.0
"""Pairs whose first rows come from tables."""

from __future__ import annotations

import pytest
import torch

from lightning_replay import PackedStorage, load_replay
from lightning_replay.events import EventTable
from lightning_replay.samplers import (
    ContinuousTransitionSampler,
    NeighborhoodMixupSampler,
    PairSampler,
    RandomPairSampler,
)
from lightning_replay.samplers.tables import TableShares
from lightning_replay.table_replay import TableReplay
from lightning_replay.transforms import MixPairs
from lightning_replay.writers.tables import EventTableWriter
from tests.event_steps import IsTrue, fill


def pairs(sampler: PairSampler, **options) -> TableReplay:
    goal = EventTable("goal", condition=IsTrue("goal"), history_length=2, capacity=4)
    writer = EventTableWriter(8, [goal], max_trajectories=20)
    given = {"transform": MixPairs(keys=["observation", ("next", "observation")]), "batch_size": 6, "seed": 0}
    return TableReplay(storage=PackedStorage(writer.num_slots), writer=writer, sampler=sampler, **given | options)


def neighbors(**options) -> NeighborhoodMixupSampler:
    first = TableShares({"default": 0.5, "goal": 0.5}, **options)
    return NeighborhoodMixupSampler(
        num_neighbors=2, base_sampler=first, feature_keys=["observation"], refresh_interval=1
    )


@pytest.mark.parametrize(
    "sampler",
    [
        neighbors(),
        RandomPairSampler(base_sampler=TableShares({"default": 0.5, "goal": 0.5})),
        ContinuousTransitionSampler(base_sampler=TableShares({"default": 0.5, "goal": 0.5})),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_pairs_begin_with_rows_of_the_tables_and_never_take_a_row_that_left_them(sampler) -> None:
    """Free slots still hold rows, among which neighbours are found; those pairs are left unmixed."""
    replay = pairs(sampler)
    fill(replay, 8)
    stale = replay.tables.state_dict()["slots"]["free"][:4]
    assert bool((replay.storage.generation_of(stale) > 0).any()), "otherwise nothing is tested"
    drawn = []
    for _ in range(60):
        batch = replay.sample()
        assert batch.shape == (6,) and batch["table"].tolist() == [0, 0, 0, 1, 1, 1]
        assert set(batch["index"][3:, 0].tolist()) <= set(replay.tables.slots_of(1).tolist())
        drawn.append(batch["index"])
    index = torch.cat(drawn)
    assert bool((torch.from_numpy(replay.tables.references)[index] > 0).all())
    assert bool((index[:, 0] != index[:, 1]).any())
    assert replay.stats()["tables"]["goal"]["share_drawn"] == 0.5


def test_pairs_over_tables_learn_from_td_errors(tmp_path) -> None:
    replay = pairs(neighbors(priority_exponent=1.0, priority_offset=0.0, importance_exponent=1.0, correction=None))
    fill(replay, 2)
    slots = torch.from_numpy(replay.tables.slots_of(1))
    replay.update_priority(torch.arange(len(replay.storage)), torch.ones(len(replay.storage)))
    replay.update_priority(slots, torch.tensor([0.0, 0, 0, 3]))
    batch = replay.sample()
    assert batch["index"][3:, 0].tolist() == [int(slots[-1])] * 3
    assert batch["priority_weight"].shape == (6,)
    replay.save(tmp_path)
    loaded = load_replay(tmp_path, trust=["tests"])
    for _ in range(5):
        assert torch.equal(loaded.sample()["observation"], replay.sample()["observation"])
