# SPDX-License-Identifier: Apache-2.0
"""One test per name of Lightning 2.6 that ``lightning_replay/lightning_compat.py`` lists: a moved name fails here."""

from __future__ import annotations

import copy
import importlib
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_replay import lightning_compat
from tests.overridden_names import overridden_names


class Manual(BoringModel):
    """Steps its optimizer by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.step(batch)
        self.log("loss", loss)
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]


class Calls(L.Callback):
    """Calls a function at the end of every training step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.function(trainer)


def fit(folder: Path, *callbacks: L.Callback, model: L.LightningModule | None = None, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1}
    settings |= {"enable_model_summary": False, "enable_checkpointing": bool(callbacks), "limit_train_batches": 4}
    trainer = L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **(settings | options))
    trainer.fit(Manual() if model is None else model)
    return trainer


def test_the_release_the_names_were_read_in() -> None:
    assert L.__version__.startswith("2.6.")


def test_a_module_without_a_trainer_has_none(tmp_path: Path) -> None:
    module = Manual()
    assert lightning_compat.attached_trainer(module) is None
    trainer = fit(tmp_path, model=module)
    assert lightning_compat.attached_trainer(module) is trainer


def test_a_checkpoint_callback_says_whether_it_saves_at_steps() -> None:
    assert not lightning_compat.saves_at_steps(ModelCheckpoint())
    assert lightning_compat.saves_at_steps(ModelCheckpoint(every_n_train_steps=3))


def test_checkpoints_are_saved_when_we_ask(tmp_path: Path) -> None:
    writes: list[str] = []

    class Recorded(ModelCheckpoint):
        def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
            writes.append(Path(filepath).name)
            super()._save_checkpoint(trainer, filepath)

    callback = Recorded(tmp_path, "best", monitor="loss", every_n_epochs=0, save_last=True)

    def save(trainer: L.Trainer) -> None:
        if trainer.global_step == 2:
            lightning_compat.save_best(callback, trainer)
            assert writes == ["best.ckpt"]
            lightning_compat.save_last(callback, trainer)

    trainer = fit(tmp_path, callback, Calls(save))
    assert writes == ["best.ckpt", "last.ckpt"]
    assert callback._find_last_checkpoints(trainer) == {str(tmp_path / "last.ckpt")}
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == 2


def test_the_last_checkpoint_is_the_one_that_the_callback_finds(tmp_path: Path) -> None:
    (tmp_path / "mine.ckpt").touch()

    class Finds(ModelCheckpoint):
        def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
            return {str(tmp_path / "mine.ckpt")}

    with pytest.raises(EOFError):  # it reads the empty file
        L.Trainer(max_epochs=1, callbacks=[Finds()], logger=False, accelerator="cpu").fit(Manual(), ckpt_path="last")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse tells Lightning of a former name
def test_the_command_line_reads_the_hyperparameters_of_a_checkpoint_by_one_method(monkeypatch: Any) -> None:
    calls: list[object] = []
    monkeypatch.setattr(LightningCLI, "_parse_ckpt_path", lambda self: calls.append(self))
    monkeypatch.setattr("sys.argv", ["program"])
    LightningCLI(Manual, save_config_callback=None, seed_everything_default=False, run=False)
    assert len(calls) == 1


def test_the_signal_of_a_slurm_job_is_known_while_lightning_handles_it(tmp_path: Path) -> None:
    signals: list[int | None] = []

    def record(trainer: L.Trainer) -> None:
        signals.append(lightning_compat.requeue_signal(trainer))

    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    for environment in (SLURMEnvironment(requeue_signal=signal.SIGUSR2), LightningEnvironment()):
        fit(tmp_path, Calls(record), plugins=[environment], limit_train_batches=1)
    fit(tmp_path, Calls(record), plugins=[SLURMEnvironment(auto_requeue=False)], limit_train_batches=1)
    signal.signal(signal.SIGUSR2, before)
    assert signals == [signal.SIGUSR2, None, None]


def test_optimizer_steps_are_the_global_step(tmp_path: Path) -> None:
    def count(trainer: L.Trainer) -> None:
        steps = lightning_compat.optimizer_steps(trainer)
        steps.increment_ready()
        steps.increment_completed()

    trainer = fit(tmp_path, Calls(count))
    assert trainer.global_step == 8, "four by Lightning, four by us"


def test_a_training_step_is_open_until_its_callbacks_were_called(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    def count(trainer: L.Trainer) -> None:
        steps = lightning_compat.training_steps(trainer)
        seen.append((steps.ready, steps.processed, steps.completed))

    fit(tmp_path, Calls(count))
    assert seen == [(1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 4, 3)]


def test_steps_and_batches_are_those_at_which_lightning_logs(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def note(trainer: L.Trainer) -> None:
        seen.append((lightning_compat.logged_step(trainer), lightning_compat.batches_begun(trainer)))

    fit(tmp_path, Calls(note), model=BoringModel(), max_epochs=2, limit_train_batches=3, accumulate_grad_batches=2)
    # The optimizer steps after two batches and at the end of an epoch.
    assert seen == [(0, 1), (0, 2), (1, 3), (2, 4), (2, 5), (3, 6)]


def test_an_epoch_ends_after_a_training_step(tmp_path: Path) -> None:
    def end(trainer: L.Trainer) -> None:
        if trainer.global_step % 3 == 0:
            lightning_compat.end_epoch(trainer)

    trainer = fit(tmp_path, Calls(end), max_epochs=2)
    assert (trainer.current_epoch, trainer.global_step) == (2, 6)


def test_an_open_training_step_is_removed_from_a_checkpoint(tmp_path: Path) -> None:
    checkpoints: list[dict[str, Any]] = []

    class Dumps(L.Callback):
        def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
            checkpoints.append(copy.deepcopy(checkpoint))

    def save(trainer: L.Trainer) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(tmp_path / "open.ckpt")

    fit(tmp_path, Calls(save), Dumps())
    lightning_compat.remove_open_step(checkpoints[0])
    progress = checkpoints[0]["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["current"] == {"ready": 1, "completed": 1, "started": 1, "processed": 1}
    assert progress["total"] == progress["current"] and not progress["is_last_batch"]


def test_a_trainer_does_not_validate_with_the_options_of_no_validation(tmp_path: Path) -> None:
    class Switches(L.Callback):
        def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
            self.previous = lightning_compat.replace_options(trainer, lightning_compat.NO_VALIDATION)

        def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            raise AssertionError("validated")

    switches = Switches()
    fit(tmp_path, switches, limit_val_batches=3, val_check_interval=2)
    assert switches.previous == {"limit_val_batches": 3, "val_check_interval": 2, "check_val_every_n_epoch": 1}


@pytest.mark.parametrize(
    ("host", "names"),
    [
        (L.LightningModule, set()),
        (L.LightningDataModule, set()),
        (ModelCheckpoint, {"_find_last_checkpoints", "_save_checkpoint"}),
    ],
)
def test_overridden_private_names_are_those_of_lightning(host: type, names: set[str]) -> None:
    for module in ("agents", "lit", "lit.checkpoints"):
        importlib.import_module(f"lightning_replay.{module}")
    assert overridden_names(host) == names, f"private names of {host.__name__} that classes here override"
