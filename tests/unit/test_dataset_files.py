# SPDX-License-Identifier: Apache-2.0
"""Files of data sets that strangers made: what leads out of them is refused by every reader, in a sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from gymnasium.spaces import Box, Text
from PIL import EpsImagePlugin

from lightning_replay.dataset_files import DatasetError
from lightning_replay.datasets import from_d4rl, from_lerobot
from tests.recordings import (
    ID,
    RECORDINGS,
    STEPS,
    Recording,
    read_minari,
    write_d4rl,
    write_lerobot,
    write_minari,
    wrong_rows,
)

LAYOUTS = pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS)


def files_of(folder: Path) -> list[Path]:
    """Those that are read."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "namespace" not in path.name)
    return [file for file in files if not (file.name == "metadata.json" and file.parent.name.isdigit())]


@LAYOUTS
def test_whole_recordings_are_read(recording: Recording, tmp_path: Path) -> None:
    recording.write(tmp_path)
    rows = recording.read(tmp_path)
    assert wrong_rows(rows) == 0
    # D4RL has no observation after the episode that was cut off; LeRobot's next.done is taken as termination.
    assert len(rows) == STEPS - (recording.name == "d4rl")


@LAYOUTS
@pytest.mark.parametrize("way", ["pipe", "device", "out", "cut", "other"])
def test_files_that_are_no_files_of_the_data_set_are_refused(recording: Recording, way: str, tmp_path: Path) -> None:
    """Each file in turn; a pipe that is opened would be waited for without end."""
    place = tmp_path / "set"
    place.mkdir()
    recording.write(place)
    for file in files_of(place):
        if recording.name == "d4rl" and way == "out":  # the caller's own path may be a link
            continue
        content = file.read_bytes()
        file.unlink()
        if way == "pipe":
            os.mkfifo(file)
        elif way == "device":
            file.symlink_to("/dev/zero")
        elif way == "out":
            (tmp_path / file.name).write_bytes(content)
            file.symlink_to(tmp_path / file.name)
        elif way == "cut":
            file.write_bytes(content[: len(content) // 2])
        else:
            file.write_bytes(b"no data set")
        with pytest.raises(DatasetError, match=r"; (give|put)") as refused:
            recording.read(place)
        assert str(place) in str(refused.value) or ID in str(refused.value)
        file.unlink()
        file.write_bytes(content)
    assert wrong_rows(recording.read(place)) == 0


@pytest.mark.parametrize("name", ["lerobot v2", "minari arrow"])
def test_links_between_folders_are_not_read_again_and_again(name: str, tmp_path: Path) -> None:
    RECORDINGS[name].write(tmp_path)
    file = next(path for path in files_of(tmp_path) if path.suffix in (".parquet", ".arrow"))
    (file.parent / "again").symlink_to(file.parent.parent)
    with pytest.raises(DatasetError, match="again is a pipe, a device, or a link to a folder"):
        RECORDINGS[name].read(tmp_path)


def test_the_cache_of_the_hub_holds_links_to_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "datasets--user--set" / "snapshots" / "0a1b"
    folder.mkdir(parents=True)
    write_lerobot(folder, "v3.0")
    (tmp_path / "datasets--user--set" / "blobs").mkdir()
    for number, file in enumerate(files_of(folder)):
        blob = tmp_path / "datasets--user--set" / "blobs" / str(number)
        file.rename(blob)
        file.symlink_to(blob)
    assert wrong_rows(from_lerobot(folder)) == 0


@pytest.mark.parametrize("name", ["d4rl", "minari hdf5"])
@pytest.mark.parametrize("way", ["external link", "soft link", "loop", "external storage", "virtual"])
def test_arrays_of_other_files_are_refused(name: str, way: str, tmp_path: Path) -> None:
    RECORDINGS[name].write(tmp_path)
    numbers = np.full((6, 2), 42.0, np.float32)
    (tmp_path / "secret").write_bytes(numbers.tobytes())
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["secret"] = numbers
    entry = "observations" if name == "d4rl" else "episode_0/observations"
    with h5py.File(next(tmp_path.rglob("*.hdf5")), "a") as file:
        shape = file[entry].shape
        file["kept"] = file[entry][()]
        del file[entry]
        if way == "external link":
            file[entry] = h5py.ExternalLink(tmp_path / "secret.h5", "/secret")
        elif way == "external storage":
            file.create_dataset(entry, shape, "f4", external=[(tmp_path / "secret", 0, h5py.h5f.UNLIMITED)])
        elif way == "virtual":
            layout = h5py.VirtualLayout(shape, "f4")
            layout[:6] = h5py.VirtualSource(tmp_path / "secret.h5", "secret", (6, 2))
            file.create_virtual_dataset(entry, layout)
        else:
            file[entry] = h5py.SoftLink("/kept" if way == "soft link" else f"/{entry}")
    with pytest.raises(DatasetError, match=rf"{entry} of .* is a link, or its values lie in other files; copy the"):
        RECORDINGS[name].read(tmp_path)


built: list[str] = []


class NamedEnv(gymnasium.Env):
    def __init__(self) -> None:
        built.append("built")


def test_an_environment_that_a_data_set_names_is_not_built(tmp_path: Path) -> None:
    write_minari(tmp_path, "hdf5")
    file = tmp_path / ID / "data" / "metadata.json"
    spec = {"id": "Named-v0", "entry_point": "tests.unit.test_dataset_files:NamedEnv", "additional_wrappers": []}
    described = json.loads(file.read_text()) | {"env_spec": json.dumps(spec | {"kwargs": {}})}
    file.write_text(json.dumps(described))
    assert wrong_rows(read_minari(tmp_path)) == 0 and not built
    for space in ("observation_space", "action_space"):
        file.write_text(json.dumps({key: value for key, value in described.items() if key != space}))
        with pytest.raises(DatasetError, match="does not describe its spaces, and Minari would build the environment"):
            read_minari(tmp_path)
        assert not built


def test_a_program_in_place_of_an_image_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to the first ``gs`` that is found; here it writes down that it ran."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 10.0\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    image = Box(0, 255, (64, 64, 3), np.uint8), np.zeros((64, 64, 3), np.uint8)
    write_minari(tmp_path, "hdf5", image=image)
    assert read_minari(tmp_path)["observation", "image"].shape == (STEPS, 64, 64, 3)
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with h5py.File(tmp_path / ID / "data" / "main_data.hdf5", "a") as file:
        stored = file["episode_0/observations/image"]
        stored[:, : len(program)] = np.frombuffer(program, np.uint8)
    with pytest.raises(DatasetError, match="Unable to locate Ghostscript"):
        read_minari(tmp_path)
    assert not (tmp_path / "ran").exists() and EpsImagePlugin.gs_binary is None


def test_lengths_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "sparse.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
            file.create_dataset(name, (10**13,), "f4", chunks=(1_024,))
    with pytest.raises(MemoryError, match=r"200,000,000,000,000 bytes are needed for the rows of .*sparse.hdf5.*Split"):
        from_d4rl(tmp_path / "sparse.hdf5")
    write_lerobot(tmp_path / "set", "v3.0")
    file = tmp_path / "set" / "meta" / "info.json"
    info = json.loads(file.read_text())
    info["features"]["observation.state"]["shape"] = [10**13]
    file.write_text(json.dumps(info))
    with pytest.raises(MemoryError, match="Give a smaller data set"):
        from_lerobot(tmp_path / "set")


def test_arrow_files_with_forged_lengths_do_not_end_the_process(tmp_path: Path) -> None:
    """The highest byte of every small number of 64 bits in turn, of which some are lengths of arrays."""
    write_minari(tmp_path, "arrow")
    file = tmp_path / ID / "data" / "0" / "part-0.arrow"
    content = file.read_bytes()
    refused = 0
    for place in range(0, len(content) - 8, 4):
        if 0 < int.from_bytes(content[place : place + 8], "little") < 20:
            file.write_bytes(content[: place + 7] + b"\xff" + content[place + 8 :])
            try:
                read_minari(tmp_path)
            except DatasetError:
                refused += 1
    assert refused > 5


@pytest.mark.parametrize("way", ["file in place of a folder", "columns that the first file lacks"])
def test_every_arrow_file_is_checked(way: str, tmp_path: Path) -> None:
    """Minari also reads a file that has the name of an episode, and each episode with columns of its own."""
    write_minari(tmp_path, "arrow", text=(Text(2_000), "a" * 1_111))
    place = tmp_path / ID / "data"
    file = place / "1" / "part-0.arrow"
    if way == "file in place of a folder":
        file.rename(tmp_path / "kept")
        shutil.rmtree(file.parent)
        file = file.parent
        (tmp_path / "kept").rename(file)
    else:
        other = pyarrow.record_batch({"rewards": [0.0]})
        with (
            pyarrow.OSFile(str(place / "0" / "a.arrow"), "wb") as sink,
            pyarrow.ipc.new_file(sink, other.schema) as out,
        ):
            out.write_batch(other)
    content = file.read_bytes()
    offsets = np.int32([0, 1_111, 2_222]).tobytes()
    assert offsets in content
    file.write_bytes(content.replace(offsets, np.int32([0, 1_900_000_000, 2_000_000_000]).tobytes()))
    with pytest.raises(DatasetError, match="Offset invariant failure"):
        read_minari(tmp_path, observations=["state"])


def test_values_that_refer_to_one_object_are_refused_unread(tmp_path: Path) -> None:
    write_d4rl(tmp_path)
    with h5py.File(tmp_path / "steps.hdf5", "a") as file:
        del file["observations"]
        file.create_dataset("observations", (STEPS,), h5py.vlen_dtype(np.uint8))
    with pytest.raises(DatasetError, match=r"columns of other kinds than numbers, {'observations': 'object'}; give"):
        from_d4rl(tmp_path / "steps.hdf5")


@pytest.mark.parametrize("way", ["long lists", "texts"])
def test_columns_of_lerobot_are_counted_before_they_are_read(way: str, tmp_path: Path) -> None:
    """A number or a text that many rows repeat takes a few bytes of a file."""
    write_lerobot(tmp_path, "v3.0")
    file = next((tmp_path / "data").rglob("*.parquet"))
    table = pyarrow.parquet.read_table(file)
    value: object = [0.0] * 5_000
    if way == "texts":
        value = "a" * 5_000
    pyarrow.parquet.write_table(
        table.set_column(table.column_names.index("action"), "action", pyarrow.array([value] * STEPS)), file
    )
    with pytest.raises(DatasetError, match=r"list.element': 75000|holds texts or bytes; give numbers"):
        from_lerobot(tmp_path)


def test_columns_of_lerobot_may_have_names_that_begin_alike(tmp_path: Path) -> None:
    write_lerobot(tmp_path, "v3.0")
    described = tmp_path / "meta" / "info.json"
    info = json.loads(described.read_text())
    info["features"]["action.joint_position"] = {"dtype": "float32", "shape": [9]}
    described.write_text(json.dumps(info))
    file = next((tmp_path / "data").rglob("*.parquet"))
    table = pyarrow.parquet.read_table(file)
    joints = pyarrow.array([[0.0] * 9] * STEPS)
    pyarrow.parquet.write_table(table.append_column("action.joint_position", joints), file)
    assert wrong_rows(from_lerobot(tmp_path)) == 0


def test_columns_of_lerobot_may_be_of_half_precision(tmp_path: Path) -> None:
    write_lerobot(tmp_path, "v3.0")
    described = tmp_path / "meta" / "info.json"
    info = json.loads(described.read_text())
    info["features"]["action"]["dtype"] = "float16"
    described.write_text(json.dumps(info))
    file = next((tmp_path / "data").rglob("*.parquet"))
    table = pyarrow.parquet.read_table(file)
    halves = table["action"].combine_chunks().to_pylist()
    column = pyarrow.array([[np.float16(value) for value in row] for row in halves], pyarrow.list_(pyarrow.float16()))
    pyarrow.parquet.write_table(table.set_column(table.column_names.index("action"), "action", column), file)
    rows = from_lerobot(tmp_path)
    assert rows["action"].tolist() == halves
