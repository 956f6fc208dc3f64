# SPDX-License-Identifier: Apache-2.0
"""The sum trees against lists."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.levels.prioritization import SumTree

ROWS = st.integers(0, 20)


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.tuples(ROWS, st.integers(0, 9)), max_size=30))
def test_a_prefix_is_found_in_the_row_whose_share_it_lies_in(filled, changes):
    tree, values = SumTree(), [0] * 21
    tree.fill(filled)
    values[: len(filled)] = filled
    for row, value in changes:
        tree[row] = value
        values[row] = value
    assert tree.total == sum(values)
    found = Counter(tree.find(prefix) for prefix in range(sum(values)))
    assert found == Counter({row: value for row, value in enumerate(values) if value})


@given(st.lists(st.integers(0, 20), max_size=6), st.lists(st.tuples(ROWS, st.integers(0, 20)), max_size=20))
def test_rows_are_found_in_proportion_to_their_staleness(filled, changes):
    tree, timestamps = SumTree(), list(filled)
    tree.fill(list(filled))
    for row, timestamp in changes:
        place = min(row, len(timestamps))  # a row more, or one of those there are
        timestamps[place : place + 1] = [timestamp]
        tree[place] = timestamp
    staleness = [20 - timestamp for timestamp in timestamps]
    found = Counter(tree.find_below(20, len(staleness), prefix) for prefix in range(sum(staleness)))
    assert found == Counter({row: stale for row, stale in enumerate(staleness) if stale})
