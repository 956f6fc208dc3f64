# SPDX-License-Identifier: Apache-2.0
"""The replay beside the checkpoint: written, removed, moved and restored with it; a resumed run draws on as it was."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_replay.lit import ReplayDataModule
from lightning_replay.lit.checkpoint_files import replays_beside
from lightning_replay.saving import DamagedFileError
from tests.unit.lit import stopped_runs
from tests.unit.lit.toys import Tiny, make_replay, make_trainer

make_data = partial(stopped_runs.make_data, prioritized=True)


class Peek(L.Callback):
    """At the start of training keeps the replay's contents and, on a copy, its next ten draws."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer, pl_module) -> None:
        data = trainer.datamodule
        self.contents = data.replay[:].clone()
        self.clocks = (data.env_steps_done, data.updates_done)
        self.generator = torch.get_rng_state()
        self.draws = next_draws(data, self.directory / "peek")


def next_draws(data: ReplayDataModule, directory: Path) -> list[list[int]]:
    """The next ten draws, made by a second buffer so that the first does not notice."""
    data.replay.save(directory)
    again = make_replay(data.replay.is_prioritized)
    again.load(directory)
    return [again.sample()["index"].tolist() for _ in range(10)]


class SaveAt(L.Callback):
    """Saves by hand after a given update, and keeps what the replay was then."""

    def __init__(self, update: int, path: Path) -> None:
        self.update, self.path = update, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.datamodule.updates_done == self.update:
            trainer.save_checkpoint(self.path)
            self.contents = trainer.datamodule.replay[:].clone()
            self.generator = torch.get_rng_state()
            self.draws = next_draws(trainer.datamodule, self.path.parent / "other")


def saved_at(path: Path, update: int = 7, **options) -> Path:
    """A checkpoint of a run after some updates, and its replay beside it."""
    make_trainer(path.parent, [SaveAt(update, path)]).fit(Tiny(), datamodule=make_data(**options))
    return path


def resume(path: Path, callbacks=(), **options) -> tuple[Tiny, ReplayDataModule]:
    agent, data = Tiny(), make_data(**options)
    make_trainer(path.parent, callbacks).fit(agent, datamodule=data, ckpt_path=path)
    return agent, data


# update 30 ends an epoch, 7 lies within one
@pytest.mark.parametrize(("update", "prioritized"), [(7, False), (30, True)])
def test_resume_restores_contents_counters_generators_and_the_next_draws(tmp_path: Path, update, prioritized) -> None:
    save, peek = SaveAt(update, tmp_path / "by_hand.ckpt"), Peek(tmp_path)
    make_trainer(tmp_path, [save]).fit(Tiny(), datamodule=make_data(prioritized=prioritized))
    torch.manual_seed(123)
    agent, data = resume(save.path, [peek], prioritized=prioritized, seed=99)
    assert peek.clocks[1] == update
    assert peek.draws == save.draws and torch.equal(peek.generator, save.generator)
    for key in peek.contents.keys(True, True):
        assert torch.equal(peek.contents[key], save.contents[key]), key
    assert len(agent.seen) == 40 - update
    assert (data.env_steps_done, data.updates_done, data.trainer.global_step) == (60, 40, 40)
    assert len(data.replay) == 60


def checkpoints_in(directory: Path) -> tuple[list[str], list[str]]:
    names = sorted(path.name for path in directory.iterdir())
    return [n for n in names if n.endswith(".ckpt")], [n for n in names if n.endswith(".replay")]


def test_replays_come_and_go_with_model_checkpoints(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=2, monitor="step", mode="max")
    make_trainer(tmp_path, [keep]).fit(Tiny(), datamodule=make_data())
    assert checkpoints_in(tmp_path) == (["step=35.ckpt", "step=40.ckpt"], ["step=35.35.replay", "step=40.40.replay"])


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_checkpoints_resume(tmp_path: Path, save_last) -> None:
    keep = ModelCheckpoint(tmp_path / "run", "{step}", every_n_train_steps=7, save_last=save_last)
    make_trainer(tmp_path, [keep]).fit(Tiny(), datamodule=make_data())
    files, replays = checkpoints_in(tmp_path / "run")
    assert files == ["last.ckpt", "step=35.ckpt"]
    if save_last is True:
        assert replays == ["last.35.replay", "step=35.35.replay"]
        first, second = (next((tmp_path / "run" / name).glob("*/*.safetensors")) for name in replays)
        assert first.stat().st_ino == second.stat().st_ino  # the same save, linked
    agent, keep = Tiny(), ModelCheckpoint(tmp_path / "run", "{step}", every_n_train_steps=7, save_last=save_last)
    make_trainer(tmp_path, [keep]).fit(agent, datamodule=make_data(), ckpt_path=tmp_path / "run" / "last.ckpt")
    assert len(agent.seen) == 5


def test_the_folder_can_be_moved_and_the_file_renamed(tmp_path: Path) -> None:
    saved_at(tmp_path / "run" / "by_hand.ckpt")
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    path = (tmp_path / "elsewhere" / "by_hand.ckpt").rename(tmp_path / "elsewhere" / "renamed.ckpt")
    assert len(resume(path)[0].seen) == 33


def killed_save(trainer: L.Trainer, path: Path) -> None:
    """Interrupted after the replay was written, before the checkpoint."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer.strategy.checkpoint_io.wrapped, "save_checkpoint", Mock(side_effect=KeyboardInterrupt))
        trainer.save_checkpoint(path)


def test_overwriting_leaves_one_replay_and_a_killed_overwrite_leaves_the_old_one(tmp_path: Path) -> None:
    data, path = make_data(), tmp_path / "run" / "same.ckpt"

    class Kill(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if data.updates_done in (5, 9):
                trainer.save_checkpoint(path)
            if data.updates_done == 12:
                killed_save(trainer, path)
                trainer.should_stop = True

    make_trainer(tmp_path, [Kill()]).fit(Tiny(), datamodule=data)
    assert [p.name for p in sorted(replays_beside(path))] == ["same.12.replay", "same.9.replay"]
    peek = Peek(tmp_path)
    resume(path, [peek])
    assert peek.clocks[1] == 9


def test_an_overwrite_at_the_same_update_that_is_killed_leaves_the_old_replay(tmp_path: Path) -> None:
    """Steps are collected in between, so that the second replay is another one."""
    data, path = make_data(), tmp_path / "run" / "end.ckpt"
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=data)
    trainer.save_checkpoint(path)
    data.replay.sample()
    killed_save(trainer, path)
    assert trainer.strategy.checkpoint_io.load_checkpoint(path), "the file and its replay belong together"
    trainer.save_checkpoint(path)
    assert checkpoints_in(tmp_path / "run") == (["end.ckpt"], ["end.40-1.replay"])


def test_a_missing_replay_is_said(tmp_path: Path) -> None:
    path = saved_at(tmp_path / "run" / "by_hand.ckpt")
    shutil.rmtree(path.with_name("by_hand.7.replay"))
    with pytest.raises(FileNotFoundError, match="saved with the replay by_hand.7.replay, which is not beside it"):
        resume(path)


@pytest.mark.parametrize("update", [7, 9])  # under its own name too: what a save is recognised by is in the save
def test_a_checkpoint_beside_the_replay_of_another_run_is_refused_before_the_agent_is_restored(
    tmp_path: Path, update: int
) -> None:
    mine, other = saved_at(tmp_path / "mine" / "a.ckpt"), saved_at(tmp_path / "other" / "a.ckpt", update)
    shutil.rmtree(mine.with_name("a.7.replay"))
    shutil.copytree(other.with_name(f"a.{update}.replay"), mine.with_name("a.7.replay"))
    agent = Tiny()
    weight = agent.weight.clone()
    with pytest.raises(DamagedFileError, match=r"a.ckpt was saved with another replay than the one in .*a.7.replay"):
        make_trainer(mine.parent).fit(agent, datamodule=make_data(), ckpt_path=mine)
    assert torch.equal(agent.weight, weight), "nothing was restored"


def test_of_several_replays_beside_a_checkpoint_its_own_is_found(tmp_path: Path) -> None:
    path = saved_at(tmp_path / "a.ckpt")
    shutil.move(tmp_path / "a.7.replay", tmp_path / "a.70.replay")
    shutil.copytree(saved_at(tmp_path / "other" / "a.ckpt").with_name("a.7.replay"), tmp_path / "a.7.replay")
    assert resume(path)[1].updates_done == 40


def test_the_next_save_removes_what_killed_saves_left_and_nothing_else(tmp_path: Path) -> None:
    """A replay is marked as unfinished until the checkpoint that names it is written."""
    path = saved_at(tmp_path / "run" / "a.ckpt")
    kept = ["a.7.replay", "b.3.replay", "mine"]
    shutil.copytree(path.with_name("a.7.replay"), path.with_name("b.3.replay"))
    for left in ("a.8.replay", "c.5.replay"):  # of a checkpoint that was written over, and of one never written
        shutil.copytree(path.with_name("a.7.replay"), path.with_name(left))
        (path.with_name(left) / ".unfinished").touch()
    (path.with_name("a.7.replay") / ".unfinished").touch()  # killed after the checkpoint, before the mark was removed
    path.with_name("mine").mkdir()
    saved_at(tmp_path / "run" / "d.ckpt", 9)
    folders = sorted(one.name for one in path.parent.iterdir() if one.is_dir() and one.name != "other")
    assert folders == sorted([*kept, "d.9.replay"])
    assert resume(path)[1].updates_done == 40


def test_weights_only_saves_no_replay(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "run", "{step}", every_n_train_steps=20, save_weights_only=True)
    make_trainer(tmp_path, [keep]).fit(Tiny(), datamodule=make_data())
    assert checkpoints_in(tmp_path / "run")[1] == []


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[L.Trainer, Path]:
    """A trainer whose fit has ended, and a checkpoint saved by hand after it."""
    folder = tmp_path_factory.mktemp("ended")
    trainer = make_trainer(folder)
    trainer.fit(Tiny(), datamodule=make_data())
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer, folder / "end.ckpt"


def test_saving_by_hand_after_the_fit_and_a_longer_run(ended) -> None:
    agent, data = resume(ended[1], env_steps=80)
    assert len(agent.seen) == 20 and data.env_steps_done == len(data.replay) == 80


def test_validating_a_checkpoint_leaves_the_replay_alone(ended, tmp_path: Path) -> None:
    data = make_data()
    make_trainer(tmp_path).validate(Tiny(), datamodule=data, ckpt_path=ended[1], verbose=False)
    assert len(data.replay) == 0


def test_overwriting_at_the_same_update_keeps_the_replay(ended) -> None:
    ended[0].save_checkpoint(ended[1])
    assert checkpoints_in(ended[1].parent) == (["end.ckpt"], ["end.40.replay"])


class Sized(Tiny):
    def __init__(self, width=np.float64(3)) -> None:  # noqa: B008
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_that_are_not_loaded_again_are_named_at_the_save(tmp_path: Path) -> None:
    save = SaveAt(40, tmp_path / "by_hand.ckpt")
    with pytest.warns(UserWarning, match=r"holds hyper_parameters.width \(float64\), which fit.*do not load unless"):
        make_trainer(tmp_path, [save]).fit(Sized(), datamodule=make_data())
    data = make_data(env_steps=64)
    make_trainer(tmp_path).fit(Sized(3.0), datamodule=data, ckpt_path=save.path, weights_only=False)
    assert data.updates_done == 44
