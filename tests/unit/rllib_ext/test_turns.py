# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written in turns: whenever a save is killed, a whole one is found."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from lightning_replay.inspection.saves import read_buffers
from lightning_replay.levels import LevelBuffer
from lightning_replay.saving import DamagedFileError
from lightning_replay.saving.folders import Folder
from rllib_ext.turns import newest_in, save_in_turns

FILES = ("a/state.pkl", "b/state.pkl", "levels/state.json")


class Algorithm:
    """Writes its number into several files, one after the other, as RLlib does."""

    def __init__(self, number: int, killed_after: int | None = None) -> None:
        self.number, self.killed_after = number, killed_after

    def save_to_path(self, path: str, filesystem: Any) -> None:
        for place, name in enumerate(FILES):
            if place == self.killed_after:
                raise KeyboardInterrupt
            filesystem.create_dir(f"{path}/{name.rpartition('/')[0]}")
            with filesystem.open_output_stream(f"{path}/{name}") as stream:
                stream.write(str(self.number).encode())


def folders(tmp_path: Path) -> list[Folder]:
    remote = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    return [Folder.of_user(tmp_path / "here"), Folder.at("there", remote)]


def number_in(folder: Folder) -> set[int]:
    found = set()
    for name in FILES:
        with folder.filesystem.open_input_stream(f"{folder.path}/{name}") as stream:
            found.add(int(stream.read()))
    return found


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("killed_after", range(len(FILES)))
def test_a_killed_save_leaves_the_one_before(which: int, killed_after: int, tmp_path: Path) -> None:
    folder = folders(tmp_path)[which]
    assert newest_in(folder) == folder
    with pytest.raises(KeyboardInterrupt):
        save_in_turns(Algorithm(0, killed_after), folder)
    assert newest_in(folder) == folder  # nothing whole is there
    for number in range(1, 6):
        place = save_in_turns(Algorithm(number), folder)
        assert newest_in(folder) == place and number_in(place) == {number}
        with pytest.raises(KeyboardInterrupt):
            save_in_turns(Algorithm(-number, killed_after), folder)
        assert newest_in(folder) == place and number_in(place) == {number}


def test_a_save_killed_between_the_checkpoint_and_its_count_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders(tmp_path)[0]
    first = save_in_turns(Algorithm(1), folder)
    killed = os.fork()
    if killed == 0:
        monkeypatch.setattr("rllib_ext.turns.write_state", lambda *given: os.kill(os.getpid(), signal.SIGKILL))
        save_in_turns(Algorithm(2), folder)
        os._exit(0)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert newest_in(folder) == first and number_in(first) == {1}


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    mine = [tmp_path / "here" / name for name in ("notes.txt", "replay_buffer/buffer.json", "first.bak/a/state.pkl")]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    for number in range(3):
        save_in_turns(Algorithm(number), folders(tmp_path)[0])
    assert all(file.read_text() == "mine" for file in mine)


def test_a_damaged_count_is_refused(tmp_path: Path) -> None:
    folder = folders(tmp_path)[0]
    save_in_turns(Algorithm(1), folder)
    (tmp_path / "here" / "newest" / "state.json").write_text("{}")
    for use in (newest_in, lambda place: save_in_turns(Algorithm(2), place)):
        with pytest.raises(DamagedFileError, match=r"newest/state.json is damaged"):
            use(folder)


def test_the_newest_is_inspected(tmp_path: Path) -> None:
    class WithLevels:
        def __init__(self, count: int) -> None:
            self.levels = LevelBuffer(levels=count, seed=0)

        def save_to_path(self, path: str, filesystem: Any) -> None:
            self.levels.save(f"{path}/levels")

    for count in (3, 4, 5):
        save_in_turns(WithLevels(count), folders(tmp_path)[0])
        (found,) = read_buffers(tmp_path / "here")
        assert found.path.parent.name == ("first", "second")[count % 2 == 1] and found.size > 0
