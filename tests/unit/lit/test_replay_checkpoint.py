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
from tests.unit.lit.toys import Counting, Tiny, make_data, make_replay, make_trainer


def saved(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def updates_in(path: Path) -> int:
    return saved(path)["ReplayDataModule"]["updates"]


class Fail(L.Callback):
    """Ends the run after an update by an exception."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.datamodule.updates_done == self.update:
            raise ZeroDivisionError


def fail_after(update: int, directory: Path, *callbacks: L.Callback, data=None, **options) -> L.Trainer:
    trainer = make_trainer(directory, [*callbacks, Fail(update)], **options)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Tiny(), datamodule=data or make_data())
    return trainer


class WatchedCheckpoint(ReplayCheckpoint):
    """Notes after how many updates it wrote which file."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.written: list[tuple[int, str]] = []

    def _save_checkpoint(self, trainer, filepath) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.written.append((trainer.datamodule.updates_done, Path(filepath).name))


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
    keep = WatchedCheckpoint(tmp_path / "run", every_n_updates=every)
    make_trainer(tmp_path, [keep]).fit(Tiny(), datamodule=make_data(**options))
    assert keep.written == [(update, "last.ckpt") for update in expected]
    assert updates_in(tmp_path / "run" / "last.ckpt") == expected[-1]
    assert sorted(path.name for path in (tmp_path / "run").glob("*.*")) == [
        ".lock",
        f"last.{expected[-1]}.replay",
        "last.ckpt",
    ]


def test_levels_are_saved_more_often(tmp_path: Path) -> None:
    keep = WatchedCheckpoint(tmp_path / "run")
    data = make_level_data(env_steps=23 * 15)
    make_trainer(tmp_path, [keep]).fit(Valuer(), datamodule=data)
    assert [update for update, _ in keep.written] == [10, 20, 23]
    assert (ReplayDataModule.updates_per_checkpoint, data.updates_per_checkpoint) == (10_000, 10)


def test_the_best_is_that_of_the_evaluation_and_the_last_goes_on(tmp_path: Path) -> None:
    # evaluations at steps          0    21   30   40   50   60; the untrained agent's is not saved
    evaluate = ScriptedEvaluate(99.0, 2.0, 9.0, 3.0, 9.0, 5.0, every_n_env_steps=10, episodes=1)
    keep = WatchedCheckpoint(tmp_path / "run")
    make_trainer(tmp_path, [keep, evaluate]).fit(Tiny(), datamodule=make_data())
    assert keep.written == [(1, "best.ckpt"), (1, "last.ckpt"), (10, "best.ckpt"), (10, "last.ckpt"), (40, "last.ckpt")]
    assert (keep.best_model_score, Path(keep.best_model_path).name) == (9.0, "best.ckpt")
    best, last = saved(tmp_path / "run" / "best.ckpt"), saved(tmp_path / "run" / "last.ckpt")
    assert (best["global_step"], last["global_step"]) == (10, 40)
    assert not torch.equal(best["state_dict"]["weight"], last["state_dict"]["weight"])


@pytest.mark.parametrize(("mode", "update"), [("min", 20), ("max", 10)])
def test_the_smallest_may_be_the_best_and_several_are_kept(tmp_path: Path, mode, update: int) -> None:
    evaluate = ScriptedEvaluate(0.0, 5.0, 9.0, 3.0, 8.0, 5.0, every_n_env_steps=10, episodes=1)
    keep = ReplayCheckpoint(tmp_path / "run", "{step}", mode=mode, save_top_k=2)
    make_trainer(tmp_path, [keep, evaluate]).fit(Tiny(), datamodule=make_data())
    assert updates_in(Path(keep.best_model_path)) == update
    kept = {"min": [1, 20], "max": [10, 30]}[mode]
    names = sorted(f"step={update}{end}" for update in kept for end in (".ckpt", f".{update}.replay"))
    assert sorted(path.name for path in (tmp_path / "run").glob("step=*")) == names


@pytest.mark.parametrize("monitor", ["eval/return", "eval/another", None])
def test_without_the_metric_only_the_last_is_kept(tmp_path: Path, monitor) -> None:
    evaluate = [Evaluate(every_n_env_steps=10, episodes=1)] if monitor != "eval/return" else []
    keep = WatchedCheckpoint(tmp_path / "run", monitor=monitor)
    make_trainer(tmp_path, [keep, *evaluate]).fit(Tiny(), datamodule=make_data())
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
    evaluate = ScriptedEvaluate(*[7.0] * 6, every_n_env_steps=10, episodes=1)
    keep = WatchedCheckpoint(tmp_path / "run", "{step}", save_top_k=2)
    make_trainer(tmp_path, [keep, evaluate]).fit(Tiny(), datamodule=make_data())
    assert [update for update, name in keep.written if name != "last.ckpt"] == [1]


def test_a_run_that_starts_anew_leaves_the_files_of_the_one_before(tmp_path: Path) -> None:
    script = {"every_n_env_steps": 10, "episodes": 1}
    first = ReplayCheckpoint(tmp_path / "run")
    make_trainer(tmp_path, [first, ScriptedEvaluate(0.0, 7.0, **script)]).fit(Tiny(), datamodule=make_data())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.ckpt")}
    # by a callback of its own, and by that of the first run
    for number, keep in enumerate((ReplayCheckpoint(tmp_path / "run"), first), start=1):
        data = make_data(env_steps=30 + number)
        make_trainer(tmp_path, [keep, ScriptedEvaluate(0.0, 3.0, **script)]).fit(Tiny(), datamodule=data)
        assert updates_in(tmp_path / "run" / f"last-v{number}.ckpt") == 10 + number
        assert updates_in(tmp_path / "run" / f"best-v{number}.ckpt") == 1
    assert len(before) == 2 and all(path.stat().st_mtime_ns == then for path, then in before.items())
    again = [ReplayCheckpoint(tmp_path / "run"), ScriptedEvaluate(0.0, 3.0, **script)]
    make_trainer(tmp_path, again).fit(Tiny(), datamodule=make_data(env_steps=80), ckpt_path="last")
    assert updates_in(tmp_path / "run" / "last.ckpt") == 60  # that of the most steps, in its place
    assert len(list((tmp_path / "run").glob("last*.ckpt"))) == 3


def test_a_run_that_goes_back_to_the_best_leaves_the_last_and_the_best(tmp_path: Path) -> None:
    script = {"every_n_env_steps": 10, "episodes": 1}
    make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run"), ScriptedEvaluate(0.0, 7.0, 6.0, **script)]).fit(
        Tiny(), datamodule=make_data()
    )
    keep = ReplayCheckpoint(tmp_path / "run")
    trainer = make_trainer(tmp_path, [keep, ScriptedEvaluate(0.0, 7.0, 5.0, **script)])
    trainer.fit(Tiny(), datamodule=make_data(env_steps=35), ckpt_path=tmp_path / "run" / "best.ckpt")
    updates = {path.stem: updates_in(path) for path in (tmp_path / "run").glob("*.ckpt")}
    assert updates == {"best": 1, "last": 40, "best-v1": 10, "last-v1": 15}


def test_a_second_fit_of_the_same_data_goes_on_in_the_same_file(tmp_path: Path) -> None:
    data, keep = make_data(), WatchedCheckpoint(tmp_path / "run")
    make_trainer(tmp_path, [keep], max_steps=10).fit(Tiny(), datamodule=data)
    make_trainer(tmp_path, [keep]).fit(Tiny(), datamodule=data)
    assert keep.written == [(10, "last.ckpt"), (40, "last.ckpt")]


@pytest.mark.parametrize("resumed_by", ["last", "path"])
def test_each_version_of_a_logger_has_its_files_and_last_finds_the_newest(tmp_path: Path, resumed_by: str) -> None:
    def fit(data, *scores, ckpt_path=None, fails=()):
        keep = ReplayCheckpoint()
        callbacks = [keep, ScriptedEvaluate(*scores, every_n_env_steps=10, episodes=1), *fails]
        trainer = make_trainer(tmp_path, callbacks, logger=CSVLogger(tmp_path))
        try:
            trainer.fit(Tiny(), datamodule=data, ckpt_path=ckpt_path)
        except ZeroDivisionError:
            assert fails
        return keep

    runs = tmp_path / "lightning_logs"
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        fit(make_data(), 0.0, 7.0, 1.0, ckpt_path="last", fails=[Fail(25)])
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
    script = {"every_n_env_steps": 10, "episodes": 1}
    make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run"), ScriptedEvaluate(0.0, 7.0, **script)]).fit(
        Tiny(), datamodule=make_data(env_steps=35)
    )
    (tmp_path / "run" / "best.ckpt").unlink()
    keep = ReplayCheckpoint(tmp_path / "run")
    trainer = make_trainer(tmp_path, [keep, ScriptedEvaluate(0.0, 7.0, 7.0, 7.0, 2.0, **script)])
    trainer.fit(Tiny(), datamodule=make_data(), ckpt_path="last")
    assert keep.best_model_score == 2.0 and updates_in(tmp_path / "run" / "best.ckpt") > 15


def test_the_first_save_of_a_resumed_run_links_the_rows_that_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LARGE_BYTES", 900)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1_024)
    options = {"env_steps": 500, "warmup_steps": 460}
    fail_after(20, tmp_path, ReplayCheckpoint(tmp_path / "a"), data=make_data(**options))
    make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "b")]).fit(
        Tiny(), datamodule=make_data(**options), ckpt_path=tmp_path / "a" / "last.ckpt"
    )
    files = [path.stat().st_nlink for path in (tmp_path / "b").rglob("*.chunk")]
    assert files.count(2) > len(files) / 2


def test_nothing_is_written_by_a_trial_run_or_without_a_step(tmp_path: Path) -> None:
    make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run")], fast_dev_run=True).fit(Tiny(), datamodule=make_data())

    class Closed(Counting):
        def step(self, action):
            raise ZeroDivisionError

    data = ReplayDataModule(Closed, make_replay(), env_steps=60, warmup_steps=20)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "run")]).fit(Tiny(), datamodule=data)
    assert not (tmp_path / "run").exists()


def test_one_line_names_the_file_and_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fail_after(25, tmp_path, ReplayCheckpoint(tmp_path / "run"))
    (line,) = [record.getMessage() for record in caplog.records if "Saved" in record.getMessage()]
    assert line == (
        f"\nSaved: update 25 (environment step 45) is in {tmp_path}/run/last.ckpt. "
        'Go on with fit(..., ckpt_path="last"), on the command line --ckpt_path=last.'
    )


@pytest.mark.parametrize("newer", ["short", "long"])
def test_last_is_the_checkpoint_of_the_most_steps(tmp_path: Path, newer: str) -> None:
    for name, env_steps in (("short", 24), ("long", 28)):
        data = make_data(env_steps=env_steps)
        make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / name, monitor=None)]).fit(Tiny(), datamodule=data)
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
        make_trainer(tmp_path, [ReplayCheckpoint(tmp_path / "file" / "run")]).fit(Tiny(), datamodule=data)
    assert data.env_steps_done == 0
