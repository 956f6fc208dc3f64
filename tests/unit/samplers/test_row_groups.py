# SPDX-License-Identifier: Apache-2.0
"""Groups of rows: stored at once, drawn whole, evicted whole, with priority, age, and fresh parts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from lightning_replay import Age, PackedStorage, Replay, load_replay, recipes
from lightning_replay.inspection.contents import look_at
from lightning_replay.samplers import (
    GroupSampler,
    PrioritizedSampler,
    RandomPairSampler,
    RecencySampler,
    ReshuffledSampler,
    UniformSampler,
)
from lightning_replay.storage import FrameStorage
from lightning_replay.writers import RetentionWriter, SurpriseOnly


def answers(first: int, groups: int, size: int = 2, version: int = 0) -> TensorDict:
    """Groups ``first`` and later ones; the columns of a row are its group and its place in the group."""
    number = torch.arange(first * size, (first + groups) * size)
    columns = {"group": number // size, "place": number % size, "version": torch.full_like(number, version)}
    observation = number.float().view(-1, 1)
    columns |= {"log_prob": -number.float(), "observation": observation, "next": {"observation": observation + 1}}
    return TensorDict(columns, [groups * size])


def replay_of(groups: int = 6, batch: int = 2, size: int = 2, **options: Any) -> Replay:
    return recipes.groups(groups * size, batch * size, group_size=size, seed=0, **options)


def drawn(batch: TensorDict, size: int = 2) -> list[int]:
    """The groups of a batch, each of which is whole and in order."""
    assert torch.equal(batch["place"].view(-1, size), torch.arange(size).expand(len(batch) // size, size))
    groups = batch["group"].view(-1, size)
    assert (groups == groups[:, :1]).all()
    return groups[:, 0].tolist()


def test_a_group_is_stored_at_once_drawn_whole_and_evicted_whole() -> None:
    """Capacity 3 groups of 4 rows; the fourth group takes the slots of the first one."""
    replay = replay_of(3, 2, 4)
    assert replay.extend(answers(0, 3, 4)).tolist() == [*range(12)]
    assert replay.extend(answers(3, 1, 4)).tolist() == [0, 1, 2, 3]
    batch = replay.sample()
    assert set(drawn(torch.cat([batch, *(replay.sample() for _ in range(40))]), 4)) == {1, 2, 3}
    assert torch.equal(batch["index"].view(-1, 4) // 4, batch["group"].view(-1, 4) % 3)
    #   more groups than fit: the last three are kept
    replay.extend(answers(4, 5, 4))
    assert set(drawn(torch.cat([replay.sample() for _ in range(40)]), 4)) == {6, 7, 8}


def test_the_priority_of_a_group_is_the_mean_of_the_magnitudes_of_its_rows() -> None:
    """Groups 0 to 2 get (1 + 3) / 2 = 2, (6 + 0) / 2 = 3 and 5: weights 2/5 and 3/5 of the inverse, at β = 1."""
    replay = replay_of(3, 3, priority_exponent=1.0, importance_exponent=1.0, priority_offset=0.0)
    slots = replay.extend(answers(0, 3))
    replay.update_priority(slots, torch.tensor([-1.0, 3.0, 6.0, 0.0, 5.0, -5.0]))
    assert replay.sampler.priority_of(slots).tolist() == pytest.approx([2, 2, 3, 3, 5, 5])
    batches = torch.cat([replay.sample() for _ in range(40)])
    expected = torch.tensor([1.0, 2 / 3, 2 / 5])[batches["group"]]
    assert torch.allclose(batches["priority_weight"], expected)
    #   a new group gets the largest priority so far, and feedback of evicted rows is dropped
    old = torch.cat([replay.sample() for _ in range(40)])
    replay.extend(answers(3, 1))
    assert replay.sampler.priority_of(torch.arange(6)).tolist() == pytest.approx([5, 5, 3, 3, 5, 5])
    replay.update_priority(old, torch.where(old["group"] == 0, 9.0, 1.0))
    assert replay.sampler.priority_of(torch.arange(6)).tolist() == pytest.approx([5, 5, 1, 1, 1, 1])
    assert replay.stats()["stale_updates_dropped"] == (old["group"] == 0).sum()
    #   feedback of one row of a group is that of the group
    replay.update_priority(torch.tensor([3]), torch.tensor([4.0]))
    assert replay.sampler.priority_of(torch.arange(6)).tolist() == pytest.approx([5, 5, 4, 4, 1, 1])


@pytest.mark.parametrize("replace", [True, False])
def test_fresh_rows_have_the_weight_1_and_replayed_ones_that_of_their_group(replace: bool) -> None:
    """Priorities 1, 2, and 4, and 4 of the new group: weights 1, 1/2, and 1/4 of the replayed ones."""
    options = {"priority_exponent": 1.0, "importance_exponent": 1.0, "priority_offset": 0.0}
    replay = replay_of(6, 2, fresh_share=0.5, replace=replace, **options)
    slots = replay.extend(answers(0, 3))
    replay.update_priority(slots, torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(2))
    replay.extend(answers(3, 1))
    batches = torch.stack([replay.sample() for _ in range(60)])
    assert (batches["priority_weight"][:, :2] == 1).all()
    weights = torch.tensor([1.0, 1 / 2, 1 / 4, 1 / 4])[batches["group"][:, 2:]]
    assert torch.allclose(batches["priority_weight"][:, 2:], weights) and len(weights.unique()) == 3


def test_given_priorities_are_those_of_groups() -> None:
    replay = replay_of(2, 1, priority_exponent=1.0, priority_offset=0.0)
    slots = replay.extend(answers(0, 2).set("td_error", torch.tensor([1.0, 2.0, 0.0, 0.5])))
    assert replay.sampler.priority_of(slots).tolist() == [1.5, 1.5, 0.25, 0.25]


def test_fresh_groups_have_their_turns_newest_first_each_once_before_again() -> None:
    """Half of four groups is fresh::

    stored 0 1 2 3   fresh 3 2, then 1 0, then again 3 2
    stored 4         fresh 4 and the newest other, 3; then again both
    stored 5 6 7     fresh 7 6; stored 8: fresh 8 5, because 5 still waits; then 8 5 again
    """
    replay = replay_of(20, 4, fresh_share=0.5)

    def fresh() -> list[int]:
        batch = replay.sample()
        assert batch["is_fresh"].tolist() == [True] * 4 + [False] * 4
        return drawn(batch)[:2]

    replay.extend(answers(0, 4))
    assert [fresh() for _ in range(3)] == [[3, 2], [1, 0], [3, 2]]
    replay.extend(answers(4, 1))
    assert replay.stats()["groups_waiting"] == 1
    assert [fresh() for _ in range(2)] == [[4, 3], [4, 3]]
    for group in (5, 6, 7):  # in three calls
        replay.extend(answers(group, 1))
    assert fresh() == [7, 6]
    replay.extend(answers(8, 1))
    assert [fresh() for _ in range(2)] == [[8, 5], [8, 5]]
    assert replay.stats()["groups_waiting"] == 0


def test_the_fresh_share_is_rounded_up_to_groups() -> None:
    for batch, share, expected in ((3, 0.5, 2), (1, 0.01, 1), (10, 0.3, 3), (4, 1.0, 4), (4, 0.0, 0)):
        replay = replay_of(10, batch, fresh_share=share, priority_exponent=0.5)
        replay.extend(answers(0, 10))
        sample = replay.sample()
        assert (int(sample["is_fresh"].sum()) if share else 0) == 2 * expected
        assert ("is_fresh" in sample) == (share > 0)
        assert (sample["priority_weight"][: 2 * expected] == 1).all() and len(sample["priority_weight"]) == 2 * batch


@pytest.mark.parametrize("fresh_share", [0.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"priority_exponent": 0.6}, {"age": {"half_life": 4.0}}], ids=str)
def test_a_batch_without_replacement_has_different_groups(options: dict[str, Any], fresh_share: float) -> None:
    replay = replay_of(6, 4, replace=False, fresh_share=fresh_share, **options)
    replay.extend(answers(0, 3))
    with pytest.raises(RuntimeError, match="needs 4 different groups, and 3 of the 3 stored ones can be drawn. Store"):
        replay.sample()
    replay.extend(answers(3, 5))
    for _ in range(20):
        batch = replay.sample()
        groups = drawn(batch)
        assert len(set(groups)) == 4 and set(groups) <= {*range(2, 8)}
        replay.update_priority(batch, batch["group"].float())
    assert set(drawn(replay.sample(12))) == {*range(2, 8)}


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("priority_exponent", [0.0, 0.6])
def test_groups_that_are_too_old_are_not_drawn(priority_exponent: float, replace: bool) -> None:
    """With ``max_age=1`` in versions, groups of the versions 3 and 4 are drawn, also as fresh ones."""
    age = {"max_age": 1, "version_key": "version"}
    options = {"priority_exponent": priority_exponent, "importance_exponent": 0.0, "replace": replace}
    replay = replay_of(8, 4, age=age, fresh_share=0.5, **options)
    for version in range(5):
        replay.extend(answers(2 * version, 2, version=version))
    found = [group for _ in range(30) for group in drawn(replay.sample())]
    assert set(found) == {6, 7, 8, 9}
    if not replace:
        with pytest.raises(RuntimeError, match="needs 5 different groups, and 4 of the 8 stored ones"):
            replay.sample(10)
    #   the version of a group is that of its first row: the second row may be older or newer
    rows = answers(10, 2, version=4)
    rows["version"][1::2] = torch.tensor([0, 9])
    replay.extend(rows)
    assert {10, 11} <= {group for _ in range(30) for group in drawn(replay.sample())}
    with pytest.raises(ValueError, match="version 'version' of new row 1 is"):
        replay.extend(torch.cat([answers(12, 1, version=5), answers(13, 1, version=4)]))


def test_ages_in_rows_count_groups() -> None:
    for options in ({}, {"priority_exponent": 0.6}, {"replace": False}):
        replay = replay_of(8, 2, 4, age=Age(max_age=1), importance_exponent=0.0, **options)
        replay.extend(answers(0, 10, 4))
        assert {group for _ in range(30) for group in drawn(replay.sample(), 4)} == {8, 9}


def test_an_update_clock_makes_the_newest_groups_too_old() -> None:
    replay = replay_of(8, 2, age=Age(max_age=3, clock="updates"), fresh_share=1.0)
    replay.extend(answers(0, 4))
    replay.advance(updates=3)
    assert drawn(replay.sample()) == [3, 2]
    replay.advance(updates=4)
    with pytest.raises(RuntimeError, match="older than max_age 3"):
        replay.sample()


OPTIONS = [
    {},
    {"replace": False, "fresh_share": 0.5},
    {"priority_exponent": 0.6, "fresh_share": 0.5},
    {"age": {"max_age": 2, "version_key": "version"}, "fresh_share": 0.25, "replace": False},
    {"age": {"half_life": 3.0}},
    {"priority_exponent": 0.6, "age": {"half_life": 3.0, "floor": 0.2}, "replace": False},
    {"prefetch": 2, "fresh_share": 0.5},
    {"observations": "once", "age": {"max_age": 2, "version_key": "version"}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_saved_buffer_goes_on_with_the_same_draws(options: dict[str, Any], tmp_path) -> None:
    replay = replay_of(8, 4, **options)
    for version in range(3):
        replay.extend(answers(4 * version, 4, version=version))
        batch = replay.sample()
        replay.update_priority(batch, batch["group"].float())
    replay.save(tmp_path)
    other = load_replay(tmp_path)
    for version in range(3, 6):
        for _ in range(3):
            one, again = replay.sample(), other.sample()
            assert one.keys() == again.keys() and (one == again).all()
            for each in (replay, other):
                each.update_priority(one, one["group"].float())
        for each in (replay, other):
            each.extend(answers(4 * version, 4, version=version))
    assert replay.stats() == other.stats()
    with pytest.raises(ValueError, match="group_size"):
        recipes.groups(16, 8, group_size=4, **options).load(tmp_path)


def test_an_emptied_buffer_begins_anew() -> None:
    replay = replay_of(4, 2, fresh_share=1.0)
    replay.extend(answers(0, 4))
    replay.empty()
    with pytest.raises(RuntimeError, match="call extend first"):
        replay.sample()
    assert replay.stats()["groups_waiting"] == 0
    replay.extend(answers(4, 2))
    assert drawn(replay.sample()) == [5, 4]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, PackedStorage])
def test_it_draws_in_a_buffer_of_torchrl(storage) -> None:
    sampler = GroupSampler(2, PrioritizedSampler(4, 1.0, priority_offset=0.0), fresh_share=0.5, seed=0)
    buffer = TensorDictReplayBuffer(storage=storage(8), sampler=sampler, batch_size=8, priority_key="td_error")
    for first in (0, 4):
        buffer.extend(answers(first, 4))
    batch = buffer.sample()
    assert drawn(batch)[:2] == [7, 6] and set(drawn(batch)) <= {4, 5, 6, 7}
    buffer.update_priority(torch.arange(8), torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]))
    assert sampler.priority_of(torch.arange(8)).tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
    assert {group for _ in range(20) for group in drawn(buffer.sample())[2:]} == {4, 5}
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.ones(8)))
    for slots, priority, error, told in (
        ([0, 1], [1.0, -1.0], ValueError, "priority is -1.0 at position 1"),
        ([0, 8], [1.0, 1.0], IndexError, "index is 8 at position 1, but 8 rows are stored"),
    ):
        with pytest.raises(error, match=f"{told}.* nothing was changed"):
            buffer.update_priority(torch.tensor(slots), torch.tensor(priority))
    with pytest.raises(ValueError, match="3 rows are stored at once, and group_size is 2"):
        buffer.extend(answers(0, 2)[:3])


def test_passes_over_all_groups() -> None:
    sampler = GroupSampler(2, ReshuffledSampler())
    replay = Replay(storage=PackedStorage(12), sampler=sampler, batch_size=4, seed=0)
    replay.extend(answers(0, 6))
    for _ in range(3):
        assert sorted(drawn(torch.cat([replay.sample() for _ in range(3)]))) == [*range(6)]


def test_a_sampler_that_comes_to_a_filled_buffer_draws_its_groups() -> None:
    for base in (UniformSampler(), PrioritizedSampler(6), RecencySampler(6, Age(max_age=9))):
        replay = recipes.uniform(12, 4, seed=0)
        replay.extend(answers(0, 8))
        replay.set_sampler(GroupSampler(2, base, fresh_share=0.5, replace=False, seed=0))
        assert len(set(drawn(replay.sample(12)))) == 6


def test_a_refused_extend_stores_nothing() -> None:
    replay = replay_of(3, 1, 4)
    replay.extend(answers(0, 1, 4))
    for rows in (3, 5):
        with pytest.raises(
            ValueError, match=rf"^{rows} rows are stored at once, and group_size is 4; .*Nothing was st"
        ):
            replay.extend(answers(1, 2, 4)[:rows])
    with pytest.raises(ValueError, match="1 rows are stored at once"):
        replay.add(answers(1, 1, 4)[0])
    assert len(replay) == 4 and set(drawn(replay.sample(), 4)) == {0}
    with pytest.raises(ValueError, match="batch_size is 6 and group_size is 4; give a multiple of 4"):
        replay.sample(6)


def of_parts(sampler: GroupSampler, storage: Any = None, **options: Any) -> Replay:
    storage = PackedStorage(8) if storage is None else storage
    return Replay(storage=storage, sampler=sampler, batch_size=4, **options)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: recipes.groups(10, 4, group_size=4),
            ValueError,
            "capacity is 10 and group_size is 4; .* multiple of 4",
        ),
        (lambda: recipes.groups(3, group_size=4), ValueError, "capacity 3 is below batch_size 4"),
        (
            lambda: recipes.groups(8, 6, group_size=4),
            ValueError,
            "batch_size is 6 and group_size is 4; .* multiple of 4",
        ),
        (lambda: recipes.groups(8, 4, group_size=4, fresh_share=1.5), ValueError, "fresh_share is 1.5"),
        (lambda: recipes.groups(8, 4, group_size=0), ValueError, "group_size is 0"),
        (lambda: recipes.groups(8, 4, group_size=4, draws_on="device"), ValueError, "draws slots on the CPU"),
        (
            lambda: of_parts(GroupSampler(2, PrioritizedSampler(8))),
            ValueError,
            "capacity 8, and the storage has 4 groups of 2 rows",
        ),
        (lambda: of_parts(GroupSampler(2), writer=RetentionWriter(SurpriseOnly())), TypeError, "evicts single rows"),
        (
            lambda: of_parts(GroupSampler(2), FrameStorage(8, 2, "pixels", frame_capacity=40)),
            TypeError,
            "FrameStorage ev",
        ),
        (
            lambda: GroupSampler(2, RandomPairSampler()),
            TypeError,
            "base_sampler is RandomPair.*must be a UniformSampler",
        ),
        (
            lambda: GroupSampler(2, UniformSampler(device="cpu")),
            ValueError,
            "groups are drawn on the CPU, .* Leave out",
        ),
        (lambda: GroupSampler(2, ReshuffledSampler(), replace=False), ValueError, "which a ReshuffledSampler lacks"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(build, error, message: str) -> None:
    with pytest.raises(error, match=message) as refused:
        build()
    assert len(re.findall(r"[a-z]", str(refused.value))) < 260


def test_pairs_of_rows_of_groups_are_checked_too() -> None:
    with pytest.raises(ValueError, match="capacity is 9 and group_size is 2"):
        of_parts(RandomPairSampler(GroupSampler(2)), PackedStorage(9))


def test_the_default_batch_is_a_multiple_of_the_group() -> None:
    sizes = {(1_000, 10): 250, (2_048, 8): 256, (1_200, 300): 300, (6, 3): 6}
    for (capacity, group_size), expected in sizes.items():
        assert recipes.groups(capacity, group_size=group_size).batch_size == expected


def test_the_page_of_a_buffer_shows_probabilities_of_rows() -> None:
    replay = replay_of(3, 2, priority_exponent=1.0, priority_offset=0.0)
    slots = replay.extend(answers(0, 3))
    replay.update_priority(slots, torch.tensor([1.0, 1.0, 2.0, 2.0, 5.0, 5.0]))
    draws = look_at(replay).draws
    assert draws is not None
    assert draws.probability.tolist() == pytest.approx([1 / 16, 1 / 16, 2 / 16, 2 / 16, 5 / 16, 5 / 16])
