# SPDX-License-Identifier: Apache-2.0
"""Writers over TorchRL's storages do what they do in a ``Replay`` over a ``PackedStorage``, whatever the calls are."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import TensorDictReplayBuffer

from lightning_replay import Replay
from lightning_replay.storage.packed import rows_of
from tests.torchrl_parts import PARTS, built
from tests.transitions import numbered_steps

CALLS = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 60)),
    st.tuples(st.just("add"), st.just(1)),
    st.tuples(st.just("update"), st.integers(0, 2**20)),
    st.tuples(st.just("empty"), st.just(0)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("load"), st.just(0)),
)


class Pair:
    """A buffer of TorchRL over one of its storages, and the ``Replay`` that it is compared with."""

    def __init__(self, name: str, buffer: str, storage: str) -> None:
        self.own: Any = built(buffer, PARTS[name], storage)
        self.replay: Replay = built("Replay", PARTS[name], "PackedStorage")
        self.written = 0
        self.saved: list[Any] | None = None
        self.was_loaded = False

    def extend(self, count: int) -> None:
        steps = numbered_steps(self.written, count, done_every=7)
        steps["task"] = steps["observation"][:, 0].long() % 2
        self.written += count
        slots = self.own.extend(steps.clone())
        self.replay.extend(steps)
        assert len(slots) == count
        assert slots[slots >= 0][-len(self.replay.last_insertion.slots) :].tolist() == (
            self.replay.last_insertion.slots.tolist()
        )

    def add(self, _: int) -> None:
        if isinstance(self.own, TensorDictReplayBuffer):
            return  # It gives the row TorchRL's default priority, which is then the largest so far.
        steps = numbered_steps(self.written, 1, done_every=7)
        steps["task"] = steps["observation"][:, 0].long() % 2
        self.written += 1
        slot = self.own.add(steps[0].clone())
        self.replay.add(steps[0])
        assert [slot] == (self.replay.last_insertion.slots.tolist() or [-1])

    def update(self, seed: int) -> None:
        held = self.held()
        if len(held):
            generator = torch.Generator().manual_seed(seed)
            chosen = held[torch.randint(len(held), (5,), generator=generator)]
            errors = torch.rand(5, generator=generator)
            self.own.update_priority(chosen, errors)
            self.replay.update_priority(chosen, errors)

    def empty(self, _: int) -> None:
        self.own.empty()
        self.replay.empty()

    def save(self, _: int) -> None:
        self.saved = [copy.deepcopy(one.state_dict()) for one in (self.own, self.replay)]

    def load(self, _: int) -> None:
        if self.saved is not None:
            self.own.load_state_dict(copy.deepcopy(self.saved[0]))
            self.replay.load_state_dict(self.saved[1])
            self.was_loaded = True

    def held(self) -> torch.Tensor:
        occupancy = rows_of(self.replay.storage).occupancy
        slots = occupancy.slots()
        drawable = occupancy.drawable(slots)
        return slots if drawable is None else slots[drawable]

    def check(self) -> None:
        own, packed = rows_of(self.own.storage), rows_of(self.replay.storage)
        slots = packed.occupancy.slots()
        assert torch.equal(own.occupancy.slots(), slots)
        # A load counts on from the largest generation in both, but not by the same number.
        assert self.was_loaded or torch.equal(own.generation_of(slots), packed.generation_of(slots))
        assert len(self.own.storage) == len(self.replay.storage)
        if len(slots):
            column = own.readable_rows["observation"][slots]
            assert torch.equal(column, packed.readable_rows["observation"][slots])
            held = self.held()
            assert torch.equal(self.own.sampler.priority_of(held), self.replay.sampler.priority_of(held))
            for sampler in (self.own.sampler, self.replay.sampler):
                sampler.reseed(1)
            drawn = [self._drawn(one) for one in (self.own, self.replay)]
            assert drawn[0] == drawn[1]

    @staticmethod
    def _drawn(buffer: Any) -> Any:
        try:
            index, info = buffer.sampler.sample(buffer.storage, 4)
        except RuntimeError as error:  # A table is empty.
            return str(error)
        return index.tolist(), {key: value.tolist() for key, value in info.items()}


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage", "ListStorage"])
@pytest.mark.parametrize("buffer", ["ReplayBuffer", "TensorDictReplayBuffer"])
@pytest.mark.parametrize("name", ["event tables", "tasks", "retention"])
@settings(max_examples=15, deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=8))
def test_any_calls(name: str, buffer: str, storage: str, calls: list[tuple[str, int]]) -> None:
    pair = Pair(name, buffer, storage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method, argument in calls:
            getattr(pair, method)(argument)
            pair.check()
