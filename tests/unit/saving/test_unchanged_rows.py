# SPDX-License-Identifier: Apache-2.0
"""Saves read the rows that were written since an earlier save, and no others."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.replay import Replay
from lightning_replay.saves import verify_replay
from lightning_replay.saving import chunks
from lightning_replay.saving import states as saved_state
from lightning_replay.saving.snapshot import Snapshot
from lightning_replay.storage.rows import frames_by_column
from tests.frame_steps import IMAGE_KEYS, frame_rows, stacks_of
from tests.saves import remove, stored
from tests.transitions import numbered_steps

pytestmark = pytest.mark.usefixtures("small_chunks")
ROW = 64  # bytes; a chunk has 16 rows, the last one of 200 rows 8


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """First rows of the chunks that are read."""
    rows: list[int] = []
    original = Snapshot.read

    def noted(self: Snapshot, start: int, target: torch.Tensor) -> None:
        if len(self.shape) > 1:  # rows or frames, not a flat tensor beside them
            rows.append(start // ROW)
        original(self, start, target)

    monkeypatch.setattr(Snapshot, "read", noted)
    return rows


def _rows(replay: Replay) -> torch.Tensor:
    return replay.storage.state_dict()["rows"]


def _is_saved(replay: Replay, path: Path) -> bool:
    verify_replay(path)
    return torch.equal(_rows(replay), _rows(load_replay(path)))


def test_chunks_without_written_rows_are_not_read(tmp_path, read) -> None:
    replay = stored()
    replay.save(tmp_path / "one")
    assert sorted(read) == list(range(0, 200, 16))
    read.clear()
    replay.save(tmp_path / "one")
    replay.save(tmp_path / "two")
    assert sorted(read) == list(range(0, 200, 16)), "nothing in the same folder, and all for a new one"
    read.clear()
    replay.extend(numbered_steps(500, 8))  # slots 10 to 17
    save_replay(replay, tmp_path / "three", previous=tmp_path / "one")
    assert {0, 16} <= set(read) <= {0, 16, 32, 48}, "those of a block of 64 rows are read"
    assert _is_saved(replay, tmp_path / "three")


def _flags(replay: Replay) -> None:
    index = torch.tensor([130])
    replay.end_episodes(slots=index, generation=replay.storage.generation_of(index))


def _emptied(replay: Replay) -> None:
    replay.empty()
    replay.extend(numbered_steps(0, 150))


def _through_views(replay: Replay) -> None:
    replay.storage.all_rows["action"][140] = 0.5


def _through_a_slice(replay: Replay) -> None:
    replay.storage.get(slice(140, 150))["action"].numpy()[3] = 0.25


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda replay: replay.storage.set(torch.tensor([5, 150]), numbered_steps(900, 2)), id="at random"),
        pytest.param(lambda replay: replay.__setitem__(120, numbered_steps(900, 1)[0]), id="item"),
        pytest.param(lambda replay: replay.load("other"), id="loaded"),
        *(_flags, _emptied, _through_views, _through_a_slice),
    ],
)
def test_every_way_of_writing_is_saved(change: Callable, tmp_path, monkeypatch) -> None:
    """Twice: views that were handed out stay writable."""
    monkeypatch.chdir(tmp_path)
    other = stored()
    other.extend(numbered_steps(7_000, 50))
    other.save("other")
    replay = stored()
    replay.save(tmp_path / "save")
    views = None
    for _ in range(2):
        change(replay)
        replay.save(tmp_path / "save")
        assert _is_saved(replay, tmp_path / "save")
        views = replay.storage.all_rows if change is _through_views else views
    if views is not None:
        views["action"][7] = 0.75
        replay.save(tmp_path / "save")
        assert _is_saved(replay, tmp_path / "save")


def test_rows_read_as_views_are_read_by_every_save(tmp_path, read) -> None:
    replay = stored()
    replay.storage.get(slice(0, 3))
    replay.save(tmp_path)
    read.clear()
    replay.save(tmp_path)
    assert len(read) == 13


def test_another_buffer_in_the_same_folder_in_between(tmp_path, read) -> None:
    """The rows of the first are found in its memory, and its files are no longer there."""
    replay, other = stored(), stored()
    other.extend(numbered_steps(7_000, 200))
    replay.save(tmp_path)
    other.save(tmp_path)
    read.clear()
    replay.save(tmp_path)
    assert len(read) == 13 and _is_saved(replay, tmp_path)


def test_a_failed_save_and_lost_files_in_between(tmp_path, monkeypatch) -> None:
    replay = stored()
    replay.save(tmp_path)
    replay.extend(numbered_steps(500, 8))
    with monkeypatch.context() as patch:
        patch.setattr("lightning_replay.saves.write_data", _write_and_fail)
        with pytest.raises(OSError, match="no space"):
            replay.save(tmp_path)
    replay.save(tmp_path)
    assert _is_saved(replay, tmp_path)
    remove(next(tmp_path.glob("data-*/000003.chunk")))
    size = save_replay(replay, tmp_path)
    assert size.total - size.written == 11 * 1024 + 512 and _is_saved(replay, tmp_path)


def _write_and_fail(*arguments) -> None:
    saved_state.write_data(*arguments)
    raise OSError("no space left on device")


def test_a_copy_is_followed_on_its_own(tmp_path) -> None:
    replay = stored()
    replay.save(tmp_path)
    again = copy.deepcopy(replay)
    again.extend(numbered_steps(800, 30))
    for one in (replay, again, replay):
        one.save(tmp_path)
        assert _is_saved(one, tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_saves_its_own_rows(tmp_path) -> None:
    replay = stored()
    replay.save(tmp_path)
    child = os.fork()
    if not child:
        replay.extend(numbered_steps(800, 30))
        replay.save(tmp_path)
        os._exit(0 if _is_saved(replay, tmp_path) else 1)
    assert os.waitpid(child, 0)[1] == 0
    replay.extend(numbered_steps(900, 5))
    replay.save(tmp_path)
    assert _is_saved(replay, tmp_path)


def test_rows_of_retention_are_followed(tmp_path) -> None:
    replay = recipes.surprise_retention(capacity=200, batch_size=8, seed=0)
    for first in range(0, 600, 40):
        replay.extend(numbered_steps(first, 40))
        replay.save(tmp_path)
        assert _is_saved(replay, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("key", IMAGE_KEYS, ids=str)
def test_frames_are_followed(tmp_path, monkeypatch, read, key) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)
    monkeypatch.setattr(saved_state, "LARGE_BYTES", 128)
    replay = recipes.uniform(capacity=100, batch_size=8, frame_stack=2, image_key=key, frame_capacity=300, seed=0)
    for first in range(0, 240, 20):
        replay.extend(frame_rows(stacks_of(range(first, first + 15), 2), (4, 4), key=key))
        replay.save(tmp_path)
        again = load_replay(tmp_path)
        pairs = (frames_by_column(one.storage.state_dict()) for one in (again, replay))
        assert all(torch.equal(one, other) for (_, one, _), (_, other, _) in zip(*pairs, strict=True))
        assert _is_saved(replay, tmp_path)
    read.clear()
    replay.save(tmp_path)
    assert not read
