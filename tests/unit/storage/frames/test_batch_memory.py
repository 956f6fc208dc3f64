# SPDX-License-Identifier: Apache-2.0
"""Stacks are gathered alike by both back ends, into memory that no held batch has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.storage.frames.frame_index import NumbaSearch, TorchSearch
from lightning_replay.storage.frames.outputs import BatchMemory

WINDOWS = st.builds(  # the second stack begins within the first, or after it
    lambda frames, apart: frames[:3] + frames[apart : apart + 3],
    st.lists(st.integers(0, 6), min_size=6, max_size=6),
    st.integers(0, 3),
)


@given(
    frames=st.lists(WINDOWS | st.lists(st.integers(0, 6), min_size=6, max_size=6), min_size=1, max_size=5),
    drawn=st.lists(st.integers(0, 100), max_size=6),
    width=st.integers(1, 17),
)
def test_both_back_ends_gather_the_same_stacks(frames: list[list[int]], drawn: list[int], width: int) -> None:
    pytest.importorskip("numba")
    pool = torch.randint(256, (7, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
    numbers = torch.tensor(frames, dtype=torch.int32)
    rows = torch.tensor(drawn, dtype=torch.int64) % len(frames)
    expected = np.stack([pool.numpy()[numbers[rows, :3]], pool.numpy()[numbers[rows, 3:]]])
    for search in (TorchSearch(pool), NumbaSearch(pool)):
        assert np.array_equal(search.gather(numbers, rows).numpy(), expected.ravel())


def test_memory_is_used_again_only_when_no_view_of_the_batch_is_left() -> None:
    memory = BatchMemory()
    batch = memory.tensor(64)
    batch.fill_(7)
    place, part = batch.data_ptr(), batch.view(2, 32)[1, 4:8].view(torch.int32)
    del batch
    others = [memory.tensor(64).fill_(number) for number in range(4)]
    assert place not in [other.data_ptr() for other in others]
    assert part.view(torch.uint8).tolist() == [7] * 4
    assert [int(other[0]) for other in others] == [0, 1, 2, 3]
    as_array = others.pop().numpy()
    others.clear()
    again = [memory.tensor(64).fill_(9) for _ in range(3)]
    assert int(as_array[0]) == 3 and len({one.data_ptr() for one in again}) == 3


def test_freed_memory_is_used_again_and_other_sizes_get_their_own() -> None:
    memory = BatchMemory()
    batch = memory.tensor(64)
    place = batch.data_ptr()
    del batch
    assert memory.tensor(64).data_ptr() == place
    assert len(memory.tensor(32)) == 32
    assert len(memory._kept) <= 2
