# SPDX-License-Identifier: Apache-2.0
"""Every function with a path uploads to a URL, downloads from it, or refuses it; none creates a folder ``s3:``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

import lightning_replay
import rllib_ext
from lightning_replay import load_replay, recipes, save_replay
from lightning_replay.datasets import from_d4rl, from_lerobot
from lightning_replay.inspection import command
from lightning_replay.inspection.compare import draw_inspection, inspect_buffers
from lightning_replay.inspection.plotting import make_figure, save_figure
from lightning_replay.inspection.saves import read_buffers
from lightning_replay.levels import LevelBuffer, LevelSet
from lightning_replay.lit import InspectBuffer, ReplayCheckpoint
from lightning_replay.lit.pictures import (
    LearningCurve,
    LevelCurriculum,
    draw_learning_curves,
    draw_level_curriculum,
    draw_score_against_staleness,
)
from lightning_replay.replay import Replay
from lightning_replay.samplers import PrioritizedSampler
from lightning_replay.saves import FrozenReplay, read_replay, save_id, verify_replay
from lightning_replay.saving import DamagedFileError, load_state, read_state, write_state
from lightning_replay.saving.folders import Folder
from lightning_replay.storage import ObservationStorage, PackedStorage
from lightning_replay.storage.frames import FrameStorage
from lightning_replay.storage.ragged import RaggedStorage
from lightning_replay.writers import FirstInFirstOutWriter
from rllib_ext.levels.server import RemoteLevels
from tests.transitions import numbered_steps

URL = "memory://bucket/place"


@pytest.fixture(autouse=True)
def nothing_is_created_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    assert not [*tmp_path.iterdir()]


def buffer(recipe: Any = recipes.uniform) -> Replay:
    replay = recipe(capacity=20, batch_size=4, seed=0)
    replay.extend(numbered_steps(0, 12))
    return replay


def mixed() -> Any:
    return recipes.mixed(buffer(), buffer(), batch_size=4)


def levels() -> LevelBuffer:
    return LevelBuffer(levels=10, seed=0)


def storage() -> PackedStorage:
    found = PackedStorage(20)
    found.set(torch.arange(4), numbered_steps(0, 4))
    return found


def remote_levels() -> RemoteLevels:
    found = RemoteLevels.__new__(RemoteLevels)  # without its actor
    found.state_dict = levels().state_dict  # type: ignore[method-assign]
    return found


def torchrl_buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=storage(), sampler=PrioritizedSampler(20), batch_size=4)


Use = Callable[[Any], Any]

#: What writes to a URL, and what reads it from there.
UPLOADED: dict[str, tuple[Use, Use]] = {
    "saves.save_replay": (lambda path: save_replay(buffer(), path), load_replay),
    "saves.FrozenReplay.save": (lambda path: FrozenReplay(buffer()).save(path), verify_replay),
    "replay.Replay.save": (lambda path: buffer().save(path), lambda path: buffer().load(path)),
    "replay.Replay.dumps": (lambda path: buffer().dumps(path), lambda path: buffer().loads(path)),
    "mixed_replay.MixedReplay.save": (lambda path: mixed().save(path), lambda path: mixed().load(path)),
    "levels.selector.LevelSelector.save": (lambda path: levels().save(path), lambda path: levels().load(path)),
    "levels.level_set.LevelSet.save": (lambda path: LevelSet([1, 2]).save(path), LevelSet.load),
    "levels.server.RemoteLevels.save": (lambda path: remote_levels().save(path), lambda path: levels().load(path)),
    "parts.PartHooks.dumps": (
        lambda path: PrioritizedSampler(20).dumps(path),
        lambda path: PrioritizedSampler(20).loads(path),
    ),
    "writers": (
        lambda path: FirstInFirstOutWriter().dumps(path),
        lambda path: FirstInFirstOutWriter().loads(path),
    ),
    "storage.packed.PackedStorage.dumps": (
        lambda path: storage().dumps(path),
        lambda path: PackedStorage(20).loads(path),
    ),
    "saving.states.write_state": (lambda path: write_state(path, {"a": 1}), read_state),
    "saves.save_id": (lambda path: buffer().save(path), save_id),
    "saves.read_replay": (lambda path: buffer().save(path), read_replay),
    "saving.states.load_state": (
        lambda path: levels().save(path),
        lambda path: load_state(path, levels().load_state_dict),
    ),
    "inspection.compare.inspect_buffers": (
        lambda path: buffer().save(path),
        lambda path: inspect_buffers({"one": path}),
    ),
}

REFUSED: dict[str, Use] = {
    "storage.packed.PackedStorage.__init__": lambda path: PackedStorage(4, memmap=path),
    "storage.observations_once.ObservationStorage.__init__": lambda path: ObservationStorage(4, memmap=path),
    "storage.frames.FrameStorage.__init__": lambda path: FrameStorage(8, 2, frame_capacity=8, memmap=path),
    "storage.ragged.RaggedStorage.__init__": lambda path: RaggedStorage(8, ["x"], element_capacity=8, memmap=path),
    "recipes": lambda path: recipes.uniform(4, 2, memmap=path),
    "loading.load_replay": lambda path: load_replay(saved(), memmap=path),
    "saves.save_replay": lambda path: save_replay(buffer(), saved(), previous=path),
    "inspection.saves.read_buffers": lambda path: [*read_buffers(path)],
    "inspection.plotting.save_figure": lambda path: save_figure(make_figure("it")[0], path),
    "inspection.compare.draw_inspection": lambda path: draw_inspection(inspect_buffers({"one": buffer()}), path),
    "lit.pictures.draw_learning_curves": lambda path: draw_learning_curves({"one": [(1, 1.0)]}, path),
    "lit.pictures.draw_level_curriculum": lambda path: draw_level_curriculum([(1, {0.5: 1.0})], path),
    "lit.pictures.draw_score_against_staleness": lambda path: draw_score_against_staleness(
        TensorDict(dict.fromkeys(("probability", "staleness", "score"), torch.ones(2)), [2]), path
    ),
    "lit.pictures.InspectBuffer.__init__": lambda path: InspectBuffer(path=path).setup(trainer(), None, "fit"),
    "lit.pictures.LearningCurve.__init__": lambda path: LearningCurve(path).setup(trainer(), None, "fit"),
    "lit.pictures.LevelCurriculum.__init__": lambda path: LevelCurriculum(path=path).setup(trainer(), None, "fit"),
    "log_dir": lambda path: LearningCurve().setup(trainer(path), None, "fit"),
    "datasets.from_d4rl": from_d4rl,
    "datasets.from_lerobot": from_lerobot,
    "config_file.load_config": rllib_ext.load_config,
}


def saved() -> str:
    buffer().save("memory://bucket/saved")
    return "memory://bucket/saved"


def trainer(log_dir: Any = None) -> Any:
    return SimpleNamespace(log_dir=log_dir)


@pytest.mark.parametrize("name", UPLOADED)
def test_a_save_is_uploaded_and_read_from_its_url(name: str) -> None:
    write, read = UPLOADED[name]
    write(URL)
    write(URL)  # over the save before
    assert len(fsspec.filesystem("memory").ls("/bucket/place")) == 2  # a manifest and its data
    read(URL)


@pytest.mark.parametrize("name", UPLOADED)
@pytest.mark.parametrize("url", ["s3:/bucket/place", Path("s3://bucket/place"), Path("memory://bucket/place")])
def test_a_url_that_lost_a_slash_is_refused(name: str, url: Any) -> None:
    for use in UPLOADED[name]:
        with pytest.raises(ValueError, match="must be a folder, or a URL as text|it must be a path of this machine"):
            use(url)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("url", ["s3://bucket/place", URL, "C+d.e-1:///x", Path("s3://bucket/place")])
def test_a_url_is_refused_where_only_a_local_path_is_accepted(name: str, url: Any) -> None:
    with pytest.raises(ValueError, match="(s3:/|memory:/|C.d.e-1:/).*it must be a"):
        REFUSED[name](url)


def test_a_buffer_of_torchrl_creates_no_folder_for_a_url() -> None:
    with pytest.raises(FileNotFoundError, match="s3:/bucket/place"):
        torchrl_buffer().dumps("s3://bucket/place")


@pytest.mark.parametrize("url", ["s3://bucket/place", URL])
def test_the_command_that_inspects_refuses_urls(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([url], [str(tmp_path), "--output", f"{url}/page.html"]):
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
        assert "must be a path of this machine; copy files from and to a URL yourself" in capsys.readouterr().err


def test_the_folder_of_checkpoints_is_no_url_without_its_slash() -> None:
    with pytest.raises(ValueError, match="dirpath is 's3:/bucket/run'; it must be a folder, or a URL as text"):
        ReplayCheckpoint(Path("s3://bucket/run"))


@pytest.mark.parametrize("url", ["s3:/bucket/place", Path("s3://bucket/place")])
def test_a_sharded_replay_refuses_a_url_that_lost_a_slash(url: Any) -> None:
    with pytest.raises(ValueError, match="must be a folder, or a URL as text"):
        Folder.of_user(url)


@pytest.mark.parametrize("use", [lambda: Folder.of_user(URL), lambda: Folder.of_user("nothing://bucket")])
def test_a_file_system_that_arrow_lacks_is_refused(use: Any) -> None:
    with pytest.raises(ValueError, match="nrecognized filesystem type in URI: (memory|nothing)://bucket"):
        use()


@pytest.mark.parametrize("path", ["C:/data", "C:\\data", "/tmp/s3:/x", "a:b/c", "runs/12:30/x", "./s3://x"])
def test_paths_of_this_machine_are_no_urls(path: str) -> None:
    assert lightning_replay.options.checked_local_path("path", path) == Path(path)


def test_names_that_lead_out_of_a_save_at_a_url_are_refused(tmp_path: Path) -> None:
    write_state(URL, {"a": 1})
    memory = fsspec.filesystem("memory")
    (data,) = memory.glob("/bucket/place/state-*")
    key = f"{data}/{'../' * 30}{tmp_path}/escaped"
    memory.store[key] = MemoryFile(memory, key, b"out")
    with pytest.raises(DamagedFileError, match="memory://bucket/place/state-.* holds a name that leads out of it"):
        read_state(URL)


#: Functions that are given a folder by those of the tables above.
WITHIN = {
    *("lit.checkpoint_files.CheckedCheckpointIO", "lit.checkpoint_files.ReplayCheckpointIO"),
    *("lit.checkpoint_files.check_checkpoint", "lit.checkpoint_files.replays_beside"),
    *("lit.checkpoint_files.saved_replay", "lit.replay_data.ReplayDataModule", "lit.checkpoints.ReplayCheckpoint"),
    *("free_memory.allocate_rows", "recipes.storage_for", "storage.frame_pool.FramePool"),
    *("options.checked_local_path", "saving.directory.local_folder", "saving.files.check_writable"),
    *("saving.folders.Folder", "saving.states.refusing_other_states", "sharded.replay.ShardedReplay"),
    *("checkpoints.CheckpointedAlgorithm", "config_file.read_sections"),
}


def functions_with_paths() -> Iterator[str]:
    for package in (lightning_replay, rllib_ext):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            for name, owner in vars(importlib.import_module(found.name)).items():
                if not name.startswith("_") and getattr(owner, "__module__", None) == found.name:
                    yield from (f"{found.name.partition('.')[2]}.{one}" for one in of_owner(name, owner))


def of_owner(name: str, owner: Any) -> Iterator[str]:
    members = {name: owner}
    if inspect.isclass(owner):
        public = {key: value for key, value in vars(owner).items() if not key.startswith("_") or key == "__init__"}
        members = {f"{name}.{key}": getattr(value, "__func__", value) for key, value in public.items()}
    for place, function in members.items():
        if inspect.isfunction(inspect.unwrap(function) if callable(function) else function):
            given = inspect.signature(function).parameters.values()
            if any(map(is_path, given)):
                yield place


def is_path(parameter: inspect.Parameter) -> bool:
    kind = str(parameter.annotation)
    return "str | Path" in kind or parameter.name == "memmap" or (parameter.name == "path" and kind == "Path")


def test_every_function_with_a_path_is_in_one_of_these_tables() -> None:
    listed = {*UPLOADED, *REFUSED, *WITHIN}
    listed |= {name.replace("save", "load").replace("dump", "load").replace("write", "read") for name in UPLOADED}
    missing = {name for name in functions_with_paths() if name not in listed and name.rpartition(".")[0] not in WITHIN}
    assert missing == {"saves.verify_replay", "saving.files.sync"} - {*listed}
