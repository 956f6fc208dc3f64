# SPDX-License-Identifier: Apache-2.0
"""A look into the buffer during training: figures and pictures for loggers, and a page."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lightning_replay.lit.datamodules.env_steps import ActsAtUpdates, EnvStepDataModule, source_of
from lightning_replay.lit.datamodules.levels import LevelDataModule
from lightning_replay.lit.datamodules.replay import ReplayDataModule
from lightning_replay.replay import Replay
from lightning_replay.report.contents import ReplayContents
from lightning_replay.report.figures import figures_of
from lightning_replay.report.levels import LevelContents
from lightning_replay.report.live import look_at
from lightning_replay.report.page import Subject, page_of
from lightning_replay.report.pictures import pictures_of
from lightning_replay.validation import check_kind, checked_count

__all__ = ["InspectBuffer"]

_FILE_NAME = "buffer.html"
_UPDATES, _ROLLOUTS = 10_000, 100


class InspectBuffer(L.Callback, ActsAtUpdates):
    """Every ``every_n_updates`` and at the end looks into the replay or the levels, and writes a page of pictures.

    The page is that of ``lightning-replay inspect``, with the figures over the run so far. All loggers record the
    figures as ``replay/*`` or ``levels/*``, see :func:`~lightning_replay.report.figures.figures_of`. TensorBoard and
    W&B also record pictures (film strips of the episodes of the highest priority, heat maps of levels), TensorBoard
    histograms of ages and priorities. Reads rewards and episode ends of all rows: about 0.5 s for a million.

    Args:
        every_n_updates: updates of the data module between two looks; by default 10,000 with a replay and 100 with
            levels.
        path: of the page; ``buffer.html`` in the trainer's ``log_dir`` if absent.

    Raises:
        TypeError: ``path`` is no path; at ``fit``, a data module that counts no environment steps, or a sharded replay.
        ValueError: ``every_n_updates`` below 1.
    """

    def __init__(self, every_n_updates: int | None = None, path: str | None = None) -> None:
        check_kind("path", path, str | PathLike | None, "a path, or None")
        if every_n_updates is not None:
            checked_count("every_n_updates", every_n_updates)
        self.every_n_updates = every_n_updates
        self.path = path
        self.history: dict[str, tuple[list[float], list[float]]] = {}
        self._last = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Removes the figures of another run."""
        source = source_of(trainer, self)
        if isinstance(source, ReplayDataModule):
            accepted = "a Replay in this process, whose rows can be read; leave InspectBuffer out"
            check_kind("replay", source.replay, Replay, accepted)
        if any(steps[-1] > source.env_steps_done for steps, _ in self.history.values()):
            self.history.clear()
        self._last = source.updates_done

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks when due."""
        source = source_of(trainer, self)
        if self.is_due(source):
            self._look(trainer, pl_module, source)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Looks once more."""
        source = source_of(trainer, self)
        if source.updates_done > self._last or not self.history:
            self._look(trainer, pl_module, source)

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether a look follows the update that was made last."""
        every = self.every_n_updates or (_ROLLOUTS if isinstance(source, LevelDataModule) else _UPDATES)
        return source.updates_done // every > self._last // every

    def state_dict(self) -> dict[str, Any]:
        """The figures so far."""
        return {"history": {name: [list(steps), list(values)] for name, (steps, values) in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the figures."""
        self.history = {name: (list(steps), list(values)) for name, (steps, values) in state_dict["history"].items()}

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule, source: EnvStepDataModule) -> None:
        self._last = source.updates_done
        if isinstance(source, ReplayDataModule):
            assert isinstance(source.replay, Replay)
            prefix, contents = "replay", look_at(source.replay)
        elif isinstance(source, LevelDataModule):
            prefix, contents = "levels", look_at(source.levels)
        else:
            return
        figures = figures_of(contents)
        for name, value in figures.items():
            steps, values = self.history.setdefault(name, ([], []))
            steps.append(source.env_steps_done)
            values.append(float(value))
        pictures, histograms = pictures_of(contents), _histograms(contents)
        for logger in trainer.loggers:
            logger.log_metrics({f"{prefix}/{name}": float(value) for name, value in figures.items()})
            _log_pictures(logger, prefix, pictures, histograms, source.env_steps_done)
        if trainer.is_global_zero:
            file = Path(self.path) if self.path else Path(trainer.log_dir or ".") / _FILE_NAME
            file.parent.mkdir(parents=True, exist_ok=True)
            subtitle = f"environment step {source.env_steps_done:,}, update {source.updates_done:,}"
            page = page_of(f"Buffer of {type(pl_module).__name__}", subtitle, [Subject("", contents)], self.history)
            file.write_text(page, encoding="utf-8")


def _histograms(contents: ReplayContents | LevelContents) -> dict[str, np.ndarray]:
    """Returns the values of histograms by name."""
    if isinstance(contents, LevelContents):
        return {"score": contents.score} if len(contents) else {}
    found = {} if contents.ages is None else {"age": contents.ages}
    if contents.draws is not None and contents.draws.priority is not None:
        found["priority"] = contents.draws.priority
    return {name: values for name, values in found.items() if len(values)}


def _log_pictures(
    logger: Logger, prefix: str, pictures: dict[str, np.ndarray], histograms: dict[str, np.ndarray], step: int
) -> None:
    """Records pictures, and histograms where the logger has them; other loggers take numbers alone."""
    if isinstance(logger, WandbLogger):
        for name, picture in pictures.items():
            logger.log_image(f"{prefix}/{name}", [picture], step)
    elif isinstance(logger, TensorBoardLogger):
        for name, picture in pictures.items():
            logger.experiment.add_image(f"{prefix}/{name}", picture, step, dataformats="HWC")
        for name, values in histograms.items():
            logger.experiment.add_histogram(f"{prefix}/{name}_histogram", values, step)
