# SPDX-License-Identifier: Apache-2.0
"""Neighbour lists updated by compiled loops are those that torch updates."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.neighbors import NeighborLists, lists
from lightning_replay.neighbors.cache import NeighborCache


def both(capacity: int, monkeypatch: pytest.MonkeyPatch) -> tuple[NeighborLists, NeighborLists]:
    """Lists of few spare rows, compiled and by torch."""
    options = {"refresh_interval": 2, "num_spare": 0, "drift_tolerance": 0.5}
    compiled, by_torch = (NeighborLists(capacity, 3, **options) for _ in range(2))
    first = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    compiled.write(torch.arange(12), first)
    with monkeypatch.context() as patch:
        patch.setattr(lists, "CompiledNeighborCache", NeighborCache)
        by_torch.write(torch.arange(12), first)
    return compiled, by_torch


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    writes=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=6, unique=True), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
def test_the_lists_are_equal_after_any_writes(writes: list[list[int]], seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        compiled, by_torch = both(40, monkeypatch)
    generator = torch.Generator().manual_seed(seed)
    for slots in writes:
        features = torch.randn(len(slots), 3, generator=generator)
        for one in (compiled, by_torch):
            one.write(torch.tensor(slots), features)
            one.neighbors(torch.tensor(slots))  # of rows that wait, which has all of them enter the lists
        mine, theirs = (one.state_dict()["upkeep"]["cache"] for one in (compiled, by_torch))
        assert torch.equal(mine["slot"], theirs["slot"])
        assert torch.equal(mine["choices"], theirs["choices"])
        torch.testing.assert_close(mine["distance"], theirs["distance"])
        torch.testing.assert_close(mine["radius"], theirs["radius"])
        index = torch.tensor(slots)
        drawn = [one.draw(index, torch.Generator().manual_seed(seed)) for one in (compiled, by_torch)]
        assert torch.equal(*drawn)


def test_lists_can_be_pickled() -> None:
    lists_ = NeighborLists(4, 1)
    lists_.write(torch.arange(3), torch.tensor([[0.0], [1.0], [5.0]]))
    restored = pickle.loads(pickle.dumps(lists_))
    assert restored.draw(torch.arange(3), torch.Generator()).tolist() == [1, 0, 1]
