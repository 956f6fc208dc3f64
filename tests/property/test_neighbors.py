# SPDX-License-Identifier: Apache-2.0
"""Any sequence of writes, overwrites, draws, saves and loads, beside brute force in numpy."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_replay.neighbors import NeighborLists
from lightning_replay.saving import read_state, write_state

CAPACITY = 40
K = 6
WIDTH = 3
# Small integers make exact duplicates and ties, the others do not.
VALUES = st.one_of(st.integers(-2, 2).map(float), st.floats(-50, 50, width=16))
ROW = st.lists(VALUES, min_size=WIDTH, max_size=WIDTH)
SLOTS = st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=12, unique=True)


class NeighborMachine(RuleBasedStateMachine):
    """Drives lists of one kind; :meth:`limits` says which rows the lists may hold."""

    refresh_interval = 1
    drift_tolerance = math.inf

    @initialize(rows=st.lists(ROW, max_size=5), more=st.sampled_from([0, 20, 30]), seed=st.integers(0, 99))
    def build(self, rows: list[list[float]], more: int, seed: int) -> None:
        self.lists = self.make()
        self.rows: dict[int, np.ndarray] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.waiting: set[int] = set()
        rows = rows + np.random.default_rng(seed).integers(-3, 4, (more, WIDTH)).astype(float).tolist()
        if rows:
            self.store(list(range(len(rows))), rows)

    def make(self) -> NeighborLists:
        return NeighborLists(
            CAPACITY, K, refresh_interval=self.refresh_interval, num_spare=0, drift_tolerance=self.drift_tolerance
        )

    def store(self, slots: list[int], rows: list[list[float]]) -> None:
        self.lists.write(torch.tensor(slots), torch.tensor(rows, dtype=torch.float64))
        self.rows.update({slot: np.array(row) for slot, row in zip(slots, rows, strict=True)})
        self.waiting.update(slots)

    @rule(slots=SLOTS, data=st.data())
    def write(self, slots: list[int], data: st.DataObject) -> None:
        self.store(slots, [data.draw(ROW) for _ in slots])

    @rule(slots=SLOTS, seed=st.integers(0, 99))
    def write_far(self, slots: list[int], seed: int) -> None:
        """Rows that take no list's lost neighbours' place."""
        self.store(slots, np.random.default_rng(seed).uniform(30, 40, (len(slots), WIDTH)).tolist())

    def std(self) -> np.ndarray:
        """The standard deviations that the lists go by, from the definition."""
        std = np.array(list(self.rows.values())).std(0)
        # np.std of a constant column may be the rounding of its mean.
        return np.where(np.ptp(list(self.rows.values()), axis=0) == 0, 0.0, std)

    def distances(self, slot: int, others: list[int]) -> np.ndarray:
        std = self.std()
        scale = np.divide(1.0, std, out=np.zeros(WIDTH), where=std > 0)
        return np.array([(((self.rows[slot] - self.rows[other]) * scale) ** 2).sum() for other in others])

    def nearest(self, slot: int) -> list[float]:
        """Squared distances of the K nearest rows that may be listed."""
        allowed = [other for other in self.rows if other != slot and other not in self.waiting]
        return sorted(self.distances(slot, allowed))[:K]

    def served(self, index: list[int]) -> None:
        """Says that a draw of ``index`` brought the lists up to date, where it had to."""
        enough = len(self.waiting) >= min(self.refresh_interval, len(self.rows) // 2)
        if self.refresh_interval == 1 or enough or self.waiting & set(index):
            self.waiting.clear()

    def check(self, slot: int, found: list[int]) -> None:
        assert slot not in found and len(set(found)) == len(found)
        assert not set(found) & self.waiting and set(found) <= set(self.rows)
        true, listed = self.nearest(slot), self.distances(slot, found)
        if not self.waiting:
            np.testing.assert_allclose(listed, true, rtol=1e-4, atol=1e-4)
        elif found:
            # Rows just overwritten are missing; what is left is still among the nearest.
            assert (listed <= true[-1] * (1 + 1e-4) + 1e-4).all()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def neighbors(self, data: st.DataObject) -> None:
        index = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, max_size=8))
        found = self.lists.neighbors(torch.tensor(index)).tolist()
        self.served(index)
        for slot, row in zip(index, found, strict=True):
            self.check(slot, [neighbor for neighbor in row if neighbor >= 0])

    @precondition(lambda self: self.rows)
    @rule()
    def all_neighbors(self) -> None:
        index = sorted(self.rows)
        found = self.lists.neighbors(torch.tensor(index)).tolist()
        self.served(index)
        for slot, row in zip(index, found, strict=True):
            self.check(slot, [neighbor for neighbor in row if neighbor >= 0])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def draw(self, data: st.DataObject) -> None:
        self.draw_partners(data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, max_size=8)))

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data(), value=VALUES)
    def overwrite_a_neighbor(self, data: st.DataObject, value: float) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        found = self.lists.neighbors(torch.tensor([slot]))[0]
        self.served([slot])
        if found[0] >= 0:
            self.store([int(found[0])], [[value] * WIDTH])
        self.draw_partners([slot] * 32)

    def draw_partners(self, index: list[int]) -> None:
        partners = self.lists.draw(torch.tensor(index), self.generator).tolist()
        self.served(index)
        for slot, partner in zip(index, partners, strict=True):
            if len(self.rows) == 1:
                assert partner == slot
                continue
            if self.refresh_interval > 1 and not self.lists.state_dict()["upkeep"]["waiting"].any():
                self.waiting.clear()  # a list that had lost everything asked for a pass
            assert partner != slot and partner in self.rows and partner not in self.waiting
            self.near(slot, partner)

    def near(self, slot: int, partner: int) -> None:
        assert self.distances(slot, [partner])[0] <= self.nearest(slot)[-1] * (1 + 1e-4) + 1e-4

    @precondition(lambda self: self.rows)
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_state(Path(folder) / "lists", self.lists.state_dict())
            again = self.make()
            again.load_state_dict(read_state(Path(folder) / "lists"))
        state, index = self.generator.get_state(), torch.tensor(sorted(self.rows))[::3]
        expected = self.lists.draw(index, self.generator)
        assert torch.equal(again.draw(index, torch.Generator().set_state(state)), expected)
        self.lists = again
        self.served(index.tolist())
        if self.refresh_interval > 1 and not again.state_dict()["upkeep"]["waiting"].any():
            self.waiting.clear()

    @invariant()
    def counts(self) -> None:
        assert len(self.lists) == len(self.rows)


class CachedMachine(NeighborMachine):
    """Lists kept up as rows come and go, in a standardisation that stands still between rebuilds."""

    refresh_interval = 5

    def std(self) -> np.ndarray:
        return self.lists.standardization.std.numpy()


class DriftingMachine(CachedMachine):
    """The same with restandardisation: lists are then approximate, but hold rows that are there, and enough."""

    drift_tolerance = 0.03

    def check(self, slot: int, found: list[int]) -> None:
        assert slot not in found and len(set(found)) == len(found)
        assert not set(found) & self.waiting and set(found) <= set(self.rows)
        if not self.waiting:
            assert len(found) == min(K, len(self.rows) - 1)
            assert self.distances(slot, found).tolist() == sorted(self.distances(slot, found)) or np.allclose(
                np.maximum.accumulate(self.distances(slot, found)), self.distances(slot, found), atol=1e-4
            )

    def near(self, slot: int, partner: int) -> None:
        """Any other row may be drawn; that most are near is a matter of recall, tested with more rows."""


SETTINGS = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestDefinition = pytest.mark.slow(NeighborMachine.TestCase)
TestCached = pytest.mark.slow(CachedMachine.TestCase)
TestDrifting = pytest.mark.slow(DriftingMachine.TestCase)
TestDefinition.settings = TestCached.settings = TestDrifting.settings = SETTINGS
