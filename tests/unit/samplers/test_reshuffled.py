# SPDX-License-Identifier: Apache-2.0
"""Draws without replacement: against lists of what was drawn in an epoch, their order, saves and other writers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from lightning_replay import Replay, load_replay, recipes
from lightning_replay.divided_draws import Divider
from lightning_replay.samplers import ReshuffledSampler
from lightning_replay.storage import FrameStorage, PackedStorage
from lightning_replay.writers import RetentionWriter, SurpriseOnly
from tests.transitions import numbered_steps


def make_replay(capacity: int, seed: int = 0, **options) -> Replay:
    return Replay(storage=PackedStorage(capacity), sampler=ReshuffledSampler(), batch_size=2, seed=seed, **options)


class Epoch:
    """Slots that are held, and those of them that were drawn in the present epoch."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.drawn: set[int] = set()

    def draw(self, slots: list[int]) -> None:
        for slot in slots:
            if self.drawn == self.held:
                self.drawn = set()
            assert slot in self.held - self.drawn
            self.drawn.add(slot)


calls = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 9)),
        st.tuples(st.just("sample"), st.integers(1, 20)),
        st.tuples(st.just("evict"), st.lists(st.integers(0, 6), min_size=1, max_size=3)),
        st.tuples(st.sampled_from(["empty", "reload"]), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=50, deadline=None)
@given(calls=calls, seed=st.integers(0, 99))
def test_no_row_is_drawn_twice_in_an_epoch(calls, seed: int) -> None:
    # With a writer that keeps rows by their surprise, which leave from slots in any order.
    def build() -> Replay:
        return make_replay(7, seed, writer=RetentionWriter(SurpriseOnly(), always_admit=True))

    replay, epoch = build(), Epoch()
    for name, value in calls:
        if name == "extend":
            slots = replay.extend(numbered_steps(0, value)).tolist()
            epoch.held |= set(slots)
        elif name == "evict" and replay.storage.num_stored:
            replay.sampler.on_evict(torch.tensor(value))  # then they are drawn as if they were stored just now
            epoch.drawn -= set(value)
        elif name == "empty":
            replay.empty()
            epoch = Epoch()
        elif name == "reload":
            state, replay = replay.state_dict(), build()
            replay.load_state_dict(state)
        elif name == "sample" and epoch.held:
            epoch.draw(replay.sample(value)["index"].tolist())


@pytest.mark.slow
def test_orders_are_equally_likely_also_after_rows_entered() -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    replay = make_replay(4, seed=3)
    for _ in range(900):
        replay.empty()
        replay.extend(numbered_steps(0, 3))
        first = replay.sample(1)["index"].tolist()
        replay.extend(numbered_steps(3, 1))  # the fourth slot, which is drawn in this epoch
        counts[(*first, *replay.sample(3)["index"].tolist())] += 1
    assert len(counts) == 18 and chisquare(list(counts.values())).pvalue > 1e-4
    # Of one epoch after the other, where nothing is built anew.
    again = Counter(tuple(replay.sample(4)["index"].tolist()) for _ in range(1_200))
    assert len(again) == 24 and chisquare(list(again.values())).pvalue > 1e-4


def test_a_row_takes_the_place_of_the_one_that_it_overwrites() -> None:
    replay = make_replay(4)
    replay.extend(numbered_steps(0, 4))
    drawn = replay.sample(2)["index"].tolist()
    replay.extend(numbered_steps(4, 4))
    assert sorted(drawn + replay.sample(2)["index"].tolist()) == [0, 1, 2, 3]


def test_a_save_draws_on(tmp_path: Path) -> None:
    replay = make_replay(10)
    replay.extend(numbered_steps(0, 8))
    replay.sample(5)
    replay.save(tmp_path / "replay")
    again = load_replay(tmp_path / "replay")
    assert [again.sample(3)["index"].tolist() for _ in range(6)] == [
        replay.sample(3)["index"].tolist() for _ in range(6)
    ]
    for one in (replay, again):
        one.seed(5)
    assert torch.equal(again.sample(4)["index"], replay.sample(4)["index"])


def test_a_buffer_that_was_filled_before() -> None:
    replay = recipes.uniform(5, 5)
    replay.extend(numbered_steps(0, 5))
    replay.set_sampler(ReshuffledSampler(seed=0))
    assert sorted(replay.sample()["index"].tolist()) == [0, 1, 2, 3, 4]
    assert replay.sampler.nbytes == 80
    with pytest.raises(RuntimeError, match="call extend first"):
        make_replay(4).sample()


def test_frames_are_evicted_with_their_rows() -> None:
    storage = FrameStorage(8, 2, "pixels", frame_capacity=8)
    replay = Replay(storage=storage, sampler=ReshuffledSampler(), batch_size=2, seed=0)
    for step in range(12):
        frames = torch.full((1, 2, 4, 4), step, dtype=torch.uint8)
        steps = numbered_steps(step, 1).set("pixels", frames).set(("next", "pixels"), frames + 100)
        replay.extend(steps)
        drawn = replay.sample(2 * len(replay))["index"]  # the rest of an epoch and a whole one
        assert set(drawn.tolist()) == set(storage.occupancy.slots().tolist())


def test_each_of_several_replays_has_epochs_of_its_own() -> None:
    shards = [make_replay(8, seed) for seed in range(2)]
    for shard in shards:
        shard.extend(numbered_steps(0, 8))
    divider, drawn = Divider(ReshuffledSampler(), seed=0), ([], [])
    for _ in range(20):
        division = divider.divide(4, [shard.group_totals() for shard in shards])
        for own, shard, part in zip(drawn, shards, division.parts, strict=True):
            own += shard.sample_shard(part)[0]["index"].tolist() if len(part) else []
    assert all(max(Counter(own).values()) - min(Counter(own).values()) <= 1 for own in drawn)
    assert sum(map(len, drawn)) == 80


def test_a_state_that_names_no_order_of_slots_is_refused() -> None:
    replay = make_replay(4)
    replay.extend(numbered_steps(0, 3))
    replay.sample(1)
    for order, ends in (([0, 1, 9, 0], [1, 3]), ([0, 0, 1, 2], [1, 3]), ([0, 1, 2, 3], [3, 1]), ([0, 1, 2, 3], [1, 5])):
        state = replay.sampler.state_dict() | {"order": torch.tensor(order), "ends": torch.tensor(ends)}
        with pytest.raises(ValueError, match="names slots twice or slots that there are not"):
            replay.sampler.load_state_dict(state)
    assert len(set(replay.sample(2)["index"].tolist())) == 2


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 3, 4]])
def test_a_state_of_another_storage_is_refused(order: list[int]) -> None:
    replay = make_replay(4)
    replay.extend(numbered_steps(0, 3))
    before = replay.sampler.state_dict()
    replay.sampler.load_state_dict(before | {"order": torch.tensor(order), "ends": torch.tensor([0, 3])})
    for call in (lambda: replay.sample(1), lambda: replay.extend(numbered_steps(3, 1))):
        with pytest.raises(ValueError, match="slots, not all the same; load another save"):
            call()
    replay.sampler.load_state_dict(before)
    assert replay.sample(1)["index"].tolist()[0] < 4


def test_a_state_with_slots_that_hold_no_row_is_refused() -> None:
    replay = make_replay(4)
    replay.extend(numbered_steps(0, 2))
    replay.sampler.load_state_dict(
        replay.sampler.state_dict() | {"order": torch.arange(4), "ends": torch.tensor([0, 3])}
    )
    with pytest.raises(ValueError, match="names slots without a row"):
        replay.sample(1)
