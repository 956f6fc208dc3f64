# SPDX-License-Identifier: Apache-2.0
"""Which shard rows go to, and the numbers that identify trajectories and drawn rows everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.sharded.rows import NUM_EPOCHS, RowRouter, check_layout, layout_of, numbers_of, row_ids_of

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
    with pytest.raises(
        ValueError, match=r"'number': stored \['int64'\], given \['float32'\]; 'trajectory'.*given None"
    ):
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


@given(
    shard=st.integers(0, 63),
    starts=st.one_of(st.integers(1, 2049), st.just(5000)),
    slots=st.lists(st.integers(0, 2**40 - 1), min_size=1),
    generation=st.integers(0, 2**32 - 1),
    key=st.integers(0, 2**20 - 1),
    pairs=st.booleans(),
)
def test_index_and_generation_hold_the_identity(shard, starts, slots, generation: int, key: int, pairs: bool) -> None:
    slot = np.array(slots) if not pairs else np.stack([slots, slots[::-1]], 1)
    index, generations = numbers_of(shard, starts, slot, np.full(len(slot), generation), key)
    assert index.shape == slot.shape and (index >= 0).all() and (generations >= 0).all()
    found = row_ids_of(index, generations)
    np.testing.assert_array_equal(found.slot, slot)
    for one, expected in ((found.shard, shard), (found.key, key), (found.generation, generation)):
        assert (one == expected).all()
    for starts_now in (starts, starts + 1, starts - 1):  # a shard that was started again since
        assert ((starts_now - found.epoch) % NUM_EPOCHS == 0).all() == (starts_now == starts)
