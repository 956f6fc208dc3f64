# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by a thread: equal to those that training waits for, whatever changes while they are written."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage

from lightning_replay import Replay, load_replay, recipes
from lightning_replay.lit import ReplayCheckpoint
from lightning_replay.lit.checkpoint_files import ReplayCheckpointIO
from lightning_replay.saves import FrozenReplay
from lightning_replay.saving import chunks
from tests.transitions import numbered_steps
from tests.unit.lit.level_toys import Valuer
from tests.unit.lit.level_toys import make_data as make_level_data
from tests.unit.lit.test_replay_checkpoint import run, updates_in
from tests.unit.lit.toys import Tiny, WatchedCheckpoint, make_data, make_replay, make_trainer

# A resumed run may have other callbacks than the one that was saved.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using")


def prioritized(**options):
    return make_data(make_replay(prioritized=True), **options)


class Slow:
    """Lets no chunk of a replay be written before :attr:`may_write` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, store = threading.Event(), chunks._store

        def slow(*arguments):
            assert self.may_write.wait(20)
            return store(*arguments)

        monkeypatch.setattr(chunks, "_store", slow)


class At(L.Callback):
    """Calls a function after an update."""

    def __init__(self, update: int, call) -> None:
        self.update, self.call = update, call

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.datamodule.updates_done == self.update:
            self.call(trainer)


def test_a_resume_equals_that_of_a_save_that_training_waits_for(tmp_path: Path, monkeypatch) -> None:
    """A run that is killed after 25 updates: the save of update 15 was begun then, and written after update 24."""
    agents, slow = [], Slow(monkeypatch)
    for background in (True, False):
        slow.may_write.clear() if background else slow.may_write.set()
        folder = tmp_path / str(background)
        keep = WatchedCheckpoint(folder / "run", monitor=None, every_n_updates=15, background=background)

        def stop(trainer: L.Trainer, folder: Path = folder) -> None:
            (folder / "killed").mkdir()
            for file in (folder / "run").glob("*.ckpt"):
                file.rename(folder / "killed" / file.name)
            for saved in (folder / "run").glob("*.replay"):
                saved.rename(folder / "killed" / saved.name)

        def write(trainer: L.Trainer) -> None:
            slow.may_write.set()
            trainer.strategy.checkpoint_io.wait()

        calls = [At(24, write), At(25, stop)]
        run(folder, keep=keep, data=prioritized(), more=calls)
        agent, data = Tiny(), prioritized(seed=9)
        make_trainer(folder).fit(agent, datamodule=data, ckpt_path=folder / "killed" / "last.ckpt")
        assert updates_in(folder / "killed" / "last.ckpt") == 15 and len(agent.seen) == 25
        agents.append(agent)
    assert agents[0].seen == agents[1].seen
    assert torch.equal(agents[0].weight, agents[1].weight)


def test_best_and_last_are_written_in_order_and_removed_when_replaced(tmp_path: Path) -> None:
    keep = WatchedCheckpoint(tmp_path / "run", save_top_k=2, background=True)
    run(tmp_path, 99.0, 2.0, 9.0, 3.0, 10.0, 5.0, keep=keep)
    files = sorted(path.name for path in (tmp_path / "run").glob("*.*"))
    replays = [name for name in files if name.endswith(".replay")]
    assert [name for name in files if name.endswith(".ckpt")] == ["best-v1.ckpt", "best.ckpt", "last.ckpt"]
    assert len(replays) == 3 and "last.40.replay" in replays
    for name in ("best.ckpt", "best-v1.ckpt"):
        make_trainer(tmp_path).fit(Tiny(), datamodule=make_data(), ckpt_path=tmp_path / "run" / name)


def test_an_error_is_raised_at_the_next_step_and_the_save_before_stays(tmp_path: Path, monkeypatch, caplog) -> None:
    keep = ReplayCheckpoint(tmp_path / "run", monitor=None, every_n_updates=10, background=True)
    save = ReplayCheckpointIO._save

    def failing(self, checkpoint, *arguments):
        if checkpoint["global_step"] == 20:
            raise OSError("no space left")
        save(self, checkpoint, *arguments)

    monkeypatch.setattr(ReplayCheckpointIO, "_save", failing)
    waits = At(21, lambda trainer: trainer.strategy.checkpoint_io._last_task.exception())
    agent = Tiny()
    caplog.set_level(logging.INFO)
    with pytest.raises(OSError, match="no space left"):
        make_trainer(tmp_path, [keep, waits]).fit(agent, datamodule=make_data())
    assert len(agent.seen) == 21 and updates_in(tmp_path / "run" / "last.ckpt") == 10
    assert "because saving failed; update 10 (environment step 30) is in" in caplog.text
    data = make_data()
    make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run")]).fit(Tiny(), datamodule=data, ckpt_path="last")
    assert data.updates_done == 40


def test_what_follows_a_failed_save_is_left_out(tmp_path: Path, monkeypatch) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    files = ReplayCheckpointIO(trainer.strategy.checkpoint_io.wrapped, trainer.datamodule)
    files.in_background, trainer.strategy.checkpoint_io = True, files
    trainer.datamodule.replay.sample()

    def fail(*arguments) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("lightning_replay.saves.write_data", fail)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    files.remove_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(OSError, match="no space left"):
        files.wait()
    assert (tmp_path / "old.ckpt").exists() and not (tmp_path / "new.ckpt").exists()
    assert (tmp_path / "old.40.replay").exists()
    assert not trainer.datamodule.replay.storage.snapshots, "the rows are not kept any longer"
    files.remove_checkpoint(tmp_path / "old.ckpt")
    files.wait()
    assert not (tmp_path / "old.ckpt").exists() and not (tmp_path / "old.40.replay").exists()


def test_a_run_that_is_stopped_is_saved_once_the_save_before_is_written(tmp_path: Path) -> None:
    keep = ReplayCheckpoint(tmp_path / "run", monitor=None, every_n_updates=10, background=True)

    def fail(trainer: L.Trainer) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, [keep, At(23, fail)]).fit(Tiny(), datamodule=make_data())
    assert updates_in(tmp_path / "run" / "last.ckpt") == 23


def test_a_save_that_fails_after_the_run_has_failed_is_not_reported(tmp_path: Path, monkeypatch, caplog) -> None:
    keep = ReplayCheckpoint(tmp_path / "run", monitor=None, every_n_updates=10, background=True)
    save, may_write = ReplayCheckpointIO._save, threading.Event()

    def failing(self, checkpoint, *arguments):
        if checkpoint["global_step"] == 20:
            assert may_write.wait(20)
            raise OSError("no space left")
        save(self, checkpoint, *arguments)

    def fail(trainer: L.Trainer) -> None:
        trainer.lightning_module.weight.data.fill_(float("nan"))
        may_write.set()
        raise ZeroDivisionError

    monkeypatch.setattr(ReplayCheckpointIO, "_save", failing)
    caplog.set_level(logging.INFO)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, [keep, At(21, fail)]).fit(Tiny(), datamodule=make_data())
    assert "saving failed, OSError: no space left; update 10" in caplog.text


def test_of_a_best_one_that_fails_at_the_end_the_last_before_is_reported(tmp_path: Path, monkeypatch, caplog) -> None:
    save = ReplayCheckpointIO._save

    def failing(self, checkpoint, path, *arguments):
        if checkpoint["global_step"] == 40:
            raise OSError("no space left")
        save(self, checkpoint, path, *arguments)

    monkeypatch.setattr(ReplayCheckpointIO, "_save", failing)
    caplog.set_level(logging.INFO)
    keep = WatchedCheckpoint(tmp_path / "run", every_n_updates=10, background=True)
    with pytest.raises(OSError, match="no space left"):
        run(tmp_path, 99.0, 2.0, 9.0, 3.0, 9.0, 10.0, keep=keep)
    assert updates_in(tmp_path / "run" / "last.ckpt") == 30 and "; update 30 (environment step 50) is in" in caplog.text


def test_an_interrupted_wait_for_a_save_forgets_nothing(tmp_path: Path, monkeypatch) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=make_data())
    files = ReplayCheckpointIO(trainer.strategy.checkpoint_io.wrapped, trainer.datamodule)
    files.in_background, trainer.strategy.checkpoint_io = True, files
    slow = Slow(monkeypatch)
    trainer.save_checkpoint(tmp_path / "new.ckpt")

    def interrupt(tasks) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lightning_replay.lit.checkpoint_files.futures.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            files.wait()
    slow.may_write.set()
    files.wait()
    assert (tmp_path / "new.ckpt").exists()


def test_what_has_no_background_is_refused(tmp_path: Path) -> None:
    keep = ReplayCheckpoint(tmp_path / "run", background=True)
    with pytest.raises(TypeError, match="background is True, and there is no replay"):
        make_trainer(tmp_path, [keep]).fit(Valuer(), datamodule=make_level_data(env_steps=45))
    other = Replay(storage=LazyTensorStorage(100), batch_size=4)
    with pytest.raises(TypeError, match="this Replay cannot be saved in the background, which takes rows in a Packed"):
        make_trainer(tmp_path, [keep]).fit(Tiny(), datamodule=make_data(other))
    with pytest.raises(TypeError, match="background is 1"):
        ReplayCheckpoint(background=1)


changes = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 30)),
        st.tuples(st.sampled_from(["sample", "end", "empty"]), st.just(0)),
    ),
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(before=changes, after=changes)
def test_nothing_that_changes_later_is_in_the_save(before, after, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("frozen")
    replay = recipes.prioritized(40, 4, n_steps=2, seed=0)

    def change(calls) -> None:
        for name, count in calls:
            if name == "extend":
                replay.extend(numbered_steps(len(replay), count, done_every=7))
            elif name == "sample" and len(replay):
                replay.update_priority(replay.sample(), torch.rand(4))
            elif name == "end":
                replay.end_episodes()
            elif name == "empty":
                replay.empty()

    change([("extend", 9), *before])
    replay.save(folder / "now")
    frozen = FrozenReplay(replay)
    change(after)
    frozen.save(folder / "later")
    frozen.close()  # again, without effect
    one, other = load_replay(folder / "now"), load_replay(folder / "later")
    assert len(one) == len(other)
    for _ in range(3 if len(one) else 0):
        first, second = one.sample(), other.sample()
        assert all((first[key] == second[key]).all() for key in first.keys(True, True))
