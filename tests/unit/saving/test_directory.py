# SPDX-License-Identifier: Apache-2.0
"""A directory holds the old save or the new one, whoever saves, reads, dies or loses power."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lightning_replay.saving import DamagedFileError, directory, write_state
from lightning_replay.saving.directory import exclusive, read_manifest, read_save, replaced_save
from lightning_replay.saving.files import data_named_in
from tests.saves import files_of, forge, names_in


def saved(folder: Path, value: int) -> None:
    with replaced_save(folder, "it.json", folder="data") as save:
        (save.data / "values.json").write_text(str(value))
        save.manifest |= {"format": "lightning-replay-test", "version": 1}


def manifest_in(folder: Path) -> dict:
    return read_manifest(folder / "it.json", 1)


def value_in(folder: Path) -> int:
    def read(manifest: dict, data: Path) -> int:
        try:
            return int((data / "values.json").read_text())
        except OSError as error:
            raise DamagedFileError(str(error)) from error

    return read_save(folder, lambda: manifest_in(folder), read)


def test_a_save_replaces_the_one_before(tmp_path) -> None:
    ids = set()
    for value in range(3):
        saved(tmp_path / "here", value)
        assert value_in(tmp_path / "here") == value
        assert names_in(tmp_path / "here") == ["data", "it.json"]
        ids.add(manifest_in(tmp_path / "here")["id"])
    assert len(ids) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_save_that_fails_leaves_the_directory_as_it_was(error, tmp_path) -> None:
    saved(tmp_path, 1)
    before = files_of(tmp_path)
    with pytest.raises(error), replaced_save(tmp_path, "it.json", folder="data") as save:
        (save.data / "values.json").write_text("2")
        raise error
    assert files_of(tmp_path) == before and value_in(tmp_path) == 1


def test_an_interrupt_after_the_swap_does_not_destroy_what_was_swapped_in(tmp_path, monkeypatch) -> None:
    saved(tmp_path, 1)
    replace = directory.replace_file

    def interrupted(*given) -> None:
        replace(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "replace_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 2)
    monkeypatch.undo()
    assert value_in(tmp_path) == 2
    saved(tmp_path, 3)
    assert names_in(tmp_path) == ["data", "it.json"]


@pytest.mark.parametrize("step", ["mkdir", "sync", "replace_file", "remove_saved"])
def test_what_killed_saves_left_is_removed_by_the_next_one(step: str, tmp_path, monkeypatch) -> None:
    saved(tmp_path, 1)
    killed = os.fork()
    if killed == 0:
        module = Path if step == "mkdir" else directory
        monkeypatch.setattr(module, step, lambda *given, **options: os.kill(os.getpid(), signal.SIGKILL))
        saved(tmp_path, 2)
        os._exit(0)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert value_in(tmp_path) == (2 if step == "remove_saved" else 1)
    saved(tmp_path, 3)
    assert names_in(tmp_path) == ["data", "it.json"] and value_in(tmp_path) == 3


def fill(folder: Path) -> None:
    """Puts a user's files there whose names look like files of a save."""
    for name in ("data-0123456789ab/values.json", "seed-202611281130/000000.chunk", "it.0123abcd.tmp", "other.json"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")


def test_files_of_the_user_stay(tmp_path) -> None:
    fill(tmp_path)
    mine = files_of(tmp_path)
    for value in range(2):
        saved(tmp_path, value)
    (data,) = (path for path in tmp_path.glob("data-*") if path.name != "data-0123456789ab")
    fill(data)
    (data / "linked").symlink_to(tmp_path / "seed-202611281130")
    saved(tmp_path, 2)
    (new,) = (path for path in tmp_path.glob("data-*") if path not in (data, tmp_path / "data-0123456789ab"))
    # In a data folder, a file that is named as a save names it is the save's.
    kept = {*mine, new / "values.json", tmp_path / "it.json", data / "other.json", data / "it.0123abcd.tmp"}
    assert {*files_of(tmp_path)} == kept and (data / "linked").is_symlink()


@pytest.mark.parametrize(
    "named", ["..", ".", "", "other", "/", "data-0123456789ab/../other", "../data-0123456789ab", 3]
)
def test_a_forged_manifest_removes_nothing(named, tmp_path) -> None:
    place = tmp_path / "place"
    for folder in (tmp_path / "data-0123456789ab", tmp_path, place / "other", place):
        fill(folder)
    saved(place, 1)
    own = data_named_in(place / "it.json", "data")
    forge(place / "it.json", data=named)
    before = files_of(tmp_path)
    saved(place, 2)
    new = data_named_in(place / "it.json", "data")
    assert own != new and {*files_of(tmp_path)} == {*before, place / new / "values.json"}


@pytest.mark.parametrize("content", ["mine", "", "{}", json.dumps({"data": "data-0123456789ab"}), None])
def test_a_manifest_of_the_user_is_never_replaced(content: str | None, tmp_path) -> None:
    fill(tmp_path)
    if content is None:
        (tmp_path / "it.json").symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "it.json").write_text(content)
    before = {path: path.read_text() for path in files_of(tmp_path)}
    with pytest.raises(FileExistsError, match="it.json is no file of lightning-replay.*directory of its own"):
        saved(tmp_path, 1)
    assert {path: path.read_text() for path in files_of(tmp_path)} == before


def test_data_is_on_the_disk_before_the_manifest_is_swapped_and_the_directory_after(tmp_path, monkeypatch) -> None:
    """The order that a power loss respects: every file, their names, the folder's name, the manifest, its name."""
    done: list[str] = []
    names: dict[int, str] = {}
    fsync, replace = os.fsync, os.replace

    def name_of(handle: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{handle}")).name

    def noted_fsync(handle: int) -> None:
        names[handle] = name_of(handle)
        done.append(f"sync {names[handle]}")
        fsync(handle)

    def noted_replace(source, target) -> None:
        done.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_state(tmp_path / "here", {"a": 1})
    data = next(path.name for path in (tmp_path / "here").iterdir() if path.is_dir())
    (manifest,) = (one for one in done if one.startswith("sync state."))
    assert done == [
        f"sync {tmp_path.name}",
        "sync tensors.safetensors",
        "sync values.json",
        f"sync {data}",
        "sync here",
        manifest,
        "replace state.json",
        "sync here",
    ]


def hold_the_lock(place: Path, held: int) -> None:
    """Holds it in this process, whose child lives on and holds no lock of its parent's."""
    os.setpgid(0, 0)
    with exclusive(place):
        if os.fork():
            os.write(held, b"held")
        time.sleep(60)


def test_the_lock_of_a_killed_process_is_free(tmp_path) -> None:
    told, held = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            hold_the_lock(tmp_path, held)
        finally:
            os._exit(1)
    assert os.read(told, 4) == b"held"
    waited = threading.Event()

    def wait() -> None:
        with exclusive(tmp_path):
            waited.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not waited.wait(0.3)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert waited.wait(10)
    waiting.join()
    os.killpg(other, signal.SIGKILL)  # its child
    os.close(told), os.close(held)


def test_a_reader_that_is_always_late_takes_its_turn_among_the_writers(tmp_path) -> None:
    saved(tmp_path, 0)
    attempts, tries = directory._ATTEMPTS, []

    def read(manifest: dict, data: Path) -> str:
        tries.append(data)
        if len(tries) <= attempts:
            saved(tmp_path, len(tries))
        if not data.exists():
            raise DamagedFileError("replaced")
        return (data / "values.json").read_text()

    assert read_save(tmp_path, lambda: manifest_in(tmp_path), read) == str(attempts)
    assert len(tries) == attempts + 1


def test_a_damaged_save_that_nobody_replaces_is_refused_at_once(tmp_path) -> None:
    saved(tmp_path, 1)
    tries = []

    def read(manifest: dict, data: Path) -> None:
        tries.append(data)
        raise DamagedFileError("broken")

    with pytest.raises(DamagedFileError, match="broken"):
        read_save(tmp_path, lambda: manifest_in(tmp_path), read)
    assert len(tries) == 1


def test_where_there_are_no_locks_other_folders_stay(tmp_path, monkeypatch) -> None:
    """They may be of a save that another process is writing; the folder of the replaced save goes."""
    saved(tmp_path, 1)
    (tmp_path / "data-0123456789ab").mkdir()
    (tmp_path / "data-0123456789ab.it.unfinished").touch()

    def refuse(handle: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(directory.fcntl, "flock", refuse)
    saved(tmp_path, 2)
    assert names_in(tmp_path) == ["data", "data", "data", "it.json"] and value_in(tmp_path) == 2
    monkeypatch.setattr(directory, "fcntl", None)
    saved(tmp_path, 3)
    assert names_in(tmp_path) == ["data", "data", "data", "it.json"] and value_in(tmp_path) == 3


def test_every_changed_value_of_a_manifest_is_found(tmp_path) -> None:
    saved(tmp_path, 1)
    file = tmp_path / "it.json"
    content = json.loads(file.read_text())
    for key, value in content.items():
        for other in (None, f"{value}x", [value], 0):
            file.write_text(json.dumps(content | {key: other}))
            with pytest.raises(DamagedFileError, match="damaged"):
                manifest_in(tmp_path)
        file.write_text(json.dumps({name: one for name, one in content.items() if name != key}))
        with pytest.raises(DamagedFileError, match="damaged"):
            manifest_in(tmp_path)
    file.write_text(json.dumps(content | {"more": 1}))
    with pytest.raises(DamagedFileError, match="checksum differs"):
        manifest_in(tmp_path)
    file.write_text(json.dumps(content, indent=7))  # another layout of the same values
    assert manifest_in(tmp_path) == content
    file.write_text(json.dumps(content | {"version": 3}))  # a digit changed, not a later version
    with pytest.raises(DamagedFileError, match="checksum differs"):
        manifest_in(tmp_path)
