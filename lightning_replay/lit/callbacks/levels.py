# SPDX-License-Identifier: Apache-2.0
"""Logs which levels are replayed and how well, against environment steps."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch

from lightning_replay.lit.datamodules.levels import LevelDataModule
from lightning_replay.validation import checked_count

__all__ = ["LogLevelStats", "level_source_of"]


class LogLevelStats(L.Callback):
    """Every ``every_n_rollouts`` writes ``levels/*`` and ``train/*`` to the trainer's loggers.

    ``levels/*`` are the figures of ``levels.stats()``, ``train/*`` what the training step returned, and the mean return
    of the last ten episodes. The data module adds both clocks.

    Args:
        every_n_rollouts: rollouts between two records.
    """

    def __init__(self, every_n_rollouts: int = 10) -> None:
        self.every_n_rollouts = checked_count("every_n_rollouts", every_n_rollouts)
        self._last_steps = 0
        self._last_time = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock."""
        self._last_steps, self._last_time = level_source_of(trainer, self).env_steps_done, time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records when due."""
        source = level_source_of(trainer, self)
        if not trainer.loggers or source.updates_done % self.every_n_rollouts:
            return
        now = time.perf_counter()
        metrics = {f"levels/{name}": float(value) for name, value in source.levels.stats().items()}
        for name, value in dict(outputs or {}).items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                metrics[f"train/{name}"] = float(value)
        if source.collection.episodes:
            metrics["train/return"] = source.collection.recent_return
        metrics["env_steps_per_second"] = (source.env_steps_done - self._last_steps) / (now - self._last_time)
        for logger in trainer.loggers:
            logger.log_metrics(metrics)
        self._last_steps, self._last_time = source.env_steps_done, now


def level_source_of(trainer: L.Trainer, callback: L.Callback) -> LevelDataModule:
    """The trainer's data module.

    Raises:
        TypeError: it plays no levels.
    """
    source = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(source, LevelDataModule):
        raise TypeError(
            f"{type(callback).__name__} is about levels, of which {type(source).__name__} has none; fit with a "
            "LevelDataModule."
        )
    return source
