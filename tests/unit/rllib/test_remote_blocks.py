# SPDX-License-Identifier: Apache-2.0
"""A batch by reference, as the driver slices it for several Learners."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from lightning_replay.sharded.rows import Block
from rllib_ext.learner.remote_blocks import RemoteBlock


def block(lengths: list[int]) -> RemoteBlock:
    """Parts ``a``, ``b``, ...; weights are the places of the rows."""
    spans: list[Any] = [Block(chr(97 + part), 10, 10 + length) for part, length in enumerate(lengths)]  # type: ignore[arg-type]
    return RemoteBlock("rows_of_batch", spans, np.arange(sum(lengths), dtype=np.float32), "m")


def rows(one: RemoteBlock) -> list[tuple[Any, int]]:
    return [(reference, row) for reference, start, stop in one.spans for row in range(start, stop)]


def test_a_slice_names_the_rows_of_each_part() -> None:
    part = block([3, 1, 4])[2:6]
    assert part.spans == [("a", 12, 13), ("b", 10, 11), ("c", 10, 12)]
    assert part.weights.tolist() == [2, 3, 4, 5] and len(part) == 4 and part.module_id == "m"
    assert part[1:2].spans == [("b", 10, 11)] and part.id_ != block([1]).id_


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), num_learners=st.integers(1, 5))
def test_learners_get_every_row_once_in_order(lengths: list[int], num_learners: int) -> None:
    whole = block(lengths)
    if len(whole) < num_learners:
        return
    parts = [part for shard in ShardEpisodesIterator([whole], num_shards=num_learners) for part in shard]
    assert [row for part in parts for row in rows(part)] == rows(whole)
    assert np.concatenate([part.weights for part in parts]).tolist() == whole.weights.tolist()
    assert all(len(rows(part)) == len(part) for part in parts)
