# SPDX-License-Identifier: Apache-2.0
"""Draws divided over several replays are those of one replay of all rows, and weights undo stale totals."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare

from lightning_replay import recipes
from lightning_replay.divided_draws import Divider, GroupTotals
from lightning_replay.events import Event, EventTable
from lightning_replay.replay import Replay
from tests.divided import Shards
from tests.event_steps import IsTrue
from tests.oracles import probabilities

DRAWS = 1_000_000
# Episodes of each replay: two, four and eight replays of unequal numbers of rows, of episodes with goals and without.
LENGTHS = {
    2: [[5, 3, 3], [9, 6, 3, 3, 3, 7, 8, 9]],
    4: [[3], [5, 3, 9], [4, 3, 3, 3], [9, 8, 7, 6, 5, 3, 3, 3, 3]],
    8: [[3], [4], [3, 9], [5, 3], [9, 9, 9], [3, 3, 3, 3, 3], [6], [8, 3, 8, 3, 8, 3]],
}


def built(name: str, **options: Any) -> Replay:
    """A replay of the recipe that every row fits into."""
    if name == "event_tables":
        table = EventTable("goal", events=[Event(IsTrue("goal"), 3)], capacity=300, share=0.3, min_size=1)
        options |= {"tables": [table], "default_share": 0.7, "min_size": 1}
    sizes = {"capacity": 300} if name != "parallel_curriculum" else {"tasks": ["far", "near"], "capacity_per_task": 300}
    if name == "parallel_curriculum":
        options["min_size"] = 1
    return recipes.by_name(name)(**sizes, batch_size=1, seed=7, **options)


def random_priorities(count: int, seed: int = 3) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) ** 2 + 0.02


def with_priorities_that_differ_by_shard(shards: Shards) -> torch.Tensor:
    """Rows of one replay have ten times the priorities of those of the other."""
    priority = random_priorities(len(shards.owner)) * torch.tensor([10.0 ** (owner % 2) for owner in shards.owner])
    shards.give_priorities(priority)
    return priority


def p_value(numbers: np.ndarray, probability: np.ndarray) -> float:
    """Of the numbers as drawn with these probabilities ``[numbers]``; none that cannot be drawn may be among them."""
    counts = np.bincount(numbers, minlength=len(probability))
    possible = probability > 0
    assert not counts[~possible].any()
    return chisquare(counts[possible], probability[possible] * len(numbers)).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("num_replays", LENGTHS)
@pytest.mark.parametrize("exponent", [None, 0.0, 0.6, 1.0])
def test_each_row_is_drawn_as_often_as_from_one_replay(exponent: float | None, num_replays: int) -> None:
    options = {} if exponent is None else {"priority_exponent": exponent}
    name = "uniform" if exponent is None else "prioritized"
    shards = Shards(lambda: built(name, **options), LENGTHS[num_replays])
    priority = with_priorities_that_differ_by_shard(shards)
    numbers, _ = shards.draw_many(DRAWS, 50_000)
    assert p_value(numbers, probabilities(priority, exponent or 0.0, 1e-6).numpy()) > 1e-4


def test_equal_parts_of_the_replays_would_be_found() -> None:
    """What shards do that know nothing of each other: the test above is sharp enough to see it."""
    shards = Shards(lambda: built("prioritized", priority_exponent=1.0), LENGTHS[4])
    priority = random_priorities(len(shards.owner))
    shards.give_priorities(priority)
    equal = [GroupTotals(one.names, one.mass * 0 + 1, one.rows, one.smallest) for one in shards.totals() if one]
    numbers, _ = shards.draw_many(DRAWS // 10, 50_000, equal)
    assert p_value(numbers, probabilities(priority, 1.0, 1e-6).numpy()) < 1e-100


def of_goal_table(lengths: list[list[int]]) -> np.ndarray:
    """Whether each row is among the three steps up to a goal."""
    return np.concatenate([np.arange(one) >= (one - 3 if one >= 4 else one) for part in lengths for one in part])


@pytest.mark.slow
@pytest.mark.parametrize("num_replays", LENGTHS)
@pytest.mark.parametrize("exponent", [0.0, 0.7])
@pytest.mark.parametrize("multinomial", [False, True])
def test_tables_have_their_shares_and_rows_their_chances(num_replays: int, exponent: float, multinomial: bool) -> None:
    options = {"priority_exponent": exponent, "multinomial": multinomial}
    shards = Shards(lambda: built("event_tables", **options), LENGTHS[num_replays])
    priority = with_priorities_that_differ_by_shard(shards) if exponent else torch.ones(len(shards.owner))
    draws = DRAWS // 4
    numbers, columns = shards.draw_many(draws, 50_000)
    drawn = np.bincount(columns["table"], minlength=2)
    if multinomial:
        assert 1e-4 < binom.cdf(drawn[1], draws, 0.3) < 1 - 1e-4
    else:
        assert drawn.tolist() == [0.7 * draws, 0.3 * draws]
    for table, inside in enumerate((np.ones(len(shards.owner), dtype=bool), of_goal_table(LENGTHS[num_replays]))):
        powered = np.where(inside, (priority.double().numpy() + 1e-6) ** exponent, 0.0)
        assert p_value(numbers[columns["table"] == table], powered / powered.sum()) > 1e-4


@pytest.mark.parametrize("num_replays", LENGTHS)
def test_the_continuous_correction_draws_rows_of_events_more_often(num_replays: int) -> None:
    shards = Shards(lambda: built("event_tables", correction="continuous"), LENGTHS[num_replays])
    numbers, _ = shards.draw_many(DRAWS // 4, 50_000)
    priority = np.where(of_goal_table(LENGTHS[num_replays]), 1.3, 0.7)
    assert p_value(numbers, priority / priority.sum()) > 1e-4


@pytest.mark.slow
def test_points_are_independent_of_the_draws_of_a_sampler_of_the_same_seed() -> None:
    """Of small batches, in which a sampler that chooses tables by the same random numbers would choose rows too."""
    shards = Shards(lambda: built("event_tables", correction="continuous"), LENGTHS[2])
    shards.divider = Divider(built("event_tables", correction="continuous").sampler, seed=7)  # as the sampler's
    numbers, _ = shards.draw_many(8_000, 4)
    priority = np.where(of_goal_table(LENGTHS[2]), 1.3, 0.7)
    assert p_value(numbers, priority / priority.sum()) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("num_replays", LENGTHS)
@pytest.mark.parametrize("exponent", [0.0, 0.7])
def test_a_batch_of_a_curriculum_is_of_one_task_over_all_replays(num_replays: int, exponent: float) -> None:
    def of_a_task(steps, number):
        return steps.set("task", torch.full((len(steps),), number % 2))

    shards = Shards(lambda: built("parallel_curriculum", priority_exponent=exponent), LENGTHS[num_replays], of_a_task)
    priority = with_priorities_that_differ_by_shard(shards) if exponent else torch.ones(len(shards.owner))
    episodes = [length for part in LENGTHS[num_replays] for length in part]
    task = np.repeat(np.arange(len(episodes)) % 2, episodes)
    totals, batches, batch_size = shards.totals(), 200, 1_250
    drawn = [shards.draw(batch_size, totals)[0] for _ in range(batches)]
    tasks = np.array([np.unique(task[numbers]) for numbers in drawn])
    assert tasks.shape == (batches, 1)  # one task each
    assert 1e-4 < binom.cdf(tasks.sum(), batches, 0.5) < 1 - 1e-4
    for number in (0, 1):
        numbers = np.concatenate([one for one, of in zip(drawn, tasks[:, 0], strict=True) if of == number])
        powered = np.where(task == number, (priority.double().numpy() + 1e-6) ** exponent, 0.0)
        assert p_value(numbers, powered / powered.sum()) > 1e-4


def deviations(value: np.ndarray, weight: np.ndarray, expected: float) -> float:
    """By how many standard deviations the weighted mean of drawn values is off."""
    mean = (weight * value).sum() / weight.sum()
    return abs(mean - expected) * weight.sum() / np.sqrt(((weight * (value - mean)) ** 2).sum())


@pytest.mark.slow
@pytest.mark.parametrize("num_replays", LENGTHS)
@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("over_batch", [False, True])
def test_with_full_correction_the_weighted_mean_is_that_of_the_stored_rows(num_replays, is_stale, over_batch) -> None:
    options = {"priority_exponent": 0.8, "importance_exponent": 1.0, "normalize_over_batch": over_batch}
    shards = Shards(lambda: built("prioritized", **options), LENGTHS[num_replays])
    with_priorities_that_differ_by_shard(shards)
    before = shards.totals()
    if is_stale:  # rows have come, and priorities have changed, since the driver had the totals
        shards.extend(0, 9)
        shards.extend(num_replays - 1, 9)
        changed = random_priorities(len(shards.owner), seed=9)
        shards.give_priorities(changed * torch.tensor([1.0 + 5 * (owner == 0) for owner in shards.owner]))
    value = np.array([10.0 * owner for owner in shards.owner]) + np.arange(len(shards.owner))
    numbers, columns = shards.draw_many(500_000, 50_000, before)
    weight = columns["priority_weight"].astype(np.float64)
    assert weight.max() <= 1 + 1e-6
    assert deviations(value[numbers], weight, value.mean()) < 5
    if is_stale:  # weights by the priorities alone would see no difference between replays
        assert deviations(value[numbers], 1.0 / leaves_of(shards)[numbers], value.mean()) > 20


def leaves_of(shards: Shards) -> np.ndarray:
    """What each row is drawn in proportion to, by number."""
    leaves = np.concatenate(
        [replay.sampler.state_dict()["tree"]["leaves"][: len(replay)].numpy() for replay in shards.replays]
    )
    stored = [replay.storage.get(range(len(replay)))["action"] for replay in shards.replays]
    return leaves[np.argsort(np.concatenate(stored))]


@pytest.mark.slow
@pytest.mark.parametrize("num_replays", LENGTHS)
@pytest.mark.parametrize("changes", [False, True])
def test_draws_ahead_are_as_exact(num_replays: int, changes: bool) -> None:
    """Three draws are in flight; each is divided by sums of before the last feedback, and weighed after three more."""
    options = {"priority_exponent": 0.8, "importance_exponent": 1.0}
    shards = Shards(lambda: built("prioritized", **options), LENGTHS[num_replays])
    priority = with_priorities_that_differ_by_shard(shards)
    reported, in_flight, found = shards.totals(), deque(), []
    for number in range(13):
        in_flight.append((shards.drawn(50_000, reported), leaves_of(shards)))
        reported = shards.totals()
        if changes:
            factor = torch.tensor([1.0 + 9 * (owner % 3 == number % 3) for owner in shards.owner])
            shards.give_priorities(random_priorities(len(shards.owner), seed=number) * factor)
        if len(in_flight) > 3:
            draw, leaves = in_flight.popleft()
            numbers, columns = shards.weighed(*draw)
            found.append((numbers, columns["priority_weight"].astype(np.float64), leaves[numbers]))
    numbers, weight, leaf = (np.concatenate(parts) for parts in zip(*found, strict=True))
    value = np.array([10.0 * owner for owner in shards.owner]) + np.arange(len(shards.owner))
    assert deviations(value[numbers], weight, value.mean()) < 5
    if changes:
        assert deviations(value[numbers], 1.0 / leaf, value.mean()) > 10
    else:
        assert p_value(numbers, probabilities(priority, 0.8, 1e-6).numpy()) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("num_replays", LENGTHS)
@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("correction", ["mixture", "continuous"])
def test_corrected_tables_have_the_mean_of_all_rows(num_replays: int, is_stale: bool, correction: str) -> None:
    shards = Shards(lambda: built("event_tables", correction=correction), LENGTHS[num_replays])
    before = shards.totals()
    if is_stale:  # in replays whose tables both held rows: others were not drawn from
        shards.extend(num_replays - 2, 8)
        shards.extend(num_replays - 1, 30)
    inside = of_goal_table([*LENGTHS[num_replays], [8, 30] if is_stale else []])
    value = np.array([10.0 * owner for owner in shards.owner]) + 50.0 * inside
    numbers, columns = shards.draw_many(500_000, 50_000, before)
    assert deviations(value[numbers], columns["priority_weight"].astype(np.float64), value.mean()) < 5
    assert deviations(value[numbers], np.ones(len(numbers)), value.mean()) > 10
