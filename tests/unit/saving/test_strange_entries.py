# SPDX-License-Identifier: Apache-2.0
"""Links, pipes, folders and large files with the names of a save's: none is followed, waited for, or read whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.inspection.saves import read_buffers
from lightning_replay.saving import DamagedFileError, read_state, write_state
from lightning_replay.saving.directory import checksum_of
from lightning_replay.saving.files import MAX_MANIFEST_BYTES
from lightning_replay.saving.folders import Folder
from lightning_replay.sharded.saves import NAMES, SavedShards, _folders_in, manifest_of
from tests.saves import forge
from tests.transitions import numbered_steps

MANIFESTS = ("replay.json", "state.json")
PLACES = {"folder": "{}", "URL": "file://{}"}


def save(manifest: str, path: str) -> None:
    if manifest == "state.json":
        write_state(path, {"a": 1})
        return
    replay = recipes.uniform(capacity=20, batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 10))
    save_replay(replay, path)


def load(manifest: str, path: str) -> None:
    (read_state if manifest == "state.json" else load_replay)(path)


def link(file: Path) -> None:
    victim = file.parent.parent / "victim.txt"
    victim.write_text("precious")
    file.symlink_to(victim)


def folder(file: Path) -> None:
    (file / "mine").mkdir(parents=True)


def listing(folder: Path) -> list[str]:
    return sorted(one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.name != ".lock")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("manifest", MANIFESTS)
@pytest.mark.parametrize("entry", [link, os.mkfifo, folder], ids=["link", "pipe", "folder"])
def test_what_is_no_manifest_is_neither_replaced_nor_read(
    entry: Callable[[Path], None], manifest: str, place: str, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    entry(there / manifest)
    before, path = listing(tmp_path), PLACES[place].format(there)
    with pytest.raises(FileExistsError, match=f"{manifest} is no file of lightning-replay"):
        save(manifest, path)
    with pytest.raises(DamagedFileError, match=manifest):
        load(manifest, path)
    assert listing(tmp_path) == before
    if entry is link:
        assert (tmp_path / "victim.txt").read_text() == "precious"


@pytest.mark.parametrize("place", PLACES)
def test_a_manifest_that_is_too_large_is_not_read(place: str, tmp_path: Path) -> None:
    write_state(tmp_path, {"a": 1})
    with (tmp_path / "state.json").open("a") as stream:
        stream.write(" " * MAX_MANIFEST_BYTES)
    with pytest.raises(DamagedFileError, match="state.json"):
        read_state(PLACES[place].format(tmp_path))


def test_a_data_folder_at_a_url_is_not_removed_through_a_link(tmp_path: Path, monkeypatch) -> None:
    # As a server of files removes a folder: one file after the other.
    monkeypatch.setattr(LocalFileSystem, "rm", AbstractFileSystem.rm)
    there, mine = tmp_path / "there", tmp_path / "mine"
    write_state(there, {"a": 1})
    mine.mkdir()
    (mine / "values.json").write_text("precious")
    (there / "state-0123456789ab").symlink_to(mine)
    forge(there / "state.json", data="state-0123456789ab")
    write_state(f"file://{there}", {"a": 2})
    assert read_state(there) == {"a": 2}
    assert (mine / "values.json").read_text() == "precious"


@pytest.mark.parametrize("arrives", [False, True])
def test_a_manifest_that_is_not_uploaded_leaves_no_data(arrives: bool, monkeypatch) -> None:
    url = "memory://bucket/failing"
    write_state(url, {"a": 1})
    memory, upload = MemoryFileSystem(), MemoryFileSystem._open
    before = memory.cat_file("/bucket/failing/state.json")

    def state_folders() -> list[str]:
        return [one.rpartition("/")[2] for one in memory.glob("/bucket/failing/state-*")]

    def fails(self: MemoryFileSystem, path: str, mode: str = "rb", **options: object) -> object:
        if mode == "rb" or not path.endswith("state.json"):
            return upload(self, path, mode, **options)
        if arrives:
            manifest, (new,) = json.loads(before), set(state_folders()) - {json.loads(before)["data"]}
            upload(self, path, mode, data=json.dumps(manifest | {"data": new}).encode())
        raise OSError("the connection is lost")

    monkeypatch.setattr(MemoryFileSystem, "_open", fails)
    with pytest.raises(OSError, match="the connection is lost"):
        write_state(url, {"a": 2})
    monkeypatch.undo()
    assert json.loads(memory.cat_file("/bucket/failing/state.json"))["data"] in state_folders()
    assert len(state_folders()) == 1 + arrives
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("mark", ["link", "pipe", "folder"])
def test_the_mark_of_a_save_is_no_way_out_of_its_folder(mark: str, tmp_path: Path) -> None:
    there, outside = tmp_path / "there", tmp_path / "outside"
    write_state(there, {"a": 1})
    name = json.loads((there / "state.json").read_text())["data"]
    file = there / f"{name}.state.unfinished"
    {"link": lambda: file.symlink_to(outside), "pipe": lambda: os.mkfifo(file), "folder": file.mkdir}[mark]()
    write_state(there, {"a": 2})
    assert read_state(there) == {"a": 2}
    assert not outside.exists() and not (there / name).exists()


@pytest.mark.parametrize("name", ["\0.chunk", "\ud800.chunk", "x" * 300])
def test_a_save_replaces_one_whose_manifest_lists_impossible_names(name: str, tmp_path: Path) -> None:
    save("replay.json", str(tmp_path))
    files = json.loads((tmp_path / "replay.json").read_text())["files"]
    forge(tmp_path / "replay.json", files=files | {name: {"bytes": 1, "blake2b": "x"}})
    save("replay.json", str(tmp_path))
    assert len(load_replay(tmp_path)) == 10


@pytest.mark.parametrize("count", [20_000_000, 2, 0, -1, True, 1.5, "x", None, [1]])
def test_the_number_of_shards_in_a_manifest_is_not_believed(count: Any, tmp_path: Path) -> None:
    data = tmp_path / "shards-0123456789ab"
    write_state(data / "draws", {"a": 1})
    (data / "shard-0").mkdir()
    manifest = {"version": 1, "id": "x", "data": data.name, "num_shards": count}
    for name in ("shards.json", "replay_shards.json"):
        (tmp_path / name).write_text(json.dumps(manifest | {"checksum": checksum_of(manifest)}))
    with pytest.raises(DamagedFileError, match="1 folders of shards are there"):
        list(read_buffers(tmp_path))
    with pytest.raises(DamagedFileError, match="1 folders of shards are there"):
        SavedShards.read(Folder.at(tmp_path), NAMES, manifest_of)
    assert _folders_in(tmp_path, NAMES) == []
