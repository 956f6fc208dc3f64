# SPDX-License-Identifier: Apache-2.0
"""Saved buffers of each kind are read as they are in use, a part at a time, and refused where they are damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_replay import recipes
from lightning_replay.inspection.command import main as inspect_save
from lightning_replay.inspection.contents import LevelContents, ReplayContents, contents_of, look_at
from lightning_replay.inspection.page import Subject, page_of, pictures_of, text_about
from lightning_replay.inspection.rows import StoredRows
from lightning_replay.inspection.saves import SavedBuffer, read_buffers
from lightning_replay.levels import LevelBuffer
from lightning_replay.saves import present_state
from lightning_replay.saving import DamagedFileError, write_state
from lightning_replay.saving.chunks import locate_chunks, write_chunks
from tests.frame_steps import IMAGE_KEYS, WRIST, frame_rows, stacks_of
from tests.level_steps import segment
from tests.recipe_options import built, fitting
from tests.saves import flip_a_byte, forge
from tests.transitions import numbered_steps


def read(path: Path) -> SavedBuffer:
    (buffer,) = read_buffers(path)
    return buffer


def same(one: Any, other: Any) -> bool:
    """Whether two contents are equal, arrays by value."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, ReplayContents):
        names = (name for name in vars(one) if name != "images")
        return all(same(vars(one)[name], vars(other)[name]) for name in names)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if hasattr(one, "__dataclass_fields__") else bool(one == other)


@pytest.mark.parametrize("name", sorted(recipes.known()))
def test_every_recipe_is_read_from_its_files_as_it_is_in_use(name: str, tmp_path: Path) -> None:
    replay = built(name, capacity=50, batch_size=4, seed=0)
    for first in (0, 40):
        replay.extend(fitting(replay, numbered_steps(first, 40, done_every=5)))
        batch = replay.sample()
        replay.update_priority(batch, torch.arange(float(batch.numel())).view(batch.shape))
    replay.save(tmp_path / "save")
    buffer = read(tmp_path / "save")
    assert same(buffer.contents, look_at(replay))
    page = page_of(name, "", [Subject("", buffer.contents, buffer.size)])
    assert "<svg" in page and "transitions" in text_about(Subject("", buffer.contents))


def test_frames_are_shown_as_they_were_stored_and_large_ones_scaled_down(tmp_path: Path) -> None:
    replay = recipes.prioritized(30, 4, frame_stack=2, image_key="pixels", seed=0)
    steps = frame_rows(stacks_of(range(10, 31), 2), (8, 8), done=True)
    replay.extend(steps)
    replay.save(tmp_path / "save")
    contents = read(tmp_path / "save").contents
    slots = np.array([3, 17, 3])
    for slot, image in zip(slots, contents.images["pixels"].of_rows(slots), strict=True):
        assert np.array_equal(image[..., 0], steps["pixels"][slot, -1].numpy()) and image.shape[2] == 3
    assert page_of("frames", "", [Subject("", contents)]).count("data:image/png;base64,") == 10
    replay = recipes.uniform(10, 2)
    steps = numbered_steps(0, 4, done_every=4)
    pixels = torch.zeros(4, 500, 330, 3, dtype=torch.uint8)
    pixels[:, :4, 3:6], pixels[..., -1, :] = 100, 250
    replay.extend(steps.set("pixels", pixels))
    contents = look_at(replay)
    (image,) = contents.images["pixels"].of_rows(np.array([2]))
    assert image.shape == (125, 83, 3) and image[0, :3, 0].tolist() == [25, 50, 0] and image[5, -1, 0] == 125


@pytest.mark.slow
def test_every_camera_is_drawn_and_its_bytes_are_named(tmp_path: Path) -> None:
    replay = recipes.prioritized(30, 4, frame_stack=2, image_key=IMAGE_KEYS[1], seed=0)
    steps = frame_rows(stacks_of(range(10, 31), 2), (8, 8), done=True, key=IMAGE_KEYS[1])
    steps["arm", "map"] = torch.arange(20, dtype=torch.uint8).view(-1, 1, 1).expand(-1, 6, 7)  # stored with each row
    replay.extend(steps)
    replay.save(tmp_path / "save")
    contents = read(tmp_path / "save").contents
    assert same(contents, look_at(replay)) and list(contents.images) == ["pixels", "arm.wrist", "arm.map"]
    slots = np.array([3, 17, 3])
    for name, key in (("pixels", "pixels"), ("arm.wrist", WRIST)):
        found = contents.images[name].of_rows(slots)
        assert [image[..., 0].tolist() for image in found] == steps[key][slots, -1].tolist()
    assert [image[0, 0, 0] for image in contents.images["arm.map"].of_rows(slots)] == [3, 17, 3]
    #   the second camera shows one image for all even numbers, and two for each odd one from 11 to 29
    assert contents.layout["pixels"] == "stacks of uint8 [8, 8], 21 frames of 64 bytes, each stored once"
    assert contents.layout["arm.wrist"] == "stacks of uint8 [3, 5], 21 frames of 15 bytes, each stored once"
    page = page_of("frames", "", [Subject("", contents)])
    assert page.count("data:image/png;base64,") == 30 and "images (pixels, arm.wrist, arm.map)" in page
    #   a strip for each camera of the only episode, the narrow ones filled up
    assert pictures_of(contents)["film_strips"].shape == ((8 + 2) + (3 + 2) + (6 + 2), 10 * (8 + 2), 3)


def test_levels(tmp_path: Path) -> None:
    levels = LevelBuffer(levels=6, min_fill=1.0, seed=0)
    for number in range(9):
        levels.update(0, levels.next_level(actor=0), segment([number]), episode_done=True)
    levels.save(tmp_path)
    contents = read(tmp_path).contents
    assert isinstance(contents, LevelContents) and same(contents, look_at(levels)) and len(contents) > 3
    assert page_of("levels", "", [Subject("", contents)]).count("<svg") == 5
    again = LevelBuffer(levels=6, min_fill=1.0, seed=1)
    again.load(tmp_path)
    assert again.next_level(actor=1) == levels.next_level(actor=1)


def test_rows_in_several_chunk_files_of_which_a_changed_or_missing_one_is_refused(tmp_path: Path) -> None:
    replay = recipes.prioritized(capacity=30_000, batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 30_000, done_every=7).set("padding", torch.zeros(30_000, 50)))
    replay.save(tmp_path)
    *others, chunk = sorted(tmp_path.rglob("*.chunk"))
    assert others and same(read(tmp_path).contents, look_at(replay))
    flip_a_byte(chunk)
    with pytest.raises(DamagedFileError, match="truncated or changed since it was saved"):
        read(tmp_path)
    chunk.unlink()
    with pytest.raises(DamagedFileError, match="cannot be read"):
        read(tmp_path)


def test_a_forged_manifest_runs_no_code_and_is_refused_as_is_a_state_of_something_else(tmp_path: Path) -> None:
    recipes.uniform(10, 2).save(tmp_path)
    forge(tmp_path / "replay.json", built_by={"class": "os:system", "arguments": {"command": "touch forged"}})
    contents = read(tmp_path).contents  # the class is text here
    assert isinstance(contents, ReplayContents) and not (Path.cwd() / "forged").exists()
    (tmp_path / "replay.json").write_text("{}")
    with pytest.raises(DamagedFileError, match="is damaged"):
        read(tmp_path)
    write_state(tmp_path / "levels", {"kind": "LevelBuffer", "sampler": {}, "writer": {}})
    with pytest.raises(DamagedFileError, match="does not hold the state of a level buffer"):
        read(tmp_path / "levels")


def test_paths_without_a_save(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; give the directory of a saved buffer"):
        read(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="no saved buffer in"):
        read(tmp_path)
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(FileNotFoundError, match=r"There are last\.ckpt: give one of them"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder last\.UPDATES\.replay"):
        read(tmp_path / "last.ckpt")


def test_the_replay_beside_a_lightning_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    recipes.uniform(10, 2).save(tmp_path / "last.30.replay")
    recipes.uniform(20, 2).save(tmp_path / "best.30.replay")
    contents = read(tmp_path / "last.ckpt").contents
    assert isinstance(contents, ReplayContents) and contents.capacity == 10
    recipes.uniform(30, 2).save(tmp_path / "last.40-1.replay")
    assert [one.name for one in read_buffers(tmp_path / "last.ckpt")] == ["last.30.replay", "last.40-1.replay"]


def test_only_a_part_of_the_rows_is_in_memory(tmp_path: Path) -> None:
    rows = torch.arange(6 << 20).view(-1, 512)  # 48 MiB
    records, chunks = write_chunks(tmp_path, {"rows": rows}, {})
    located = locate_chunks(tmp_path, records, {one.name: one.fingerprint._asdict() for one in chunks})
    total = int(rows.sum())
    del rows
    tracemalloc.start()
    try:
        found = sum(int(piece.sum()) for _, piece in StoredRows(located["rows"]).pieces())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == total and peak < 30 << 20


@pytest.mark.slow
def test_reading_needs_neither_torchrl_nor_lightning_nor_matplotlib(tmp_path: Path) -> None:
    """Also where nobody reads the summary, as with ``| head -0``."""
    recipes.uniform(10, 2).save(tmp_path / "save")
    code = (
        "import sys\nfrom lightning_replay.lit.cli import main\n"
        f"main(['inspect', {str(tmp_path / 'save')!r}, '--output', {str(tmp_path / 'page.html')!r}])\n"
        "assert not {'torchrl', 'lightning', 'jsonargparse', 'matplotlib', 'ray'} & set(sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[3]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=root)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "page.html").exists()


def test_a_save_that_is_replaced_meanwhile_is_read_whole(tmp_path: Path) -> None:
    recipes.uniform(10, 2).save(tmp_path / "save")
    recipes.uniform(20, 2).save(tmp_path / "other")
    manifest = json.loads((tmp_path / "other" / "replay.json").read_text())
    shutil.copytree(tmp_path / "other" / manifest["data"], tmp_path / "save" / manifest["data"])
    shutil.copy(tmp_path / "other" / "replay.json", tmp_path / "save" / "replay.json")
    contents = read(tmp_path / "save").contents
    assert isinstance(contents, ReplayContents) and contents.capacity == 20


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    recipes.uniform(10, 2).save(tmp_path / "save")
    for file in ("replay.json", f"{next((tmp_path / 'save').glob('*-*')).name}/values.json"):
        shutil.copytree(tmp_path / "save", tmp_path / "copy")
        (tmp_path / "copy" / file).unlink()
        os.mkfifo(tmp_path / "copy" / file)
        with pytest.raises(DamagedFileError, match="is no regular file"):
            read(tmp_path / "copy")
        shutil.rmtree(tmp_path / "copy")


def test_more_rows_than_are_stored_are_refused() -> None:
    replay = recipes.uniform(10, 2)
    replay.extend(numbered_steps(0, 5))
    with present_state(replay) as state:
        for length in (2_000_000_000, -1):
            with pytest.raises(ValueError, match="rows are claimed, more than are stored"):
                contents_of({**state, "length": length, "storage": {**state["storage"], "length": length}}, None)


def test_the_command_escapes_names_and_refuses_a_page_it_cannot_write(tmp_path: Path, capsys) -> None:
    replay = recipes.uniform(10, 2)
    replay.extend(numbered_steps(0, 4).set("a\x1b[2Jb", torch.zeros(4)))
    replay.save(tmp_path / "save")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        inspect_save([str(tmp_path / "save"), f"--output={tmp_path / 'file' / 'page.html'}"])
    shown = capsys.readouterr()
    assert end.value.code == 2 and len(shown.err.splitlines()) == 1 and "which cannot be written" in shown.err
    assert "a\\x1b[2Jb" in shown.out and "\x1b" not in shown.out
