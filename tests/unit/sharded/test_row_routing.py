# SPDX-License-Identifier: Apache-2.0
"""Which shard rows go to, and the numbers that identify trajectories and drawn rows everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.sharded.rows import RowIds, RowRouter, check_layout, layout_of, numbers_of, row_ids_of

TRAJECTORY, DONE = ("trajectory",), ("next", "done")
SECOND = 2 * 2**40  # added to trajectories by writer 2


def columns(number: list[int], trajectory: list[int] | None, done: list[int]) -> dict[tuple[str, ...], np.ndarray]:
    given = {} if trajectory is None else {TRAJECTORY: np.array(trajectory)}
    return {("number",): np.array(number), DONE: np.array(done, dtype=bool)[:, None], **given}


def dealt(router: RowRouter, *given) -> dict[int, tuple[list[int], list[int]]]:
    """Numbers and trajectories by shard, of rows that are stored."""
    routed, after = router.route(columns(*given))
    vars(router).update(vars(after))
    return {shard: (own["number",].tolist(), own[TRAJECTORY].tolist()) for shard, own in routed.items()}


def test_interleaved_trajectories_stay_whole_and_new_ones_go_where_the_fewest_steps_are() -> None:
    router = RowRouter(num_shards=2, writer=0)
    #            trajectory 7 runs on, 8 ends
    assert dealt(router, [0, 1, 2, 3], [7, 8, 7, 7], [0, 1, 0, 0]) == {0: ([0, 2, 3], [7, 7, 7]), 1: ([1], [8])}
    #            7 stays in shard 0, 9 begins where one step is
    assert dealt(router, [4, 5], [7, 9], [1, 0]) == {0: ([4], [7]), 1: ([5], [9])}
    #            7 has ended, so that it begins anew: 4 steps are in shard 0, 2 in shard 1
    assert dealt(router, [6], [7], [0]) == {1: ([6], [7])}


def test_rows_without_trajectories_are_one_environment_whose_episodes_are_counted() -> None:
    router = RowRouter(num_shards=2, writer=0)
    assert dealt(router, [0, 1, 2], None, [0, 1, 0]) == {0: ([0, 1], [0, 0]), 1: ([2], [1])}
    assert dealt(router, [3], None, [1]) == {1: ([3], [1])}
    assert dealt(router, [4], None, [0]) == {0: ([4], [2])}
    router.ended(None)  # the environment was reset
    assert dealt(router, [5], None, [0]) == {1: ([5], [3])}


def test_another_process_begins_with_another_shard_and_adds_its_own_number() -> None:
    router = RowRouter(num_shards=3, writer=2)
    assert dealt(router, [0], [5], [0]) == {2: ([0], [SECOND + 5])}
    assert router.ended(np.array([5, 6])).tolist() == [SECOND + 5, SECOND + 6]


@pytest.mark.parametrize("trajectory", [-1, 2**40])
def test_numbers_that_leave_no_room_are_refused_in_a_further_process(trajectory: int) -> None:
    assert RowRouter(2, writer=0).route(columns([0], [trajectory], [0]))[0][0][TRAJECTORY] == trajectory
    with pytest.raises(ValueError, match=r"they must be from 0 to 2\*\*40 - 1"):
        RowRouter(2, writer=1).route(columns([0], [trajectory], [0]))


def test_other_columns_than_those_stored_are_refused_by_name() -> None:
    layout = layout_of(columns([0], [1], [0]))
    assert check_layout(layout, None) == check_layout(layout, layout) == layout
    with pytest.raises(ValueError, match=r"number: stored \['int64'\], given \['float32'\]; trajectory.*given None"):
        other = columns([0], None, [0])
        other["number",] = other["number",].astype(np.float32)
        check_layout(layout_of(other), layout)


def test_rows_that_were_not_stored_leave_the_router_as_it_was() -> None:
    router = RowRouter(num_shards=2, writer=0)
    dealt(router, [0, 1], [7, 8], [0, 0])
    for _ in range(2):
        routed, _ = router.route(columns([2, 3], [7, 9], [1, 0]))
        assert {shard: own[TRAJECTORY].tolist() for shard, own in routed.items()} == {0: [7], 1: [9]}
    alone = RowRouter(num_shards=2, writer=0)
    for _ in range(2):
        routed, _ = alone.route(columns([0, 1, 2], None, [0, 1, 0]))
        assert [own[TRAJECTORY].tolist() for own in routed.values()] == [[0, 0], [1]]


@pytest.mark.parametrize("starts", [1, 2047, 2048, 5000])
def test_rows_are_current_however_often_their_shard_was_started(starts: int) -> None:
    ids = RowIds.of_shard(1, starts, np.array([3]), np.array([0]))
    found, _ = row_ids_of(*numbers_of(ids, key=7), key=7)
    assert found.current(np.array([1, starts])).all()
    assert not found.current(np.array([1, starts + 1])).any() and not found.current(np.array([1, starts - 1])).any()


@given(
    rows=st.lists(st.tuples(st.integers(0, 63), st.integers(1, 2047), st.integers(0, 2**40 - 1)), min_size=1),
    generation=st.integers(0, 2**32 - 1),
    key=st.integers(0, 2**20 - 1),
    pairs=st.booleans(),
)
def test_index_and_generation_hold_the_identity(rows, generation: int, key: int, pairs: bool) -> None:
    shard, epoch, slot = (np.array(column) for column in zip(*rows, strict=True))
    if pairs:
        slot = np.stack([slot, slot[::-1]], 1)
    ids = RowIds(shard, epoch, slot, np.full(len(shard), generation))
    index, generations = numbers_of(ids, key)
    assert index.shape == slot.shape and (index >= 0).all() and (generations >= 0).all()
    found, is_own = row_ids_of(index, generations, key)
    for mine, theirs in zip(ids, found, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert is_own.all() and not row_ids_of(index, generations, (key + 1) % 2**20)[1].any()
