# SPDX-License-Identifier: Apache-2.0
"""Draws divided over several replays, by hand-worked numbers, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torchrl.data.replay_buffers import RandomSampler, SliceSampler

from lightning_replay import PackedStorage, Replay, recipes
from lightning_replay.divided_draws import Divider
from lightning_replay.events import Event, EventTable
from lightning_replay.parts import GroupTotals, ReplaySampler, ShardDraw, ShardRequest
from lightning_replay.samplers import (
    PrioritizedSampler,
    RandomPairSampler,
    ScheduledSampler,
    TableShares,
    UniformSampler,
)
from lightning_replay.schedulers import OneTask, UniformTasks
from lightning_replay.schedules import Linear
from lightning_replay.storage.occupancy import SlotSet
from tests.divided import Shards, episode
from tests.event_steps import IsTrue
from tests.recipe_options import DIVIDED_RECIPES, TASKS, built, fitting
from tests.transitions import numbered_steps


def prioritized(**options) -> Replay:
    given = {"priority_exponent": 1.0, "priority_offset": 0.0, "importance_exponent": 0.5, "seed": 0}
    return recipes.prioritized(8, 2, **given | options)


def one_and_three_and_four(**options) -> Shards:
    """Rows 0 and 1 with the priorities 1 and 3 in one replay, row 2 with 4 in another; the sum is 8."""
    shards = Shards(lambda: prioritized(**options), [[2], [1]])
    shards.give_priorities(torch.tensor([1.0, 3.0, 4.0]))
    return shards


def part_of(points: list[float]) -> ShardRequest:
    count = len(points)
    return ShardRequest(np.zeros(count, dtype=np.int64), np.array(points), np.ones(1), np.ones(1), np.array([8]))


def test_totals_of_a_prioritized_replay() -> None:
    one, other = (replay.group_totals() for replay in one_and_three_and_four().replays)
    assert (one.mass.tolist(), one.rows.tolist(), one.smallest.tolist()) == ([4.0], [2], [1.0])
    assert (other.mass.tolist(), other.rows.tolist(), other.smallest.tolist()) == ([4.0], [1], [4.0])
    assert (one.max_priority, other.max_priority) == (3.0, 4.0)
    empty = prioritized().group_totals()
    assert (empty.mass.tolist(), empty.rows.tolist(), empty.smallest.tolist()) == ([0.0], [0], [np.inf])
    assert empty.max_priority < 0


def test_points_of_a_part_are_rows_in_proportion_to_priorities() -> None:
    """Priorities 1 and 3 of one replay cover [0, 0.25) and [0.25, 1) of its points."""
    replay = one_and_three_and_four().replays[0]
    batch, drawn = replay.sample_shard(part_of([0.0, 0.24, 0.26, 0.999]))
    assert batch["index"].tolist() == [0, 0, 1, 1]
    assert drawn.probability.tolist() == [0.25, 0.25, 0.75, 0.75]
    assert drawn.totals.mass.tolist() == [4.0] and drawn.correction is None
    assert "priority_weight" not in batch.keys()  # noqa: SIM118 - of a TensorDict


def test_weights_of_fresh_totals() -> None:
    """Of 1, 3 and 4 in 8 the largest weight is that of 1; the others are (3 / 1) ** -0.5 and (4 / 1) ** -0.5."""
    numbers, columns = one_and_three_and_four().draw(64)
    expected = np.array([1.0, 3**-0.5, 0.5], dtype=np.float32)
    np.testing.assert_allclose(columns["priority_weight"], expected[numbers], rtol=1e-6)
    assert set(numbers) == {0, 1, 2} and columns["priority_weight"].dtype == np.float32


def test_weights_of_stale_totals() -> None:
    """Half of the draws go to each replay; by now the second has another row of priority 28, the sum 32.

    Row 2 is drawn with 1/2 * 4/32 = 1/16, less than any other, the new row with 7/16, rows 0 and 1 with 2/16 and 6/16.
    """
    shards = one_and_three_and_four()
    before = shards.totals()
    shards.extend(1, 1)
    shards.give_priorities(torch.tensor([1.0, 3.0, 4.0, 28.0]))
    numbers, columns = shards.draw(64, before)
    expected = np.array([2**-0.5, 6**-0.5, 1.0, 7**-0.5], dtype=np.float32)
    np.testing.assert_allclose(columns["priority_weight"], expected[numbers], rtol=1e-6)
    assert set(numbers) == {0, 1, 2, 3}


def test_weights_over_the_largest_of_the_batch() -> None:
    """Without row 0 the largest is that of row 1: row 2 has (4 / 3) ** -0.5."""
    shards = one_and_three_and_four(normalize_over_batch=True)
    division = shards.divider.divide(32, shards.totals())
    counts = [len(part) for part in division.parts]
    assert min(counts) > 0
    replies = [
        ShardDraw(np.full(count, p), one) for count, p, one in zip(counts, (0.75, 1.0), division.totals, strict=True)
    ]
    weights = shards.divider.weigh(division, replies)["priority_weight"]
    np.testing.assert_allclose(weights, [1.0] * counts[0] + [(4 / 3) ** -0.5] * counts[1], rtol=1e-6)


def test_a_replay_that_cannot_be_drawn_from_gets_no_rows_and_those_of_one_that_is_late_are_missing() -> None:
    shards = one_and_three_and_four()
    totals = shards.totals()
    division = shards.divider.divide(16, [None, totals[1]])
    assert [len(part) for part in division.parts] == [0, 16]
    _, drawn = shards.replays[1].sample_shard(division.parts[1])
    assert (shards.divider.weigh(division, [None, drawn])["priority_weight"] == 1.0).all()  # row 2 is all there is

    division = shards.divider.divide(64, totals)
    _, drawn = shards.replays[1].sample_shard(division.parts[1])
    weights = shards.divider.weigh(division, [None, drawn])["priority_weight"]
    assert weights.shape == (len(division.parts[1]),) and (weights == 0.5).all()  # as if the other had answered


def test_shares_of_a_batch_are_of_the_tables_of_all_replays() -> None:
    """One replay has no goal; the four rows of the goal's share of the other are 0.4 of each batch all the same."""
    table = EventTable("goal", events=[Event(IsTrue("goal"), 2)], capacity=8, share=0.4, min_size=2)
    shards = Shards(lambda: recipes.event_tables(20, 10, tables=[table], default_share=0.6, min_size=8), [[3], [5]])
    totals = shards.totals()
    assert [one.rows.tolist() for one in totals] == [[3, 0], [5, 2]]
    division = shards.divider.divide(10, totals)
    assert sum(np.bincount(part.groups, minlength=2) for part in division.parts).tolist() == [6, 4]
    assert not division.parts[0].groups.any()
    with pytest.raises(RuntimeError, match="no table with a share holds enough"):  # 8 are needed, one replay has 5
        shards.divider.divide(10, [None, GroupTotals.alike(np.array([5, 1]), totals[1].names)])


def test_the_scheduler_of_a_curriculum_is_that_of_the_divider() -> None:
    sampler = ScheduledSampler(TASKS, UniformTasks(), min_size=4, seed=0)
    divider = Divider(sampler, seed=0)
    totals = [GroupTotals.alike(np.array(rows), TASKS) for rows in ([3, 3], [0, 3], [0, 3])]
    division = divider.divide(6, totals)  # the target has 3 of 4 rows, the other task 9 in all
    assert all((part.groups == 1).all() for part in division.parts) and division.shares.tolist() == [0.0, 1.0]
    tasks = ScheduledSampler(TASKS, OneTask("near"), min_size=1)  # of which all rows are in one table
    assert len(Divider(tasks, seed=0).divide(6, [GroupTotals.alike(4, ["rows"])]).parts[0]) == 6


def test_schedules_follow_the_draws_and_clocks_of_the_divider() -> None:
    shards = one_and_three_and_four(importance_exponent=Linear(0.0, 1.0, duration=2))
    means = [shards.draw(64)[1]["priority_weight"].min() for _ in range(3)]
    np.testing.assert_allclose(means, [1.0, 0.5, 0.25], rtol=1e-6)
    divider = Divider(PrioritizedSampler(1, importance_exponent=Linear(0.0, 1.0, duration=10, clock="updates")))
    divider.advance(updates=5)
    assert divider.sampler.beta == 0.5


def test_a_divider_that_is_restored_divides_alike() -> None:
    table = EventTable("goal", events=[Event(IsTrue("goal"), 2)], capacity=8, share=0.4, min_size=1)
    options = {"tables": [table], "default_share": 0.6, "min_size": 1, "multinomial": True, "priority_exponent": 1.0}
    shards = Shards(lambda: recipes.event_tables(20, 10, **options), [[4], [5]])
    shards.draw(10)
    state = pickle.loads(pickle.dumps(shards.divider.state_dict()))
    expected = shards.divider.divide(10, shards.totals())
    again = Divider(recipes.event_tables(20, 10, **options).sampler, seed=99)
    again.load_state_dict(state)
    for one, other in zip(expected.parts, again.divide(10, shards.totals()).parts, strict=True):
        assert (one.groups == other.groups).all() and (one.points == other.points).all()


def test_new_rows_get_the_largest_priority_of_all_replays() -> None:
    shards = one_and_three_and_four()
    replay = shards.replays[0]
    replay.raise_max_priority(4.0)
    replay.raise_max_priority(2.0)  # lower than it is: no change
    slot = replay.extend(episode(9, 1))
    assert replay.sampler.priority_of(slot).item() == 4.0 and replay.group_totals().max_priority == 4.0
    for given, error in ((float("nan"), ValueError), (-1.0, ValueError), ("4", TypeError)):
        with pytest.raises(error, match="priority is"):
            replay.raise_max_priority(given)
    recipes.uniform(8, 2).raise_max_priority(4.0)  # ignored
    mixed = Replay(storage=PackedStorage(8), sampler=RandomPairSampler(PrioritizedSampler(8)), batch_size=2)
    mixed.raise_max_priority(5.0)
    assert mixed.sampler.default_priority == 5.0
    tables = TableShares({"default": 1.0}, priority_exponent=1.0)
    tables.raise_max_priority(5.0)
    assert tables.default_priority == 5.0


@pytest.mark.parametrize("name", DIVIDED_RECIPES)
def test_every_recipe_draws_parts_of_the_columns_of_a_batch(name: str) -> None:
    replays = [built(name, capacity=40, batch_size=16, seed=seed) for seed in range(3)]
    for number, replay in enumerate(replays):
        replay.extend(fitting(replay, numbered_steps(60 * number, 18, done_every=6)))
    divider = Divider(built(name, capacity=4, batch_size=4).sampler, seed=0)
    division = divider.divide(16, [replay.group_totals() for replay in replays])
    expected, drawn = replays[0].sample(16), []
    for replay, part in zip(replays, division.parts, strict=True):
        batch, reply = replay.sample_shard(pickle.loads(pickle.dumps(part)))
        assert batch.shape == (len(part),) and (reply.probability > 0).all() and (reply.probability <= 1).all()
        columns = {*map(str, batch.keys(True, True))} | {"priority_weight"}
        assert columns == {*map(str, expected.keys(True, True))} | {"priority_weight"}
        assert all(batch.get(key).dtype == expected.get(key).dtype for key in batch.keys(True, True))
        assert replay.awaits_priorities == replay.takes_feedback  # it counts as a draw
        if replay.takes_feedback and name != "surprise_retention":
            replay.update_priority(batch, torch.rand(len(part)))
        drawn.append(pickle.loads(pickle.dumps(reply)))
    assert sum(map(len, division.parts)) == 16
    columns = divider.weigh(division, drawn)
    assert ("priority_weight" in columns) == ("priority_weight" in expected.keys())  # noqa: SIM118 - of a TensorDict


def test_arrays_that_cannot_be_written_are_drawn_by() -> None:
    """As Ray returns them from its object store."""
    for name in ("prioritized", "uniform", "event_tables"):
        replay = built(name, capacity=40, batch_size=4, seed=0)
        replay.extend(numbered_steps(0, 12, done_every=6))
        division = Divider(built(name, capacity=4, batch_size=4).sampler, seed=0).divide(8, [replay.group_totals()])
        for array in vars(division.parts[0]).values():
            array.flags.writeable = False
        batch, _ = replay.sample_shard(division.parts[0])
        if name == "event_tables":
            batch["table"] += 1  # a copy of the groups, which stay


def test_rows_that_left_are_not_drawn() -> None:
    """A point covers an equal part of the rows that are held, whatever their slots."""
    replay = recipes.uniform(8, 4, seed=0)
    replay.extend(numbered_steps(0, 8))
    held = SlotSet(capacity=8, length=8)
    held.remove(np.array([0, 3, 5]))
    replay.storage.occupancy_owner = held
    assert replay.group_totals().rows.tolist() == [5]
    batch, drawn = replay.sample_shard(part_of([(place + 0.5) / 5 for place in range(5)]))
    assert sorted(batch["index"].tolist()) == [1, 2, 4, 6, 7] and drawn.probability.tolist() == [0.2] * 5


def test_a_part_may_be_a_sweep() -> None:
    replay = recipes.reverse_sweep(20, 4, goal=IsTrue("goal"), sweep_share=1.0, seed=0)
    replay.extend(episode(0, 5))
    batch, drawn = replay.sample_shard(part_of([0.9, 0.9, 0.9, 0.9]))
    assert batch["action"].tolist() == [4, 3, 2, 1]  # whatever the points
    assert drawn.totals.rows.tolist() == [5] and drawn.probability.tolist() == [0.2] * 4


class Newest(ReplaySampler):
    """Draws the newest row alone, and can do so for a part."""

    saved_attributes = ("newest",)
    newest = 0

    def mark_update(self, index, *, storage=None) -> None:
        self.newest = int(torch.as_tensor(index).reshape(-1)[-1])

    def sample(self, storage, batch_size):
        return torch.full((batch_size,), self.newest), {}

    def group_totals(self, storage) -> GroupTotals:
        return GroupTotals.alike(min(len(storage), 1))

    def sample_shard(self, storage, part):
        index, info = self.sample(storage, len(part))
        return index, info, ShardDraw(np.ones(len(part)), self.group_totals(storage))

    def _empty(self) -> None:
        self.newest = 0


def test_a_sampler_of_a_user_that_defines_the_hooks_is_divided() -> None:
    def build() -> Replay:
        sampler = Newest()
        sampler._seed_generator(0)
        return Replay(storage=PackedStorage(8), sampler=sampler, batch_size=2)

    replays = [build(), build()]
    for number, replay in enumerate(replays):
        replay.extend(numbered_steps(10 * number, 3 + number))
    divider = Divider(build().sampler, seed=0)
    division = divider.divide(32, [replay.group_totals() for replay in replays])
    drawn = [replay.sample_shard(part) for replay, part in zip(replays, division.parts, strict=True)]
    assert [set(batch["index"].tolist()) for batch, _ in drawn] == [{2}, {3}]
    assert divider.weigh(division, [reply for _, reply in drawn]) == {}


def overriding(kind: type, method: str) -> type:
    return type("Own", (kind,), {method: lambda self, *given: getattr(kind, method)(self, *given)})


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (RandomSampler(), "RandomSampler"),
        (SliceSampler(slice_len=2), "SliceSampler"),
        (RandomPairSampler(RandomSampler()), "RandomSampler"),
        (overriding(UniformSampler, "sample")(), "Own"),  # which would draw as its base class does
        (overriding(RandomPairSampler, "sample")(), "Own"),
        (overriding(TableShares, "sample")({"default": 1.0}), "Own"),
    ],
)
def test_samplers_that_cannot_be_divided_are_named(sampler, name: str) -> None:
    with pytest.raises(TypeError, match=f"draws of {name} cannot be divided over several replays; use a sampler of"):
        Divider(sampler)
    if isinstance(sampler, TableShares):
        return
    replay = Replay(storage=PackedStorage(8), sampler=sampler, batch_size=2)
    replay.extend(numbered_steps(0, 4))
    for call in (replay.group_totals, lambda: replay.sample_shard(part_of([0.5]))):
        with pytest.raises(TypeError, match=f"draws of {name} cannot be divided"):
            call()
    assert len(replay) == 4


def test_there_must_be_rows_to_draw_from() -> None:
    divider = one_and_three_and_four().divider
    with pytest.raises(RuntimeError, match="none of the 2 replays can be drawn from"):
        divider.divide(4, [None, None])
    with pytest.raises(RuntimeError, match="'rows' holds 0 in all replays; call extend first"):
        divider.divide(4, [prioritized().group_totals()])
    replay = one_and_three_and_four().replays[0]
    replay.update_priority(torch.arange(2), torch.zeros(2))
    with pytest.raises(RuntimeError, match="'rows' holds 2 in all replays, all of priority 0"):
        divider.divide(4, [replay.group_totals()])
    for empty, message in ((prioritized(), "empty"), (recipes.uniform(8, 2), "empty"), (replay, "has priority 0")):
        with pytest.raises(RuntimeError, match=message):
            empty.sample_shard(part_of([0.5]))
    table = built("event_tables", capacity=40, batch_size=4)
    table.extend(numbered_steps(0, 4))
    of_the_other = ShardRequest(np.ones(1, dtype=np.int64), np.zeros(1), np.ones(2), np.ones(2), np.array([8, 8]))
    with pytest.raises(RuntimeError, match="table 'high' holds no rows to draw from"):
        table.sample_shard(of_the_other)


def test_what_is_no_part_and_no_reply_is_refused() -> None:
    shards = one_and_three_and_four()
    replay, totals = shards.replays[0], shards.totals()
    with pytest.raises(TypeError, match="part is"):
        replay.sample_shard(4)
    with pytest.raises(ValueError, match="the part has no rows"):
        replay.sample_shard(part_of([]))
    with pytest.raises(ValueError, match=r"replays have the groups \['rows'\] and \['default'\]"):
        shards.divider.divide(4, [totals[0], GroupTotals.alike(3, ["default"])])
    with pytest.raises(ValueError, match="batch_size is 0"):
        shards.divider.divide(0, totals)
    division = shards.divider.divide(4, totals)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        shards.divider.weigh(division, [None])
    with pytest.raises(ValueError, match="got no reply"):
        shards.divider.weigh(division, [None, None])
    with pytest.raises(ValueError, match="a reply has 9 rows and its part"):
        shards.divider.weigh(division, [ShardDraw(np.ones(9), totals[0]), None])
    with pytest.raises(TypeError, match="sampler is"):
        Divider(replay)
