# SPDX-License-Identifier: Apache-2.0
"""Any sequence of extend, sample, update, save and load, beside a list that does the same the obvious way."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_replay import load_replay, recipes
from tests.ring_oracle import RingOracle
from tests.transitions import numbered_steps

CAPACITY = 7
BATCH = 4


class ReplayMachine(RuleBasedStateMachine):
    """Drives a prioritized buffer whose probabilities are the magnitudes themselves."""

    @initialize(n_steps=st.sampled_from([1, 3]))
    def build(self, n_steps: int) -> None:
        self.replay = recipes.prioritized(
            CAPACITY, BATCH, priority_exponent=1.0, priority_offset=0.0, n_steps=n_steps, discount=0.5, seed=1
        )
        self.oracle = RingOracle(CAPACITY)
        self.n_steps = n_steps
        self.drawn: list = []

    @rule(count=st.integers(1, 10), done_every=st.sampled_from([0, 3]))
    def extend(self, count: int, done_every: int) -> None:
        steps = numbered_steps(self.oracle.written, count, done_every=done_every)
        index = self.replay.extend(steps)
        expected = self.oracle.extend(steps["next", "done"].flatten().tolist())
        assert index.tolist() == expected

    @precondition(lambda self: self.oracle.length > 0 and self.oracle.total() > 0)
    @rule()
    def sample(self) -> None:
        batch = self.replay.sample()
        self.drawn.append(batch)
        for row in range(BATCH):
            slot = int(batch["index"][row])
            assert batch["observation"][row, 0] == self.oracle.number[slot]
            assert batch["generation"][row] == self.oracle.generation[slot]
            assert self.oracle.priority[slot] > 0, "a row of priority zero is never drawn"
            if self.n_steps > 1:
                reward, steps = self.oracle.n_step(slot, self.n_steps, discount=0.5)
                assert batch["next", "reward"][row, 0] == reward
                assert batch["steps_to_next_obs"][row, 0] == steps
        expected = self.oracle.weights(batch["index"].tolist(), exponent=0.4)
        np.testing.assert_allclose(batch["priority_weight"].numpy(), expected, rtol=1e-5)

    @precondition(lambda self: self.drawn)
    @rule(which=st.integers(0, 100), errors=st.lists(st.floats(-8, 8, width=16), min_size=BATCH, max_size=BATCH))
    def update(self, which: int, errors: list[float]) -> None:
        batch = self.drawn[which % len(self.drawn)]
        self.replay.update_priority(batch["index"], torch.tensor(errors), generation=batch["generation"])
        self.oracle.update(batch["index"].tolist(), batch["generation"].tolist(), errors)
        assert self.replay.stats()["stale_updates_dropped"] == self.oracle.late

    @precondition(lambda self: self.oracle.length > 0)
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.replay.save(Path(folder))
            self.replay = load_replay(folder, end_episodes=False)

    @invariant()
    def holds_what_the_oracle_holds(self) -> None:
        if not hasattr(self, "oracle") or self.oracle.length == 0:
            return
        assert len(self.replay) == self.oracle.length
        slots = torch.arange(self.oracle.length)
        rows = self.replay.storage.get(slots)
        assert rows["observation"][:, 0].tolist() == self.oracle.number[: self.oracle.length]


ReplayMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestReplay = pytest.mark.slow(ReplayMachine.TestCase)
