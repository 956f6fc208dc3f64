# SPDX-License-Identifier: Apache-2.0
"""A snapshot is the tensor of its moment, whatever is written while it is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_replay.saving import snapshot
from lightning_replay.saving.snapshot import Snapshots


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 32)


ROWS = st.integers(0, 12)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("slots"), st.lists(st.integers(0, 13), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("slice"), st.tuples(st.integers(0, 13), st.integers(1, 6))),
        st.tuples(st.just("read"), st.tuples(st.integers(0, 300), st.integers(1, 200))),
    ),
    max_size=12,
)


@given(rows=ROWS, width=st.integers(1, 9), changes=CHANGES)
def test_what_is_read_is_what_was_there(rows: int, width: int, changes: list) -> None:
    """14 rows of ``8 * width`` bytes, of which the first ``rows`` are in the snapshot; pieces are of 32 bytes."""
    tensor = torch.arange(14 * width).view(14, width)
    before = tensor[:rows].clone().view(-1).view(torch.uint8)
    snapshots = Snapshots()
    taken = snapshots.take(tensor[:rows])
    read = np.zeros(len(before), dtype=bool)
    content = torch.zeros_like(before)

    def read_part(start: int, stop: int) -> None:
        taken.read(start, content[start:stop])
        read[start:stop] = True

    for kind, value in changes:
        if kind == "read":
            start, stop = min(value[0], len(before)), min(sum(value), len(before))
            if not read[start:stop].any():
                read_part(start, stop)
            continue
        slots = slice(value[0], min(value[0] + value[1], 14)) if kind == "slice" else np.array(value)
        with snapshots.lock:
            snapshots.keep(slots)
            tensor[slots] = -1 - tensor[slots]
    for start, stop in parts_left(read):
        read_part(start, stop)
    assert torch.equal(content, before)


def parts_left(read: np.ndarray) -> list[tuple[int, int]]:
    """Returns the ranges of bytes that were not read yet; a range is read once."""
    edges = np.flatnonzero(np.diff(np.concatenate([[True], read, [True]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def test_pieces_read_already_are_not_copied() -> None:
    tensor = torch.zeros(8, 4, dtype=torch.int64)
    snapshots = Snapshots()
    taken = snapshots.take(tensor)
    target = torch.zeros(128, dtype=torch.uint8)
    taken.read(0, target)
    snapshots.keep(slice(0, 8))
    assert sum(piece.numel() for piece in taken._kept.values()) == 128
    taken.read(128, target)
    assert not taken._kept


def test_several_snapshots_are_each_of_their_moment() -> None:
    tensor = torch.zeros(4, 4, dtype=torch.int64)
    snapshots = Snapshots()
    taken = []
    for value in range(3):
        taken.append(snapshots.take(tensor))
        snapshots.keep(slice(1, 2))
        tensor[1] = value + 1
    assert [one.tensor()[1, 0].item() for one in taken] == [0, 1, 2]
    assert bool(snapshots)
    for one in taken:
        snapshots.close(one)
    assert not snapshots


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_dtype_and_shape_come_back(dtype) -> None:
    tensor = (torch.rand(5, 3, 2) * 200).to(dtype)
    assert torch.equal(Snapshots().take(tensor).tensor(), tensor)
    assert Snapshots().take(tensor[:0]).tensor().shape == (0, 3, 2)
