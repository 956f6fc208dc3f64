# SPDX-License-Identifier: Apache-2.0
"""Any sequence of extend, sample, update, save and load, beside two buffers that are used one after the other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_replay import Replay, load_replay, recipes
from tests.transitions import numbered_steps

RECIPES: dict[str, Any] = {
    "prioritized": {},
    "uniform": {},
    "mixup": {},
    "neighborhood_mixup": {"num_neighbors": 2, "update_partners": True, "priority_exponent": 0.5},
}
SHARES = [0.0, 0.25, 0.5, 1.0]
BATCH = 8


class MixedMachine(RuleBasedStateMachine):
    """The oracle draws from each buffer by itself and joins the rows by hand."""

    @initialize(
        kinds=st.tuples(*[st.sampled_from(sorted(RECIPES))] * 2),
        share=st.sampled_from(SHARES),
        stored=st.integers(1, 30),
    )
    def build(self, kinds: tuple[str, str], share: float, stored: int) -> None:
        self.kinds, self.share = kinds, share
        self.alone: list[Replay] = [self.side(0), self.side(1)]
        self.alone[1].extend(numbered_steps(1000, stored))
        offline = self.side(1)
        offline.extend(numbered_steps(1000, stored))
        self.replay = recipes.mixed(online=self.side(0), offline=offline, share=share, batch_size=BATCH)
        self.given, self.stored = 0, stored
        self.drawn: list[tuple[Any, list[Any]]] = []

    def side(self, number: int) -> Replay:
        kind = self.kinds[number]
        return recipes.by_name(kind)(capacity=20 + 20 * number, batch_size=BATCH, seed=number, **RECIPES[kind])

    @rule(count=st.integers(1, 12))
    def extend(self, count: int) -> None:
        steps = numbered_steps(self.given, count)
        assert self.replay.extend(steps).tolist() == self.alone[0].extend(steps).tolist()
        self.given += count

    @precondition(lambda self: self.share > 0 or self.given)
    @rule()
    def sample(self) -> None:
        offline = int(BATCH * self.share)
        if offline and len(self.alone[0]) < BATCH - offline:
            offline = BATCH
        batch, counts = self.replay.sample(), (BATCH - offline, offline)
        parts = [one.sample(count) if count else None for one, count in zip(self.alone, counts, strict=True)]
        self.drawn.append((batch, parts))
        assert batch["is_offline"].tolist() == [False] * counts[0] + [True] * counts[1]
        start = 0
        for number, part in enumerate(parts):
            if part is None:
                continue
            rows = batch[start : start + len(part)]
            start += len(part)
            for key in ("observation", "action", ("next", "reward")):
                assert torch.equal(rows[key], part[key])
            index = rows["index"] - (number << 40)
            if part["index"].ndim < index.ndim:
                index = index[:, 0]
            assert torch.equal(index, part["index"])
            weight = part.get("priority_weight", torch.ones(len(part)))
            assert torch.equal(rows.get("priority_weight", torch.ones(len(part))), weight)

    @precondition(lambda self: self.drawn)
    @rule(which=st.integers(0, 100), seed=st.integers(0, 9), by_index=st.booleans())
    def update(self, which: int, seed: int, by_index: bool) -> None:
        batch, parts = self.drawn[which % len(self.drawn)]
        error = torch.randn(BATCH, generator=torch.Generator().manual_seed(seed))
        if by_index:
            self.replay.update_priority(batch["index"], error, generation=batch["generation"])
        else:
            self.replay.update_priority(batch, error)
        start = 0
        for one, part in zip(self.alone, parts, strict=True):
            if part is not None:
                one.update_priority(part, error[start : start + len(part)])
                start += len(part)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.replay.save(Path(folder))
            self.replay = load_replay(Path(folder), end_episodes=False)

    @invariant()
    def sides_hold_what_the_oracle_holds(self) -> None:
        if not hasattr(self, "replay"):
            return
        assert len(self.replay.offline) == self.stored
        for side, one in zip((self.replay.online, self.replay.offline), self.alone, strict=True):
            assert len(side) == len(one)
            assert side.generator_fingerprint() == one.generator_fingerprint()
            slots = torch.arange(len(one))
            if one.is_prioritized:
                assert torch.equal(side.sampler.priority_of(slots), one.sampler.priority_of(slots))


TestMixedMachine = pytest.mark.slow(MixedMachine.TestCase)
TestMixedMachine.settings = settings(max_examples=15, stateful_step_count=10, deadline=None)
