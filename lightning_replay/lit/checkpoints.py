# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the best and the last state, also of a run that is interrupted by a signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from os import PathLike
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, Literal, NoReturn

import fsspec
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parameter import is_lazy

from lightning_replay.levels import LevelSelector
from lightning_replay.lightning_compat import remove_open_step, save_best, save_last, training_steps
from lightning_replay.lit.checkpoint_files import REQUEUED, ReplayCheckpointIO
from lightning_replay.lit.collection import Collection
from lightning_replay.lit.data import ActsAtUpdates, EnvStepDataModule, source_of
from lightning_replay.options import (
    LOCAL_OR_URL,
    check_kind,
    checked_choice,
    checked_count,
    checked_flag,
    checked_local_path,
    checked_optional_count,
)
from lightning_replay.saves import FrozenReplay
from lightning_replay.saving.files import check_writable
from lightning_replay.training_replay import TrainingReplay

SIGTERM_STATUS = 128 + signal.SIGTERM  # shells and schedulers read this status of a process
_ONE_SIGNAL_S = 1.0  # timeout(1) sends each signal twice at once, to a process and to its group
_HINT = b"\nStopping after the training step in progress. A second signal, a second later, does not wait for it.\n"


class ReplayCheckpoint(ModelCheckpoint, ActsAtUpdates):
    """Keeps ``best.ckpt``, the best by a metric, and ``last.ckpt``, from which ``fit(ckpt_path="last")`` resumes.

    ``last.ckpt`` is written at the end of ``fit``, every ``every_n_updates``, and with every best one. Unless there are
    several processes, it is also written when the run is stopped by Ctrl-C, SIGTERM, or an exception in environment,
    agent, or callback. It is replaced atomically. What it then holds, and the names of files:
    docs/lightning-checkpoints.md.

    Args:
        dirpath: Folder, or a URL of fsspec such as ``s3://bucket/run`` (extra ``remote``), by default ``checkpoints``
            in the logger's folder, without a logger in ``default_root_dir``.
        filename: Name of the best checkpoints, which may contain ``{step}`` and metrics, as in Lightning.
        monitor: Metric, compared each time its value changes. ``None`` keeps only the last.
        mode: ``"max"`` if the largest value is best, ``"min"`` if the smallest is.
        save_top_k: Number of best checkpoints, each with its replay. The second one is ``best-v1.ckpt``, and so on.
        background: write checkpoints by a thread while training goes on. Rows, weights and generators are saved as they
            are at the moment. Rows that are overwritten meanwhile are copied. A checkpoint waits for the one before it
            and ``fit`` for the last one. An error is raised at the next training step. Needs rows in a
            ``PackedStorage``.
        every_n_updates: updates of the data module between two ``last.ckpt``, by default 10,000 with a replay and 10
            with levels. Files of the replay that have not changed are linked, the others written.

    Raises:
        TypeError: at ``fit``, a data module that counts no environment steps.
        OSError: at ``fit``, a folder that cannot be written.
    """

    last_model_path: str
    kth_best_model_path: str
    best_k_models: dict[str, torch.Tensor]

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "best",
        monitor: str | None = "eval/return",
        mode: Literal["max", "min"] = "max",
        save_top_k: int = 1,
        every_n_updates: int | None = None,
        background: bool = False,
    ) -> None:
        check_kind("dirpath", dirpath, str | PathLike | None, "a folder, or None")
        if "://" not in str(dirpath):
            checked_local_path("dirpath", dirpath or "", LOCAL_OR_URL)
        check_kind("filename", filename, str, "a name such as 'best' or '{step}'")
        check_kind("monitor", monitor, str | None, "the name of a metric such as 'eval/return', or None")
        super().__init__(
            dirpath,
            filename,
            monitor=monitor,
            mode=checked_choice("mode", mode, ("max", "min")),
            save_top_k=checked_count("save_top_k", save_top_k) if monitor is not None else 0,
            save_last=True,
            every_n_epochs=0,  # none of Lightning's own times
        )
        self.every_n_updates: int | None = checked_optional_count("every_n_updates", every_n_updates)
        self.background: bool = checked_flag("background", background)
        self._files: ReplayCheckpointIO | None = None  # the plug-in, if it writes in the background
        self._written = ((0, 0), "")  # clocks and path of the newest checkpoint that is known to be saved
        self._has_own_folder = dirpath is None
        self._signals = StopSignals()
        self._source: EnvStepDataModule | None = None  # while it trains
        self._saved = (0, 0)
        self._is_saving = self._is_step_open = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks the data module, and that the folder can be written.

        :meta private:
        """
        if stage == TrainerFn.FITTING:
            source_of(trainer, self)
        super().setup(trainer, pl_module, stage)
        is_written = stage == TrainerFn.FITTING and trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if is_written and self.dirpath is not None and "://" not in str(self.dirpath):
            check_writable("dirpath", self.dirpath)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to save between training steps and to defer signals.

        :meta private:
        """
        super().on_train_start(trainer, pl_module)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        source = source_of(trainer, self)
        if self.background:
            files = trainer.strategy.checkpoint_io
            if not isinstance(files, ReplayCheckpointIO):
                raise TypeError(
                    "background is True, and there is no replay, whose files take long to write; leave background out"
                )
            FrozenReplay(files.datamodule.replay).close()  # refuses a replay that cannot be saved so
            self._files = files
            files.in_background = True
        resumed = trainer.ckpt_path
        is_same_file = resumed is not None and _file_at(str(resumed)) == _file_at(self.last_model_path)
        # A job that SLURM requeued goes on in the folder of its first part.
        is_own_folder = Path(self.last_model_path).parent == Path(str(self.dirpath))
        is_requeued = is_own_folder and Path(str(resumed)).name.startswith(REQUEUED)
        if not (source.steps_done if resumed is None else is_same_file or is_requeued):
            # The checkpoints in the folder are of another run: this one writes under other names.
            self.last_model_path = self.kth_best_model_path = ""
            self.best_k_models = {}
        if resumed is not None or not source.steps_done:
            self._saved = source.clocks
        self._newest = str(resumed or self.last_model_path)
        # The score of an untrained agent, or of an agent that was saved with it, is not saved again.
        self._seen = self._metric(trainer)
        self._is_saving = False
        source.pause_hooks.append(self._pause)  # called between training steps, where nothing is half done
        source.stop_checks.append(self._signals.raise_pending)
        self._source = source
        self._signals.install()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Notes that the update is complete.

        :meta private:
        """
        # The update is finished, but saved only after the LightningModule's own hook, which follows.
        if self._source is not None:
            self._source.is_update_open = False

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the best weights at the end of the run.

        :meta private:
        """
        # At the end of the run the best is saved before averages replace the weights that were scored.
        if self._source is not None and (trainer.should_stop or self._source.is_finished):
            self._save_best(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the last state and raises a signal that waits.

        :meta private:
        """
        if self._source is None:
            return
        self._save_due(trainer, self._source, is_last=True)
        self._settle()
        self._signals.raise_pending()
        self._signals.remove()
        self._release()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Saves the last state if replay and weights are whole, and prints its path.

        :meta private:
        """
        source = self._source
        if source is None:  # The error came before or after the training.
            return
        if self._signals.pending is None:
            self._signals.remove()
        else:
            self._signals.ignores = True  # The last state is saved first.
        try:
            self._release()
            progress = training_steps(trainer)
            # Whether training_step had ended: its update counts, and Lightning's counts are made to agree.
            is_learned = progress.ready == progress.processed == progress.completed + 1
            self._is_step_open = progress.ready > progress.processed
            if is_learned:
                source.is_update_open = False
            source.drop_open_update()  # one that was not finished is made again after a resume
            reason = self._reason_against_saving(trainer, exception)
            self._settle()  # also where nothing is saved: what is reported to be saved must be
            if reason is None and source.clocks != self._saved:
                self._save_last(trainer, source)
        except Exception as failure:  # the exception that ended the run is the one to be raised
            reason = f"saving failed, {type(failure).__name__}: {failure}"
        finally:
            self._signals.remove()
        self._is_step_open = False
        self._report(reason)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restores the handlers of signals.

        :meta private:
        """
        # A run may end without on_train_end and without an exception.
        self._signals.remove()
        self._release()
        super().teardown(trainer, pl_module, stage)

    def _settle(self, *, for_end: bool = True) -> None:
        # Raises the error of a save in the background. What was said to be saved is not then.
        if self._files is not None:
            try:
                self._files.wait(for_end=for_end)
                if for_end:
                    self._written = (self._saved, self._newest)
            except Exception:
                self._is_saving = True
                self._saved, self._newest = self._written
                raise

    def _release(self) -> None:
        if self._files is not None:
            self._files.in_background = False
        if self._source is not None:
            self._source.pause_hooks.remove(self._pause)
            self._source.stop_checks.remove(self._signals.raise_pending)
        self._source = None

    def _pause(self, is_between_steps: bool) -> None:
        if is_between_steps and self._source is not None and self._source.trainer is not None:
            self._settle(for_end=False)
            self._save_due(self._source.trainer, self._source)
        self._signals.raise_pending()

    def _save_best(self, trainer: L.Trainer) -> bool:
        metric = self._metric(trainer)
        is_seen = metric is self._seen
        if metric is not None and self._seen is not None and self.best_k_models:
            # By value too: Lightning returns what a module logged once as a new tensor each time, until the epoch ends.
            is_seen |= metric.item() == self._seen.item()
        is_best = metric is not None and not is_seen and self.check_monitor_top_k(trainer, metric)
        if is_best:
            self._settle()
            save_best(self, trainer)
        if metric is not None:  # An evaluation's metric is absent until the next evaluation.
            self._seen = metric
        return is_best

    def _save_due(self, trainer: L.Trainer, source: EnvStepDataModule, is_last: bool = False) -> None:
        is_best = self._save_best(trainer)
        is_due = self._is_save_due(source) or (is_last and source.clocks != self._saved)
        if is_due and not is_best:
            self._settle()
        # With the best too: a run that is resumed before it would search for it again and might overwrite it.
        if is_best or is_due:
            self._save_last(trainer, source)

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback acts after the newest update.

        :meta private:
        """
        # A signal ends the run after this update too.
        return self._source is not None and (self._signals.pending is not None or self._is_save_due(source))

    def _is_save_due(self, source: EnvStepDataModule) -> bool:
        every = source.updates_per_checkpoint if self.every_n_updates is None else self.every_n_updates
        return source.updates_done - self._saved[1] >= every

    def _save_last(self, trainer: L.Trainer, source: EnvStepDataModule) -> None:
        save_last(self, trainer)
        self._saved = source.clocks
        self._newest = self.last_model_path

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        self._is_saving = True  # stays true where saving raises, see _reason_against_saving
        super()._save_checkpoint(trainer, filepath)
        self._is_saving = False

    def _metric(self, trainer: L.Trainer) -> torch.Tensor | None:
        return None if self.monitor is None else trainer.callback_metrics.get(self.monitor)

    def _reason_against_saving(self, trainer: L.Trainer, exception: BaseException) -> str | None:
        if trainer.world_size > 1:
            return "the other processes of the trainer cannot take part"
        if self._is_saving:  # a signal that interrupts it leaves the state as it was
            return "saving failed" if isinstance(exception, Exception) else None
        if _interrupts_a_write(exception):
            return "the replay was being written"
        if not all(is_lazy(one) or torch.isfinite(one).all() for one in trainer.lightning_module.parameters()):
            return "weights of the agent are NaN or infinite"
        return None

    def _report(self, reason: str | None) -> None:
        env_steps, updates = self._saved
        if not self._newest and reason is None:
            return  # no step was collected
        kept = "there is no checkpoint of this run yet"
        if self._newest:
            kept = (
                f"update {updates:,} (environment step {env_steps:,}) is in {self._newest}. Go on with "
                'fit(..., ckpt_path="last"), on the command line --ckpt_path=last.'
            )
        # not a warning: one that is turned into an error would take the place of the exception that ended the run
        rank_zero_info(f"\nSaved: {kept}" if reason is None else f"\nNothing was saved, because {reason}; {kept}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Leaves an update that was not completed out of Lightning's counts.

        :meta private:
        """
        # Lightning counts a step when it begins. An unfinished one is removed, as from the data module's clock.
        if self._is_step_open:
            remove_open_step(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the best checkpoints that still exist, for the present folder.

        :meta private:
        """
        # The best ones may be in another folder, or gone.
        best = {path: score for path, score in state_dict["best_k_models"].items() if _file_at(path)}
        super().load_state_dict(state_dict | {"dirpath": self.dirpath, "best_k_models": best})

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        found: set[str] = super()._find_last_checkpoints(trainer)
        if self.dirpath is not None and "://" in str(self.dirpath):  # Lightning drops the protocol
            found = set(map(fsspec.core.url_to_fs(self.dirpath)[0].unstrip_protocol, found))
        if not found and self._has_own_folder and trainer.loggers:
            logger = trainer.loggers[0]
            runs = Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
            found = set(map(str, runs.glob(f"*/checkpoints/{self.CHECKPOINT_NAME_LAST}*{self.FILE_EXTENSION}")))
        if len(found) < 2:
            return found
        # By the clocks in the files: a copied folder has times in any order. Of equal ones the file written last.
        module = type(source_of(trainer, self)).__qualname__
        clocks = {path: _clocks_in(path, module) for path in found}
        chosen = max(found, key=lambda path: (clocks[path], fsspec.core.url_to_fs(path)[0].modified(path)))
        env_steps, updates = clocks[chosen]
        rank_zero_info(
            f'ckpt_path="last": of {len(found)} checkpoints {chosen} holds the most environment steps, {env_steps:,}, '
            f"and {updates:,} updates."
        )
        return {chosen}


def _file_at(path: str) -> str | None:
    # Equal for all names of one file, None if there is none.
    filesystem, place = fsspec.core.url_to_fs(path)
    if not path or not filesystem.exists(place):
        return None
    return str(filesystem.unstrip_protocol(place if "://" in path else os.path.realpath(place)))


def _clocks_in(path: str, module: str) -> tuple[int, int]:
    try:
        with fsspec.open(path, "rb") as file:
            state = torch.load(file, map_location="meta", weights_only=True)[module]
        return int(state["collection"]["env_steps"]), int(state["updates"])
    except Exception:  # torch raises errors of many kinds for damaged files and files of other programs
        return -1, -1


def _interrupts_a_write(exception: BaseException) -> bool:
    # An Exception leaves replay and levels as they were. A signal may come between two writes.
    if isinstance(exception, Exception) and not isinstance(exception, MemoryError):
        return False
    for frame, _ in walk_tb(exception.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, TrainingReplay | LevelSelector):
            return frame.f_code.co_name != "sample"  # a draw writes nothing
        if isinstance(owner, Collection) and frame.f_code.co_name == "_store":
            return True
    return False


class StopSignals:
    """Defers the first SIGINT or SIGTERM of the main thread to :meth:`raise_pending`. A second one interrupts at once.

    A signal that is repeated within a second counts once.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self.pending: int | None = None  # a signal that waits for the end of the step
        self._received_at = 0.0
        self.ignores: bool = False  # whether further signals are ignored
        self._process = 0

    def install(self) -> None:
        """Replaces the default handlers of SIGINT and SIGTERM, in the main thread only."""
        self.pending, self.ignores = None, False
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._receive)
        if signal.getsignal(signal.SIGTERM) not in (None, signal.SIG_IGN):
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._receive)

    def remove(self) -> None:
        """Restores the previous handlers."""
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._receive:  # else another handler was installed since
                signal.signal(number, handler)

    def raise_pending(self) -> None:
        """Raises the exception of a signal that waits for the end of the step."""
        if self.pending is not None:
            self._raise(self.pending, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked environment. Ctrl-C reaches it too, but its parent needs it to finish the step.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif self.pending is None:
            self._received_at = time.monotonic()
            self.pending = number
            os.write(2, _HINT)  # print may not be called in a handler: the step may be printing
        elif not self.ignores and (number != self.pending or time.monotonic() - self._received_at > _ONE_SIGNAL_S):
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> NoReturn:
        previous = self._previous.get(number)
        if callable(previous):  # Lightning's, which marks the signal as received
            previous(number, frame)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SIGTERMException(SIGTERM_STATUS)
