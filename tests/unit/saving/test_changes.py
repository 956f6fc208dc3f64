# SPDX-License-Identifier: Apache-2.0
"""What was found of a part of a tensor holds until one of its rows is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replay.saving import snapshot as changes
from lightning_replay.saving.snapshot import Snapshot, Snapshots

ROWS, WIDTH, PART = 40, 3, 56  # rows of 24 bytes; parts end inside of rows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(changes, "BLOCK_SHIFT", 1)


SLOTS = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("slots"), SLOTS),
        st.tuples(st.just("slice"), st.tuples(st.integers(0, ROWS - 1), st.integers(1, 9))),
        st.tuples(st.just("views"), SLOTS),
        st.tuples(st.just("take"), st.integers(1, ROWS)),
        st.tuples(st.just("save"), st.integers(0, 3)),
    ),
    max_size=15,
)


def _check(snapshot: Snapshot, before: torch.Tensor, *, keeps: bool) -> None:
    content = before.view(-1).view(torch.uint8)
    for start in range(0, len(content), PART):
        part = bytes(content[start : start + PART].tolist())
        assert snapshot.unchanged(start, len(part)) in (None, part)
        if keeps:
            snapshot.keep_result(start, len(part), part)


@pytest.mark.slow
@settings(max_examples=200)
@given(steps=STEPS)
def test_kept_results_are_those_of_the_content(steps: list) -> None:
    """Results are the bytes themselves; several snapshots are open, and read in any order after writes."""
    tensor = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
    snapshots = Snapshots()
    open_ones = [(snapshots.take(tensor), tensor.clone())]
    _check(*open_ones[0], keeps=True)
    for number, (kind, value) in enumerate(steps):
        if kind == "take":
            open_ones.append((snapshots.take(tensor[:value]), tensor[:value].clone()))
        elif kind == "save":
            _check(*open_ones[-1 - value % len(open_ones)], keeps=True)
        else:
            slots = slice(value[0], min(sum(value), ROWS)) if kind == "slice" else np.array(value)
            with snapshots.lock:
                snapshots.keep_no_result() if kind == "views" else snapshots.keep(slots)
                tensor[slots] = 1000 + number
        for one in open_ones:
            _check(*one, keeps=False)


def test_parts_without_written_rows_are_found_again() -> None:
    """Rows 8 and 9 are a block, bytes 192 to 240, in the parts from bytes 168 and 224."""
    tensor, snapshots = torch.zeros(ROWS, WIDTH, dtype=torch.int64), Snapshots()
    starts = range(0, tensor.nbytes - PART, PART)
    first = snapshots.take(tensor)
    for start in starts:
        first.keep_result(start, PART, start)
    snapshots.close(first)
    snapshots.keep(slice(9, 10))
    second = snapshots.take(tensor)
    assert [start for start in starts if second.unchanged(start, PART) is None] == [168, 224]
    assert second.unchanged(0, PART - 1) is None, "a part of another length"
    snapshots.keep(torch.tensor([39]))
    assert snapshots.take(tensor).unchanged(0, PART) == 0
    snapshots.keep_no_result()
    assert all(snapshots.take(tensor).unchanged(start, PART) is None for start in starts)


def test_a_result_of_an_older_snapshot_does_not_replace_that_of_a_newer() -> None:
    tensor, snapshots = torch.zeros(ROWS, WIDTH, dtype=torch.int64), Snapshots()
    older = snapshots.take(tensor)
    snapshots.keep(slice(0, 4))
    newer = snapshots.take(tensor)
    newer.keep_result(0, PART, "new")
    older.keep_result(0, PART, "old")
    assert newer.unchanged(0, PART) == "new" and older.unchanged(0, PART) is None


def test_bytes_that_are_skipped_are_not_copied_for_the_snapshot() -> None:
    tensor, snapshots = torch.zeros(4, 1 << 16, dtype=torch.int64), Snapshots()
    taken = snapshots.take(tensor)
    snapshots.keep(slice(1, 2))
    assert len(taken._kept) == 2
    taken.skip(0, tensor.nbytes)
    snapshots.keep(slice(0, 4))
    assert not taken._kept
