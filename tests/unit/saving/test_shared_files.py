# SPDX-License-Identifier: Apache-2.0
"""Files that a save shares with an earlier one by hard links."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.replay import Replay
from lightning_replay.saves import MANIFEST, SavedSize, verify_replay
from tests.saves import files_of, forge, lengthen, remove, stored, truncate
from tests.transitions import numbered_steps

pytestmark = pytest.mark.usefixtures("small_chunks")


def _files(folder: Path) -> dict[str, os.stat_result]:
    return {path.name: path.stat() for path in files_of(folder)}


def _sizes(folder: Path) -> tuple[int, int]:
    """Bytes of all files of a save, and of those that no other save shares."""
    files = _files(folder).values()
    return sum(each.st_size for each in files), sum(each.st_size for each in files if each.st_nlink == 1)


def test_what_an_earlier_save_holds_is_linked_from_it(tmp_path) -> None:
    """Slots 10 to 17 change, which are in the first two of 13 chunks."""
    replay = stored()
    first = save_replay(replay, tmp_path / "first")
    assert first == SavedSize(*_sizes(tmp_path / "first")) and first.total == first.written
    replay.extend(numbered_steps(500, 8))
    assert replay.storage.get(slice(10, 18))["observation"][:, 0].tolist() == list(range(500, 508))
    second = save_replay(replay, tmp_path / "second", previous=tmp_path / "first")
    assert second == SavedSize(*_sizes(tmp_path / "second"))
    assert second.total - second.written == 10 * 1024 + 512
    one, other = _files(tmp_path / "first"), _files(tmp_path / "second")
    shared = [name for name in other if one[name].st_ino == other[name].st_ino]
    assert sorted(shared) == [f"{number:06d}.chunk" for number in range(2, 13)]
    shutil.rmtree(tmp_path / "first")
    assert torch.equal(load_replay(tmp_path / "second").sample()["index"], replay.sample()["index"])


def test_both_the_directory_and_the_previous_save_are_shared_from(tmp_path) -> None:
    replay = stored()
    replay.save(tmp_path / "first")
    replay.extend(numbered_steps(500, 8))
    replay.save(tmp_path / "second")
    replay.storage.all_rows["action"][:16] = 0.5  # first chunk
    replay.save(tmp_path / "first")
    replay.storage.all_rows["action"][199] = 0.5  # last chunk
    size = save_replay(replay, tmp_path / "second", previous=tmp_path / "first")
    assert size.total - size.written == 12 * 1024
    links = {name: status.st_nlink for name, status in _files(tmp_path / "second").items() if name.endswith(".chunk")}
    assert [links[name] for name in sorted(links)] == [2] + [2] * 11 + [1]


def _another_buffer(folder: Path) -> None:
    shutil.rmtree(folder)
    other = recipes.uniform(capacity=200, batch_size=8)
    other.extend(numbered_steps(7_000, 200))
    other.save(folder)


def _no_files(folder: Path) -> None:
    for file in folder.glob("data-*/*"):
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "no saved replay buffer"),
        (lambda folder: (folder / MANIFEST).unlink(), "no saved replay buffer"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "is damaged"),
        (lambda folder: forge(folder / MANIFEST, version=99), "format version 99"),
        (_another_buffer, "no file of .* could be shared"),
        (_no_files, "missing or damaged in an earlier save"),
    ],
)
def test_a_previous_save_of_no_use_is_said_and_everything_written(spoil, message, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "lightning_replay")
    replay = stored()
    replay.save(tmp_path / "first")
    spoil(tmp_path / "first")
    size = save_replay(replay, tmp_path / "second", previous=str(tmp_path / "first"))
    assert size.written == size.total
    said = [record for record in caplog.records if record.name.startswith("lightning_replay")]
    assert {record.levelname for record in said} == {"INFO"}
    assert any(re.search(message, record.getMessage()) for record in said)
    assert load_replay(tmp_path / "second").sample()["index"].tolist() == replay.sample()["index"].tolist()


@pytest.mark.parametrize("spoil", [truncate, lengthen, remove])
def test_a_chunk_that_lost_its_size_is_not_linked(spoil, tmp_path) -> None:
    replay = stored()
    replay.save(tmp_path / "first")
    spoil(next((tmp_path / "first").glob("data-*/000002.chunk")))
    size = save_replay(replay, tmp_path / "second", previous=tmp_path / "first")
    assert size.total - size.written == 11 * 1024 + 512
    assert verify_replay(tmp_path / "second")["length"] == 200


def test_without_hard_links_every_save_is_written_whole(tmp_path, monkeypatch) -> None:
    def refuse(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    replay = stored()
    replay.save(tmp_path / "first")
    size = save_replay(replay, tmp_path / "second", previous=tmp_path / "first")
    assert size == SavedSize(*_sizes(tmp_path / "second")) and size.written == size.total
    shutil.rmtree(tmp_path / "first")
    assert torch.equal(load_replay(tmp_path / "second").sample()["index"], replay.sample()["index"])


@pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict:UserWarning")  # TorchRL's own
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_columns_of_other_storages_are_kept_in_chunks_too(kind, tmp_path) -> None:
    def built() -> Replay:
        return Replay(storage=kind(2000), batch_size=8, seed=0)

    replay = built()
    steps = numbered_steps(0, 1600)
    steps["half"] = torch.randn(1600, 7).to(torch.bfloat16)
    if kind is LazyTensorStorage:  # TorchRL's memory maps hold no columns without bytes
        steps["nothing"] = torch.zeros(1600, 0)
    replay.extend(steps)
    replay.save(tmp_path / "first")
    replay.storage.get(slice(0, 2000))["half"][0] = 1.5
    size = save_replay(replay, tmp_path / "second", previous=tmp_path / "first")
    assert size.total - size.written > 0.7 * size.total
    again = built()
    again.load(tmp_path / "second")
    batches = [each.sample() for each in (replay, again)]
    assert batches[1]["half"].dtype == torch.bfloat16
    assert (batches[0] == batches[1]).all()
