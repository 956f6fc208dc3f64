# SPDX-License-Identifier: Apache-2.0
"""The best and the last checkpoint of a run: when they are written, under which names, and what a resume finds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_replay.lit import Evaluate, ReplayCheckpoint, ReplayDataModule
from lightning_replay.saving import chunks
from lightning_replay.saving import states as state
from tests.unit.lit.level_toys import Valuer
from tests.unit.lit.level_toys import make_data as make_level_data
from tests.unit.lit.test_callbacks import ScriptedEvaluate
from tests.unit.lit.toys import Counting, Tiny, WatchedCheckpoint, make_data, make_replay, make_trainer


def saved(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def updates_in(path: Path) -> int:
    return saved(path)["ReplayDataModule"]["updates"]


class Fail(L.Callback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.datamodule.updates_done == self.update:
            raise ZeroDivisionError


def run(directory: Path, *scores: float, keep=None, data=None, more=(), ckpt_path=None, **options) -> L.Callback:
    """Saves in ``run``; evaluations, at steps 0, 21, 30, 40, 50 and 60, give these scores."""
    keep = keep or WatchedCheckpoint(directory / "run")
    evaluate = [ScriptedEvaluate(*scores, every_n_env_steps=10, episodes=1)] if scores else []
    trainer = make_trainer(directory, [keep, *evaluate, *more], **options)
    trainer.fit(Tiny(), datamodule=data or make_data(), ckpt_path=ckpt_path)
    return keep


@pytest.mark.parametrize(
    ("options", "every", "expected"),
    [
        ({}, None, [40]),
        ({}, 15, [15, 30, 40]),
        ({"updates_per_training_step": 4}, 10, [12, 24, 36, 40]),
        ({"updates_per_env_step": 0.5}, 6, [6, 12, 18, 20]),
    ],
)
def test_the_last_is_written_by_updates_and_at_the_end(tmp_path: Path, options, every, expected) -> None:
    keep = run(tmp_path, keep=WatchedCheckpoint(tmp_path / "run", every_n_updates=every), data=make_data(**options))
    assert keep.written == [(update, "last.ckpt") for update in expected]
    assert updates_in(tmp_path / "run" / "last.ckpt") == expected[-1]
    files = [".lock", f"last.{expected[-1]}.replay", "last.ckpt"]
    assert sorted(path.name for path in (tmp_path / "run").glob("*.*")) == files


def test_levels_are_saved_more_often(tmp_path: Path) -> None:
    keep = WatchedCheckpoint(tmp_path / "run")
    data = make_level_data(env_steps=23 * 15)
    make_trainer(tmp_path, [keep]).fit(Valuer(), datamodule=data)
    assert [update for update, _ in keep.written] == [10, 20, 23]
    assert (ReplayDataModule.updates_per_checkpoint, data.updates_per_checkpoint) == (10_000, 10)


def test_the_best_is_that_of_the_evaluation_and_the_last_goes_on(tmp_path: Path) -> None:
    keep = run(tmp_path, 99.0, 2.0, 9.0, 3.0, 9.0, 5.0)  # the untrained agent's is not saved
    assert keep.written == [(1, "best.ckpt"), (1, "last.ckpt"), (10, "best.ckpt"), (10, "last.ckpt"), (40, "last.ckpt")]
    assert (keep.best_model_score, Path(keep.best_model_path).name) == (9.0, "best.ckpt")
    best, last = saved(tmp_path / "run" / "best.ckpt"), saved(tmp_path / "run" / "last.ckpt")
    assert (best["global_step"], last["global_step"]) == (10, 40)
    assert not torch.equal(best["state_dict"]["weight"], last["state_dict"]["weight"])


@pytest.mark.parametrize(("mode", "update"), [("min", 20), ("max", 10)])
def test_the_smallest_may_be_the_best_and_several_are_kept(tmp_path: Path, mode, update: int) -> None:
    keep = ReplayCheckpoint(tmp_path / "run", "{step}", mode=mode, save_top_k=2)
    run(tmp_path, 0.0, 5.0, 9.0, 3.0, 8.0, 5.0, keep=keep)
    assert updates_in(Path(keep.best_model_path)) == update
    kept = {"min": [1, 20], "max": [10, 30]}[mode]
    names = sorted(f"step={update}{end}" for update in kept for end in (".ckpt", f".{update}.replay"))
    assert sorted(path.name for path in (tmp_path / "run").glob("step=*")) == names


@pytest.mark.parametrize("monitor", ["eval/return", "eval/another", None])
def test_without_the_metric_only_the_last_is_kept(tmp_path: Path, monitor) -> None:
    evaluate = [Evaluate(every_n_env_steps=10, episodes=1)] if monitor != "eval/return" else []
    keep = run(tmp_path, keep=WatchedCheckpoint(tmp_path / "run", monitor=monitor), more=evaluate)
    assert keep.written == [(40, "last.ckpt")] and keep.best_model_path == ""


@pytest.mark.parametrize(("save_top_k", "best"), [(1, [3, 5]), (2, [3, 5, 8])])
def test_metrics_that_a_module_logs_are_looked_at_when_they_change(tmp_path: Path, save_top_k: int, best) -> None:
    class Logs(Tiny):
        def training_step(self, batch, batch_idx):
            update = self.trainer.datamodule.updates_done
            if update in (3, 5, 8):
                self.log("score", {3: 1.0, 5: 4.0, 8: 2.0}[update])
            return super().training_step(batch, batch_idx)

    keep = WatchedCheckpoint(tmp_path / "run", "{step}", monitor="score", save_top_k=save_top_k)
    make_trainer(tmp_path, [keep]).fit(Logs(), datamodule=make_data(env_steps=30))
    assert [update for update, name in keep.written if name != "last.ckpt"] == best


def test_of_evaluations_that_are_all_equal_the_first_is_the_best(tmp_path: Path) -> None:
    keep = run(tmp_path, *[7.0] * 6, keep=WatchedCheckpoint(tmp_path / "run", "{step}", save_top_k=2))
    assert [update for update, name in keep.written if name != "last.ckpt"] == [1]


def test_a_run_that_starts_anew_leaves_the_files_of_the_one_before(tmp_path: Path) -> None:
    first = run(tmp_path, 0.0, 7.0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.ckpt")}
    # by a callback of its own, and by that of the first run
    for number, keep in enumerate((None, first), start=1):
        run(tmp_path, 0.0, 3.0, keep=keep, data=make_data(env_steps=30 + number))
        assert updates_in(tmp_path / "run" / f"last-v{number}.ckpt") == 10 + number
        assert updates_in(tmp_path / "run" / f"best-v{number}.ckpt") == 1
    assert len(before) == 2 and all(path.stat().st_mtime_ns == then for path, then in before.items())
    run(tmp_path, 0.0, 3.0, data=make_data(env_steps=80), ckpt_path="last")
    assert updates_in(tmp_path / "run" / "last.ckpt") == 60  # that of the most steps, in its place
    assert len(list((tmp_path / "run").glob("last*.ckpt"))) == 3


def test_a_run_that_goes_back_to_the_best_leaves_the_last_and_the_best(tmp_path: Path) -> None:
    run(tmp_path, 0.0, 7.0, 6.0)
    run(tmp_path, 0.0, 7.0, 5.0, data=make_data(env_steps=35), ckpt_path=tmp_path / "run" / "best.ckpt")
    updates = {path.stem: updates_in(path) for path in (tmp_path / "run").glob("*.ckpt")}
    assert updates == {"best": 1, "last": 40, "best-v1": 10, "last-v1": 15}


def test_a_second_fit_of_the_same_data_goes_on_in_the_same_file(tmp_path: Path) -> None:
    data = make_data()
    keep = run(tmp_path, data=data, max_steps=10)
    run(tmp_path, keep=keep, data=data)
    assert keep.written == [(10, "last.ckpt"), (40, "last.ckpt")]


@pytest.mark.parametrize("resumed_by", ["last", "path"])
def test_each_version_of_a_logger_has_its_files_and_last_finds_the_newest(tmp_path: Path, resumed_by: str) -> None:
    def fit(data, *scores, ckpt_path=None, more=()):
        logger = CSVLogger(tmp_path)
        return run(tmp_path, *scores, keep=ReplayCheckpoint(), data=data, ckpt_path=ckpt_path, more=more, logger=logger)

    runs = tmp_path / "lightning_logs"
    with pytest.warns(UserWarning, match="there is no last checkpoint"), pytest.raises(ZeroDivisionError):
        fit(make_data(), 0.0, 7.0, 1.0, ckpt_path="last", more=[Fail(25)])
    old = runs / "version_0" / "checkpoints"
    assert updates_in(old / "last.ckpt") == 25
    path = "last" if resumed_by == "last" else old / "last.ckpt"
    keep = fit(make_data(), 0.0, 7.0, 1.0, 2.0, 3.0, 4.0, ckpt_path=path)  # no later evaluation is better
    assert keep.best_model_path == str(old / "best.ckpt") and keep.best_model_score == 7.0
    assert updates_in(old / "last.ckpt") == 25 and updates_in(runs / "version_1" / "checkpoints" / "last.ckpt") == 40
    keep = fit(make_data(env_steps=80), 0.0, 7.0, 1.0, 2.0, 3.0, 4.0, 9.0, ckpt_path="last")
    new = runs / "version_2" / "checkpoints"
    assert updates_in(new / "last.ckpt") == 60 and keep.best_model_path == str(new / "best.ckpt")
    assert updates_in(old / "best.ckpt") == 1, "the best of an earlier version is not removed"


def test_a_best_checkpoint_that_was_deleted_is_no_longer_the_one_to_beat(tmp_path: Path) -> None:
    run(tmp_path, 0.0, 7.0, data=make_data(env_steps=35))
    (tmp_path / "run" / "best.ckpt").unlink()
    keep = run(tmp_path, 0.0, 7.0, 7.0, 7.0, 2.0, ckpt_path="last")
    assert keep.best_model_score == 2.0 and updates_in(tmp_path / "run" / "best.ckpt") > 15


def test_the_first_save_of_a_resumed_run_links_the_rows_that_stayed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(state, "LARGE_BYTES", 900)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1_024)
    options = {"env_steps": 500, "warmup_steps": 460}
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "a", data=make_data(**options), more=[Fail(20)])
    run(tmp_path / "b", data=make_data(**options), ckpt_path=tmp_path / "a" / "run" / "last.ckpt")
    files = [path.stat().st_nlink for path in (tmp_path / "b").rglob("*.chunk")]
    assert files.count(2) > len(files) / 2


def test_nothing_is_written_by_a_trial_run_or_without_a_step(tmp_path: Path) -> None:
    run(tmp_path, fast_dev_run=True)

    class Closed(Counting):
        def step(self, action):
            raise ZeroDivisionError

    data = ReplayDataModule(Closed, make_replay(), env_steps=60, warmup_steps=20)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, data=data)
    assert not (tmp_path / "run").exists()


def test_one_line_names_the_file_and_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ZeroDivisionError):
        run(tmp_path, more=[Fail(25)])
    (line,) = [record.getMessage() for record in caplog.records if "Saved" in record.getMessage()]
    assert line == (
        f"\nSaved: update 25 (environment step 45) is in {tmp_path}/run/last.ckpt. "
        'Go on with fit(..., ckpt_path="last"), on the command line --ckpt_path=last.'
    )


@pytest.mark.parametrize("newer", ["short", "long"])
def test_last_is_the_checkpoint_of_the_most_steps(tmp_path: Path, newer: str) -> None:
    for name, env_steps in (("short", 24), ("long", 28)):
        run(tmp_path, keep=ReplayCheckpoint(tmp_path / name, monitor=None), data=make_data(env_steps=env_steps))
    both = tmp_path / "both"
    both.mkdir()
    for name, file in (("short", "last"), ("long", "last-v1")):
        for path in (tmp_path / name).glob("last*"):
            path.rename(both / path.name.replace("last", file, 1))
        os.utime(both / f"{file}.ckpt", (1e9, 1e9 + (name == newer)))
    (both / "last-v2.ckpt").write_text("truncated")
    data = make_data(env_steps=32)
    trainer = make_trainer(tmp_path, [ReplayCheckpoint(both, monitor=None)])
    trainer.fit(agent := Tiny(), datamodule=data, ckpt_path="last")
    assert Path(trainer.ckpt_path).name == "last-v1.ckpt" and len(agent.seen) == 4


def test_a_folder_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = make_data()
    with pytest.raises(OSError, match="dirpath is '.*', where nothing can be written"):
        run(tmp_path / "file", data=data)
    assert data.env_steps_done == 0
