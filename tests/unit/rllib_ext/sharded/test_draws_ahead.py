# SPDX-License-Identifier: Apache-2.0
"""Draws of a sharded replay in flight ahead of the Learners, over shards in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_replay.schedules import Linear
from rllib_ext.sharded.buffer import ShardedEpisodeReplayBuffer
from tests.recipe_options import DIVIDED_RECIPES
from tests.unit.rllib_ext.local_shards import awaited, first_numbers, read, replays

from .test_sharded_replay import build, episodes

pytestmark = pytest.mark.usefixtures("local_shards")


def drawn(replay: ShardedEpisodeReplayBuffer, num_items: int = 16) -> tuple[list[Any], list[float]]:
    """The first numbers and weights of the rows of a batch."""
    (rows,) = read(replay.sample(num_items=num_items))
    return first_numbers(rows).tolist(), rows.get_extra_model_outputs("weights", slice(0, len(rows))).tolist()


def clocks_of(replay: ShardedEpisodeReplayBuffer) -> list[int]:
    """The updates of each draw that is sent to the first shard from now on."""
    seen: list[int] = []
    shard = replay.shards.handles[0].shard
    draw = shard.draw
    shard.draw = lambda parts, clocks, *request: (seen.append(clocks["updates"]), draw(parts, clocks, *request))[1]
    return seen


OPTIONS = [(recipe, {}) for recipe in DIVIDED_RECIPES]
OPTIONS += [("event_tables", {"capacity": 120, "correction": one}) for one in ("mixture", "continuous")]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "options"), OPTIONS)
def test_where_nothing_changes_draws_ahead_are_those_without(recipe: str, options: dict[str, Any]) -> None:
    found = []
    for num_prefetch in (0, 1, 3):
        replay = build(recipe, num_prefetch=num_prefetch, **options)
        replay.add(episodes())
        found.append([drawn(replay) for _ in range(6)])
        assert replay.stats()["draws_in_flight"] == len(replay.draws.in_flight) == num_prefetch
    assert found[0] == found[1] == found[2]
    assert len({tuple(numbers) for numbers, _ in found[0]}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["draws", "updates", "env_steps"])
def test_the_exponent_of_each_draw_is_that_of_its_number(clock: str) -> None:
    found = []
    for num_prefetch in (0, 2):
        schedule = Linear(start=0.0, end=1.0, duration=8 if clock != "env_steps" else 144, clock=clock)
        options: dict[str, Any] = {"priority_exponent": 1.0, "priority_offset": 0.0, "importance_exponent": schedule}
        replay = build("prioritized", num_prefetch=num_prefetch, **options)
        replay.add(episodes())
        replay.start()
        for shard, one in enumerate(replays(replay)):
            slots = one.oldest_first()
            one.update_priority(slots, 1.0 + 3.0 * (slots == 0).float())
            replay.shards.send(shard, "report")
        found.append([drawn(replay, 100) for _ in range(8)])
    assert found[0] == found[1]
    smallest = [min(weights) for _, weights in found[1]]
    reached = {"draws": range(8), "updates": range(1, 9), "env_steps": [4] * 8}[clock]
    np.testing.assert_allclose(smallest, [4.0 ** (-one / 8) for one in reached], rtol=1e-5)


def test_draws_ahead_do_not_see_what_came_after_they_were_sent() -> None:
    replay = build("uniform", num_prefetch=2)
    replay.add(episodes(2))
    drawn(replay)
    replay.add(episodes(40, first=2))
    newest = [max(drawn(replay, 16)[0]) for _ in range(3)]
    assert newest[0] < 200 and newest[1] < 200 < newest[2]


def test_draws_ahead_of_other_batches_are_discarded() -> None:
    replay = build("uniform", num_prefetch=2)
    replay.add(episodes())
    replay.start()
    updates = clocks_of(replay)
    replay.sample(num_items=30)
    replay.sample(num_items=30)
    assert updates == [1, 2, 3, 4]
    (block,) = replay.sample(num_items=42)
    assert len(block) == len(awaited(replay).shard) == 42 and updates[4:] == [3, 4, 5]
    replay.sample(num_items=42, n_step=2)
    assert updates[7:] == [4, 5, 6]
    replay.sample(num_items=42, n_step=2, gamma=0.5)
    assert updates[10:] == [5, 6, 7]
    replay.sample(num_items=42, n_step=2, gamma=0.5)
    assert updates[13:] == [8] and len(replay.draws.in_flight) == 2


def test_the_part_of_a_shard_that_was_lost_since_is_left_out() -> None:
    replay = build("prioritized", num_shards=2, num_prefetch=1)
    replay.add(episodes())
    replay.sample(num_items=40)
    assert set(awaited(replay).shard) == {0, 1}
    replay.shards.epochs[1] += 1  # and what it has answered is in rows that are gone
    (block,) = replay.sample(num_items=40)
    assert set(awaited(replay).shard) == {0} and 0 < len(block) == len(awaited(replay).shard) < 40
    (block,) = replay.sample(num_items=40)
    assert set(awaited(replay).shard) == {0, 1} and len(block) == 40


def test_a_restore_discards_draws_in_flight() -> None:
    replay, other = (build("prioritized", num_prefetch=2) for _ in range(2))
    replay.add(episodes(6))
    replay.sample(num_items=8)
    state = replay.get_state()
    other.add(episodes(6, first=50))
    other.sample(num_items=8)
    other.set_state(state)
    assert len(other.draws.in_flight) == 0 and len(replay.draws.in_flight) == 2
    updates = clocks_of(other)
    assert max(drawn(other)[0]) < 600 and updates == [2, 3, 4]
    other.resume_at(0)
    assert len(other.draws.in_flight) == 0
    drawn(other)
    assert updates[3:] == [1, 2, 3]


def test_what_cannot_be_drawn_any_more_is_left_out_and_refused_once_no_draw_is_in_flight() -> None:
    replay = build("prioritized", num_shards=2, num_prefetch=2, priority_offset=0.0)
    replay.add(episodes())
    replay.sample(num_items=2000)  # every row
    shards = awaited(replay).shard
    totals = replay.shards.totals("default_policy")
    replay.update_priorities(np.where(shards == 0, 0.0, 1.0), "default_policy")
    division = replay.draws.divider("default_policy").divide(40, totals)  # by what the driver knew before
    drawn_parts = replay.shards.handles[0].shard.draw(
        {"default_policy": division.parts[0]}, {"env_steps": 0, "updates": 0}, 1, 0.99
    )
    assert drawn_parts.value == {}
    replay.sample(num_items=2000)
    replay.update_priorities(np.zeros(2000), "default_policy")
    for _ in range(2):  # those that were in flight
        assert len(replay.sample(num_items=2000)[0]) == 2000
    with pytest.raises(RuntimeError, match="all of priority 0"):
        replay.sample(num_items=2000)


def test_td_errors_of_an_unknown_module_are_refused_without_a_replay_for_it() -> None:
    for recipe in ("prioritized", "uniform"):
        replay = build(recipe)
        replay.add(episodes())
        replay.sample(num_items=8)
        with pytest.raises(ValueError, match=r"TD errors of module 'other', and rows were drawn for \['default_pol"):
            replay.update_priorities(np.zeros(8), "other")
        assert list(replay.draws.dividers) == ["default_policy"]
        replay.update_priorities(np.zeros(8), "default_policy")
