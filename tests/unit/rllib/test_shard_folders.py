# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints that are not local: copied whole, in pieces if they are another node's, stale files gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from pyarrow import fs

from lightning_replay.saving import DamagedFileError
from lightning_replay.sharded import saves as served_folders
from lightning_replay.sharded.folders import LOCK_FILE, Folder
from lightning_replay.sharded.saves import FolderServer, ServedFolder

FILES = {"manifest.json": b"{}", "data/empty": b"", "data/rows": bytes(range(256)) * 9, "data/deep/one": b"1" * 1000}


def remote(root: Path) -> Folder:
    return Folder.at("checkpoint/part", fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()))


def write(folder: Folder, files: dict[str, bytes]) -> None:
    with folder.to_write() as local:
        for name, content in files.items():
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            (local / name).write_bytes(content)
        (local / LOCK_FILE).touch()


def found(directory: Path) -> dict[str, bytes]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def test_a_save_replaces_the_one_before_and_no_other_files(tmp_path: Path) -> None:
    folder = remote(tmp_path)
    assert folder.local is None and not folder.exists()
    write(folder, {"other.json": b"{}", "stale/rows": b"2"})
    (tmp_path / "checkpoint" / "part" / "notes.txt").write_text("the user's")
    write(folder, FILES)
    assert found(tmp_path / "checkpoint" / "part") == {**FILES, "notes.txt": b"the user's"}
    with folder.to_read() as local:
        assert found(local) == {**FILES, "notes.txt": b"the user's"}
    with folder.to_read(deep=False) as local:
        assert sorted(found(local)) == ["manifest.json", "notes.txt"]
    with (folder / "absent").to_read() as local:
        assert not local.exists()


def test_errors_name_the_folder_and_not_its_copy(tmp_path: Path) -> None:
    folder = remote(tmp_path)
    with pytest.raises(DamagedFileError, match="^subtree.*:checkpoint/part/rows is gone$"), folder.to_read() as local:
        raise DamagedFileError(f"{local}/rows is gone")


@pytest.mark.slow
def test_a_folder_of_another_node_is_copied_in_pieces(shared_ray: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(served_folders, "PIECE_BYTES", 1000)
    server = ray.remote(num_cpus=0)(FolderServer).remote()
    folder = ServedFolder(fs.LocalFileSystem(), (tmp_path / "part").as_posix(), server)
    assert folder.local is None and not folder.exists() and not (folder / "data").exists()
    write(folder, FILES)
    assert found(tmp_path / "part") == FILES and (folder / "data").exists()
    with (folder / "data").to_read() as local:
        assert {f"data/{name}": content for name, content in found(local).items()} == {
            name: content for name, content in FILES.items() if name.startswith("data/")
        }
