# SPDX-License-Identifier: Apache-2.0
"""Any sequence of writes, saves that share files and removals of saves: each save left is the buffer of its time."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.replay import Replay
from lightning_replay.saves import verify_replay
from lightning_replay.saving import DamagedFileError, chunks
from lightning_replay.saving import states as saved_state
from tests.ring_oracle import RingOracle
from tests.transitions import numbered_steps

CAPACITY = 40
BATCH = 4
NAMES = ("a", "b", "c")


class SavingMachine(RuleBasedStateMachine):
    """Rows of 64 bytes in chunks of four; the generator's state lies in chunks as well."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(chunks, "CHUNK_BYTES", 256)
        self.patch.setattr(saved_state, "LARGE_BYTES", 128)
        self.folder = Path(tempfile.mkdtemp())
        self.saves: dict[str, tuple[RingOracle, list[float], list[int]]] = {}
        self.rewards = [0.0] * CAPACITY

    def teardown(self) -> None:
        for name in list(self.saves):
            self.check(name)
        shutil.rmtree(self.folder)
        self.patch.undo()

    @initialize()
    def build(self) -> None:
        self.replay = recipes.prioritized(CAPACITY, BATCH, priority_exponent=1.0, priority_offset=0.0, seed=1)
        self.oracle = RingOracle(CAPACITY)

    @rule(count=st.sampled_from([1, 3, 17, 50]))
    def extend(self, count: int) -> None:
        steps = numbered_steps(self.oracle.written, count)
        slots = self.oracle.extend([False] * count)
        self.replay.extend(steps)
        for slot in slots:
            self.rewards[slot] = float(self.oracle.number[slot])

    @precondition(lambda self: self.oracle.length > 0)
    @rule(error=st.sampled_from([1.0, 2.0, 3.5]), data=st.data())
    def update(self, error: float, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, self.oracle.length - 1), min_size=1, max_size=3, unique=True))
        generations = [self.oracle.generation[slot] for slot in slots]
        errors = torch.full((len(slots),), error)
        self.replay.update_priority(torch.tensor(slots), errors, generation=torch.tensor(generations))
        self.oracle.update(slots, generations, errors.tolist())

    @precondition(lambda self: self.oracle.length > 0)
    @rule(reward=st.sampled_from([-1.0, -2.0]), data=st.data())
    def write_past_the_buffer(self, reward: float, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.oracle.length - 1))
        self.replay.storage.all_rows["next", "reward"][slot] = reward
        self.rewards[slot] = reward

    @rule(name=st.sampled_from(NAMES), previous=st.sampled_from([None, *NAMES, "never saved"]))
    def save(self, name: str, previous: str | None) -> None:
        before = {status.st_ino for status in self.files("*")}
        size = save_replay(self.replay, self.folder / name, previous=previous and self.folder / previous)
        self.saves[name] = copy.deepcopy(self.oracle), list(self.rewards), self.next_draws(self.replay)
        files = self.files(name)
        assert size.total == sum(status.st_size for status in files)
        assert size.written == sum(status.st_size for status in files if status.st_ino not in before)

    def files(self, pattern: str) -> list[os.stat_result]:
        folders = self.folder.glob(pattern)
        return [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]

    def next_draws(self, replay: Replay) -> list[int]:
        if self.oracle.length == 0 or self.oracle.total() == 0:
            return []
        state = replay.sampler.state_dict()
        drawn = replay.sample()["index"].tolist()
        replay.sampler.load_state_dict(state)
        return drawn

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.check(data.draw(st.sampled_from(sorted(self.saves))))

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saves)))
        del self.saves[name]
        shutil.rmtree(self.folder / name)

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def lose_a_file(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saves)))
        files = sorted((self.folder / name).glob("data-*/*"))
        data.draw(st.sampled_from(files)).unlink()
        del self.saves[name]
        with pytest.raises(DamagedFileError):
            verify_replay(self.folder / name)

    def check(self, name: str) -> None:
        oracle, rewards, draws = self.saves[name]
        assert verify_replay(self.folder / name)["length"] == oracle.length
        replay = load_replay(self.folder / name)
        assert len(replay) == oracle.length
        if oracle.length == 0:
            return
        rows = replay.storage.get(torch.arange(oracle.length))
        assert rows["observation"][:, 0].tolist() == oracle.number[: oracle.length]
        assert rows["generation"].tolist() == oracle.generation[: oracle.length]
        assert rows["next", "reward"][:, 0].tolist() == rewards[: oracle.length]
        leaves = replay.sampler.state_dict()["tree"]["leaves"]
        assert leaves[: oracle.length].tolist() == oracle.priority[: oracle.length]
        if draws:
            assert replay.sample()["index"].tolist() == draws


SavingMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestSaving = pytest.mark.slow(SavingMachine.TestCase)
