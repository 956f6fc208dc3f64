# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on other file systems of fsspec: uploaded, resumed, removed; a failed upload leaves the save before."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.options import MissingExtraError
from lightning_replay.saves import save_id, verify_replay
from lightning_replay.saving import DamagedFileError
from tests.transitions import numbered_steps
from tests.unit.lit.test_replay_checkpoint import run
from tests.unit.lit.toys import Tiny, WatchedCheckpoint, make_data, make_replay, make_trainer

# A resumed run may have other callbacks than the one that was saved.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path) -> Iterator[str]:
    yield "memory://bucket/run" if request.param == "memory" else f"file://{tmp_path}/remote/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def names_in(url: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in filesystem.ls(path, detail=False))


def prioritized(**options):
    return make_data(make_replay(prioritized=True), **options)


@pytest.mark.parametrize("url", ["memory"], indirect=True)  # Lightning takes file:// for a relative path
def test_a_run_is_resumed_from_another_file_system(tmp_path, url: str) -> None:
    """Best and last are there with their replays; the resumed run has the draws of one with local files."""
    scores = (99.0, 9.0, 2.0, 3.0, 2.0, 5.0)
    keep = WatchedCheckpoint(url)
    run(tmp_path, *scores, keep=keep, data=prioritized())
    assert names_in(url) == ["best.1.replay", "best.ckpt", "last.40.replay", "last.ckpt"]
    agents = []
    for folder, path in ((url, "last"), (tmp_path / "run", tmp_path / "run" / "last.ckpt")):
        if folder != url:
            run(tmp_path, *scores, data=prioritized())
        agent, data = Tiny(), prioritized(env_steps=80, seed=7)
        make_trainer(tmp_path, [WatchedCheckpoint(folder)]).fit(agent, datamodule=data, ckpt_path=path)
        assert data.updates_done == 60 and len(data.replay) == 80
        agents.append(agent)
    assert agents[0].seen == agents[1].seen and len(agents[0].seen) == 20
    assert names_in(url) == ["best.1.replay", "best.ckpt", "last.60.replay", "last.ckpt"]


def test_a_failed_upload_leaves_the_save_before(tmp_path, url: str, monkeypatch) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=prioritized())
    trainer.save_checkpoint(f"{url}/end.ckpt")
    before = names_in(url)
    filesystem = type(fsspec.core.url_to_fs(url)[0])
    trainer.datamodule.replay.sample()
    opens, opened = filesystem._open, []

    def failing(self, path, mode="rb", **options):
        opened.append(path)
        if "w" in mode and len(opened) > 1:
            raise OSError("the network is gone")
        return opens(self, path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "_open", failing)
        with pytest.raises(OSError, match="the network is gone"):
            trainer.save_checkpoint(f"{url}/end.ckpt")
    assert any("end.40-1.replay" in path for path in opened) and names_in(url) == before
    data = prioritized(env_steps=64)
    make_trainer(tmp_path).fit(Tiny(), datamodule=data, ckpt_path=f"{url}/end.ckpt")
    assert data.updates_done == 44
    # A folder that no checkpoint names may be the user's: it is never loaded and stays.
    other = fsspec.core.url_to_fs(url)[0]
    other.makedirs(f"{url}/end.41.replay")
    other.pipe_file(f"{url}/end.41.replay/replay.json", b"{")
    trainer.save_checkpoint(f"{url}/end.ckpt")
    assert names_in(url) == ["end.40-1.replay", "end.41.replay", "end.ckpt"]
    trainer.strategy.remove_checkpoint(f"{url}/end.ckpt")
    assert names_in(url) == ["end.41.replay"]


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("where", ["local", "memory"])
def test_files_of_the_user_beside_a_checkpoint_stay(where: str, tmp_path: Path) -> None:
    place = f"{tmp_path}/run" if where == "local" else "memory://bucket/mine"
    filesystem, root = fsspec.core.url_to_fs(place)
    mine = {
        *("end.7.replay/model.ckpt", "end.40.replay/replay.json", "end.41-1.replay/values.json", "other.40.replay/x"),
        *("end.replay/notes.txt", "end.ckpt.bak"),
    }
    for name in mine:
        filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(f"{root}/{name}", b"mine")
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=prioritized())
    with filesystem.open(f"{root}/end.ckpt", "wb") as file:
        torch.save({"ReplayDataModule": {"replay": "end.7.replay"}, "trap": Trap(tmp_path / "trapped")}, file)
    for _ in range(2):
        trainer.save_checkpoint(f"{place}/end.ckpt")
        trainer.datamodule.replay.sample()
    with filesystem.open(f"{root}/end.ckpt", "wb") as file:  # names a folder that its save did not write
        torch.save({"ReplayDataModule": {"replay": "end.7.replay"}}, file)
    make_trainer(tmp_path).fit(Tiny(), datamodule=(data := prioritized()))
    for one in (data.trainer, trainer):
        one.save_checkpoint(f"{place}/end.ckpt")
        one.strategy.remove_checkpoint(f"{place}/end.ckpt")
    assert all(filesystem.cat_file(f"{root}/{name}") == b"mine" for name in mine)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_no_link_is_followed_and_no_pipe_is_read_beside_a_checkpoint(place: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    there, mine, outside = tmp_path / "there", tmp_path / "mine", tmp_path / "outside"
    mine.mkdir()
    for stem in ("pipe", "mark", "trap"):
        (there / f"{stem}.1.replay").mkdir(parents=True)
    for name in ("link.1.replay", "link.40.replay"):
        (there / name).symlink_to(mine)
    (there / "pipe.1.replay" / ".unfinished").touch()
    (there / "mark.1.replay" / ".unfinished").symlink_to(outside)
    os.mkfifo(there / "pipe.ckpt")
    for stem in ("link", "mark"):
        torch.save({"ReplayDataModule": {"replay": f"{stem}.1.replay"}}, there / f"{stem}.ckpt")
    torch.save({"ReplayDataModule": {"replay": "trap.1.replay"}, "trap": Trap(outside)}, there / "trap.ckpt")
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=prioritized())
    for stem in ("link", "mark", "trap", "pipe"):
        trainer.save_checkpoint(f"{place.format(there)}/{stem}.ckpt")
    assert not [*mine.iterdir()]
    assert not outside.exists()
    assert (there / "link.40-1.replay" / "replay.json").is_file()


def test_other_and_missing_replays_are_refused(tmp_path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=prioritized())
    trainer.save_checkpoint("memory://bucket/a.ckpt")
    filesystem = fsspec.filesystem("memory")
    (chunk,) = filesystem.glob("/bucket/a.40.replay/*/tensors.safetensors")
    content = bytearray(filesystem.cat_file(chunk))
    content[-1] ^= 1
    filesystem.pipe_file(chunk, bytes(content))
    for message, kind in (("changed since it was saved", DamagedFileError), ("not beside it", FileNotFoundError)):
        agent = Tiny()
        with pytest.raises(kind, match=message):
            make_trainer(tmp_path).fit(agent, datamodule=prioritized(), ckpt_path="memory://bucket/a.ckpt")
        if kind is DamagedFileError:
            filesystem.rm("/bucket/a.40.replay", recursive=True)
    trainer.datamodule.replay.sample()
    trainer.save_checkpoint("memory://bucket/b.ckpt")
    filesystem.mv("/bucket/b.40.replay", "/bucket/a.40.replay", recursive=True)
    with pytest.raises(DamagedFileError, match="checkpoint memory://bucket/a.ckpt was saved with another replay"):
        make_trainer(tmp_path).fit(Tiny(), datamodule=prioritized(), ckpt_path="memory://bucket/a.ckpt")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_replays_are_saved_to_and_loaded_from_urls(url: str) -> None:
    replay = recipes.prioritized(20, 4, seed=0)
    replay.extend(numbered_steps(0, 12))
    for _ in range(2):  # the second save replaces the first
        replay.sample()
        save_replay(replay, f"{url}/buffer")
        assert verify_replay(f"{url}/buffer")["length"] == 12
    assert len(names_in(f"{url}/buffer")) == 2
    again, other = load_replay(f"{url}/buffer"), recipes.prioritized(20, 4, seed=3)
    other.load(f"{url}/buffer")
    drawn = replay.sample()["index"]
    assert torch.equal(again.sample()["index"], drawn) and torch.equal(other.sample()["index"], drawn)
    with pytest.raises(FileNotFoundError, match=f"no saved replay buffer in {url}/elsewhere: "):
        load_replay(f"{url}/elsewhere")


def test_the_id_of_a_save_is_read_from_its_url_without_its_rows(url: str, monkeypatch) -> None:
    replay = recipes.uniform(20, 4, seed=0)
    replay.extend(numbered_steps(0, 12))
    save_replay(replay, f"{url}/buffer")
    filesystem, path = fsspec.core.url_to_fs(f"{url}/buffer")
    manifest = json.loads(filesystem.cat_file(f"{path}/replay.json"))
    opens, read = type(filesystem)._open, []

    def noting(self, path, *arguments, **options):
        read.append(path.rpartition("/")[2])
        return opens(self, path, *arguments, **options)

    monkeypatch.setattr(type(filesystem), "_open", noting)
    assert save_id(f"{url}/buffer") == manifest["id"]
    assert {*read} == {"replay.json"}


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("s3://bucket/run", MissingExtraError, r"s3://bucket/run needs s3fs: Install s3fs to access S3"),
        ("gs://bucket/run", MissingExtraError, r"gs://bucket/run needs gcsfs: Please install gcsfs"),
        (
            "foo://bucket/run",
            ValueError,
            r"foo://bucket/run cannot be used: Protocol not known: foo. Give a folder, or",
        ),
    ],
)
def test_packages_and_protocols_that_are_missing_are_named(monkeypatch, url: str, kind, message: str) -> None:
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    replay = recipes.uniform(20, 4, seed=0)
    for use in (replay.save, replay.load, save_id):
        with pytest.raises(kind, match=f"^{message}"):
            use(url)


def test_without_pyarrow_its_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "lightning_replay.saving.folders")
    with pytest.raises(MissingExtraError, match=r"needs pyarrow, .*lightning-replay\[remote\]"):
        save_id("memory://bucket/run")
