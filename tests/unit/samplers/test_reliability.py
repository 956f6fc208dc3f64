# SPDX-License-Identifier: Apache-2.0
"""Priorities adjusted by reliability, against sums over lists of the rows of each episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lightning_replay import Replay, load_replay
from lightning_replay.episodes.links import EpisodeLinks
from lightning_replay.samplers import ReliabilityAdjustedSampler
from lightning_replay.storage import PackedStorage
from tests.stored import tree_leaves

OFFSET, ALPHA, OMEGA = 0.125, 0.5, 0.25
OPTIONS = {"priority_exponent": ALPHA, "reliability_exponent": OMEGA, "priority_offset": OFFSET}


def make_replay(capacity: int, rows_per_update: int | None = None, **options) -> Replay:
    sampler = ReliabilityAdjustedSampler(capacity, rows_per_update=rows_per_update, **OPTIONS | options)
    return Replay(storage=PackedStorage(capacity), sampler=sampler, batch_size=2, seed=0)


def steps(done: list[bool], trajectory: list[int] | None = None) -> TensorDict:
    flags = torch.tensor(done).unsqueeze(1)
    columns = {"next": {"done": flags, "terminated": flags}}
    columns |= {} if trajectory is None else {"trajectory": torch.tensor(trajectory)}
    return TensorDict(columns, [len(done)])


class Lists:
    """The rows of a ring as lists, one for each episode; each row is ``[slot, error, reliability]``."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.next_slot, self.largest, self.has_errors = capacity, 0, 1.0, False
        self.running: dict[int, list] = {}
        self.episodes: list[list] = []
        self.sums: dict[int, float] = {}  # by the row that was last when the episode was renewed

    def extend(self, done: list[bool], trajectory: list[int]) -> list[int]:
        slots = []
        for ends, name in zip(done, trajectory, strict=True):
            slot, self.next_slot = self.next_slot, (self.next_slot + 1) % self.capacity
            for rows in self.episodes:
                rows[:] = [row for row in rows if row[0] != slot]
            self.sums.pop(slot, None)
            self.episodes = [rows for rows in self.episodes if rows]
            self.running = {one: rows for one, rows in self.running.items() if rows}
            if name not in self.running:
                self.running[name] = []
                self.episodes.append(self.running[name])
            self.running[name].append([slot, self.largest, 1.0])
            if ends:
                self.running.pop(name)
            slots.append(slot)
        return slots

    def end(self) -> None:
        self.running = {}

    def update(self, slots: list[int], errors: list[float]) -> None:
        at = {row[0]: (row, rows) for rows in self.episodes for row in rows}
        for slot, error in zip(slots, errors, strict=True):
            at[slot][0][1] = error
        if errors:  # 1 is the largest until one is given
            self.largest, self.has_errors = max(errors + [self.largest] * self.has_errors), True
        renewed = [at[slot][1] for slot in slots]
        for rows in renewed:
            for row in rows:
                self.sums.pop(row[0], None)
            self.sums[rows[-1][0]] = sum(row[1] + OFFSET for row in rows)
        for rows in renewed:
            runs = any(rows is one for one in self.running.values())
            bound, so_far = max(self.sums.values()) if runs else self.sums[rows[-1][0]], 0.0
            for row in rows:
                so_far += row[1] + OFFSET
                row[2] = so_far / bound

    def leaves(self) -> np.ndarray:
        found = np.zeros(self.capacity)
        for slot, error, reliability in (row for rows in self.episodes for row in rows):
            found[slot] = reliability**OMEGA * (error + OFFSET) ** ALPHA
        return found


rows = st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=6)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), rows),
        st.tuples(st.just("update"), st.lists(st.tuples(st.integers(0, 99), st.floats(0.25, 8.0, width=32)))),
        st.tuples(st.sampled_from(["end", "reload"]), st.none()),
    ),
    min_size=3,
    max_size=14,
)


@settings(max_examples=50, deadline=None)
@given(calls=calls)
def test_priorities_are_those_of_lists(calls) -> None:
    replay, lists = make_replay(9), Lists(9)
    for name, value in calls:
        if name == "extend":
            done, trajectory = [ends for ends, _ in value], [number for _, number in value]
            assert replay.extend(steps(done, trajectory)).tolist() == lists.extend(done, trajectory)
        elif name == "update" and len(replay):
            slots = [place % len(replay) for place, _ in value]
            errors = [error for _, error in value]
            replay.update_priority(torch.tensor(slots, dtype=torch.int64), torch.tensor(errors))
            lists.update(slots, errors)
            if slots:  # bit for bit the largest of all
                assert replay.sampler._largest_sum[1] == replay.sampler._of_rows[2].max()
        elif name == "end":
            replay.end_episodes()
            lists.end()
        elif name == "reload":
            state, replay = replay.state_dict(), make_replay(9)
            replay.load_state_dict(state)
        np.testing.assert_allclose(tree_leaves(replay).numpy(), lists.leaves(), rtol=1e-5)


def test_worked_numbers() -> None:
    replay = make_replay(8, priority_offset=0.0)
    slots = replay.extend(steps([False, False, True, False, False]))
    replay.update_priority(slots[:3], torch.tensor([3.0, 1.0, 4.0]))
    assert replay.sampler.reliability_of(slots).tolist() == [0.375, 0.5, 1.0, 1.0, 1.0]
    replay.update_priority(slots[3:4], torch.tensor([2.0]))  # of a running episode: over the 8 of the other
    assert replay.sampler.reliability_of(slots[3:]).tolist() == [0.25, 0.375]  # the new row has the largest error of 1
    assert replay.sampler.priority_of(slots).tolist() == [3.0, 1.0, 4.0, 2.0, 1.0]
    replay.update_priority(slots[2:3], torch.tensor([0.0]))
    assert replay.sampler.reliability_of(slots[:3]).tolist() == [0.75, 1.0, 1.0]


def test_the_largest_sum_is_that_of_the_episodes_as_they_are() -> None:
    """A running episode had a sum of 9 at its first row, which is not its last row any more."""
    replay = make_replay(8, priority_offset=0.0)
    first = replay.extend(steps([False], [1]))
    replay.update_priority(first, torch.tensor([9.0]))
    second = replay.extend(steps([False], [1]))
    replay.update_priority(torch.cat((first, second)), torch.tensor([1.0, 1.0]))
    other = replay.extend(steps([False], [2]))
    replay.update_priority(other, torch.tensor([1.0]))
    assert replay.sampler.reliability_of(other).tolist() == [0.5]  # over the 2 of the first episode


def test_the_largest_sum_leaves_with_its_episode() -> None:
    replay = make_replay(8, priority_offset=0.0)
    slots = replay.extend(steps([True, True, False], [1, 2, 3]))
    replay.update_priority(slots, torch.tensor([8.0, 4.0, 1.0]))
    assert replay.sampler.reliability_of(slots[2:]).tolist() == [0.125]
    replay.sampler.on_evict(slots[:1])
    replay.update_priority(slots[2:], torch.tensor([1.0]))
    assert replay.sampler.reliability_of(slots[2:]).tolist() == [0.25]


def test_no_more_episodes_are_renewed_than_fit() -> None:
    replay, whole = make_replay(12, rows_per_update=5), make_replay(12)
    for one in (replay, whole):
        slots = one.extend(steps([False, False, False, True] * 3))
        one.update_priority(slots, torch.arange(1.0, 13.0))
    found, exact = map(tree_leaves, (replay, whole))
    torch.testing.assert_close(found[:8], exact[:8])  # two episodes: after the first there was room
    torch.testing.assert_close(found[8:], (torch.arange(9.0, 13.0) + OFFSET) ** ALPHA)  # their errors count at once
    replay.update_priority(slots[8:9], torch.tensor([9.0]))
    torch.testing.assert_close(tree_leaves(replay), exact)


def test_rows_that_leave_have_no_priority() -> None:
    replay = make_replay(6)
    slots = replay.extend(steps([False, False, False, False]))
    replay.sampler.on_evict(slots[1:2])
    replay.update_priority(slots[2:], torch.tensor([1.0, 3.0]))
    assert tree_leaves(replay)[[1, 4, 5]].tolist() == [0.0, 0.0, 0.0]
    expected = torch.tensor([1.125, 4.25]) / 4.25  # from the first row after the gap on
    torch.testing.assert_close(replay.sampler.reliability_of(slots[2:]), expected)
    replay.sampler.on_evict(slots[2:])
    replay.update_priority(slots[:1], torch.ones(1))
    assert tree_leaves(replay).count_nonzero() == 1


def test_other_exponents_and_offsets_hold_for_stored_rows(tmp_path: Path, caplog) -> None:
    replay = make_replay(8)
    slots = replay.extend(steps([False, False, True]))
    replay.update_priority(slots, torch.tensor([3.0, 1.0, 4.0]))
    replay.save(tmp_path / "replay")
    again = load_replay(tmp_path / "replay")
    for _ in range(4):
        assert torch.equal(again.sample()["index"], replay.sample()["index"])
        assert torch.equal(again.sample()["priority_weight"], replay.sample()["priority_weight"])
    other = make_replay(8, priority_exponent=1.0, priority_offset=1.0)
    other.load(tmp_path / "replay")
    reliability = torch.tensor([4.0, 6.0, 11.0]) / 11.0  # each error with the offset added
    wanted = reliability**OMEGA * (torch.tensor([3.0, 1.0, 4.0]) + 1.0)
    torch.testing.assert_close(tree_leaves(other)[slots], wanted)
    other.sampler.priority_exponent = 0.5
    torch.testing.assert_close(tree_leaves(other)[slots], reliability**OMEGA * (wanted / reliability**OMEGA) ** 0.5)


def test_a_buffer_that_was_filled_before_and_one_that_is_emptied() -> None:
    replay = Replay(storage=PackedStorage(6), batch_size=2, seed=0)
    slots = replay.extend(steps([False, True, False, True]))
    replay.set_sampler(ReliabilityAdjustedSampler(6, **OPTIONS, seed=0))
    replay.sample()
    replay.update_priority(slots[:1], torch.tensor([7.875]))
    assert replay.sampler.reliability_of(slots[:2]).tolist() == pytest.approx([8.0 / 9.125, 1.0])
    replay.empty()
    assert replay.sampler.followed.links is None and not tree_leaves(replay).any()
    replay.extend(steps([False]))
    assert replay.sample()["index"].tolist() == [0, 0]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"no \('next', 'done'\), which marks where episodes end; nothing was stored"):
        make_replay(4).extend(TensorDict({"observation": torch.zeros(2)}, [2]))
    with pytest.raises(ValueError, match="reliability_exponent is -1"):
        ReliabilityAdjustedSampler(4, reliability_exponent=-1.0)
    with pytest.raises(ValueError, match="rows_per_update is 0"):
        ReliabilityAdjustedSampler(4, rows_per_update=0)
    replay = make_replay(4)
    slots = replay.extend(steps([False, True]))
    before = replay.sampler.state_dict()["of_rows"]
    with pytest.raises(ValueError):
        replay.update_priority(slots, torch.tensor([1.0, float("nan")]))
    assert torch.equal(replay.sampler.state_dict()["of_rows"], before)


def test_a_state_of_other_sizes_is_refused() -> None:
    replay = make_replay(4)
    replay.extend(steps([False, True]))
    state = replay.sampler.state_dict()
    for wrong in ({"of_rows": torch.ones(3, 2)}, {"links": make_state_of_links(9)}):
        with pytest.raises(ValueError, match="slots, not all the same"):
            replay.sampler.load_state_dict(state | wrong)


def make_state_of_links(capacity: int) -> dict[str, object]:
    return EpisodeLinks(capacity).state_dict()
