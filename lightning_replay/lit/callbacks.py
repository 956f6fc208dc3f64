# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks: priority feedback, evaluation, checkpoints, statistics, progress, pictures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader

from lightning_replay.agents.interfaces import UpdatePriorities
from lightning_replay.levels import LevelBatchSampler, LevelSelector
from lightning_replay.lightning_compat import batches_begun, logged_step
from lightning_replay.lit.checkpoints import ReplayCheckpoint
from lightning_replay.lit.data import ActsAtUpdates, EnvStepDataModule, source_of
from lightning_replay.lit.evaluation import Evaluate, GeneralizationGap, ReplayProgressBar
from lightning_replay.lit.level_data import LevelDataModule
from lightning_replay.lit.pictures import (
    InspectBuffer,
    LearningCurve,
    LevelCurriculum,
    ScoreAgainstStaleness,
    draw_learning_curves,
    draw_level_curriculum,
    draw_score_against_staleness,
)
from lightning_replay.lit.replay_data import ReplayDataModule
from lightning_replay.options import check_kind, checked_count, checked_share
from lightning_replay.table_replay import CurriculumReplay

__all__ = [
    "Evaluate",
    "GeneralizationGap",
    "InspectBuffer",
    "LearningCurve",
    "LevelCurriculum",
    "LinearLearningRate",
    "LogLevelStats",
    "LogReplayStats",
    "ReplayCheckpoint",
    "ReplayProgressBar",
    "ScoreAgainstStaleness",
    "UpdatePriorities",
    "draw_learning_curves",
    "draw_level_curriculum",
    "draw_score_against_staleness",
]


class _LogStats(L.Callback):
    """Writes a record every so many updates, with the speed since the last one."""

    _last: tuple[int, float]  # clock and time of the last record

    def _write(self, trainer: L.Trainer, clock: int, rate: str, stats: dict[str, float], outputs: Any) -> None:
        # A tensor is read only at a record, because on a GPU the reading waits for the update.
        source = trainer.datamodule  # type: ignore[attr-defined]
        now = time.perf_counter()
        for name, value in dict(outputs or {}).items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                stats[f"train/{name}"] = float(value)
        if isinstance(source, EnvStepDataModule) and source.collection.episodes:
            stats["train/return"] = source.collection.recent_return
        stats[rate] = (clock - self._last[0]) / (now - self._last[1])
        for logger in trainer.loggers:
            logger.log_metrics(stats, step=logged_step(trainer))  # The data module has its own axis.
        self._last = (clock, now)


class LogReplayStats(_LogStats, ActsAtUpdates):
    """Every ``every_n_updates`` writes ``replay/*`` and ``train/*`` to the trainer's loggers.

    Buffers with tables add ``replay/tables/<name>/*``, a curriculum ``replay/probability/<task>``, and the data module
    both clocks. ``self.log`` costs 0.3 ms in every training step. This costs nothing between two records.

    Args:
        every_n_updates: Number of updates between two records.
    """

    def __init__(self, every_n_updates: int = 500) -> None:
        self.every_n_updates: int = checked_count("every_n_updates", every_n_updates)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepares for the run that begins.

        :meta private:
        """
        source = trainer.datamodule  # type: ignore[attr-defined]
        self._last = (source.updates_done if isinstance(source, ReplayDataModule) else 0, time.perf_counter())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Writes a record if one is due.

        :meta private:
        """
        source = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(source, ReplayDataModule) or not self.is_due(source):
            return
        stats = _numbers(source.replay.stats(), "replay")
        if isinstance(source.replay, CurriculumReplay):
            stats |= _numbers(source.replay.probabilities(), "replay/probability")
        if isinstance(outputs, dict) and "td_error" in outputs:
            stats["train/td_error"] = float(outputs["td_error"].abs().mean())
        self._write(trainer, source.updates_done, "updates_per_second", stats, outputs)

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback acts after the newest update.

        :meta private:
        """
        has_loggers = source.trainer is not None and bool(source.trainer.loggers)
        return has_loggers and source.updates_done // self.every_n_updates > self._last[0] // self.every_n_updates


class LinearLearningRate(L.Callback, ActsAtUpdates):
    """Lowers the learning rates of all optimizers linearly over the run, to the share ``end`` of their first values.

    For agents that optimize manually, for which Lightning steps no schedulers, and without a subclass. A checkpoint
    holds the first values, as ``initial_lr`` of the optimizers. A run that is resumed with more steps follows the new
    length.

    Args:
        end: Share at the last step of the run, in [0, 1].
        every_n_updates: Number of updates between two changes.
    """

    def __init__(self, end: float = 0.0, every_n_updates: int = 100) -> None:
        self.end: float = checked_share("end", end)
        self.every_n_updates: int = checked_count("every_n_updates", every_n_updates)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sets the rates of the first update.

        :meta private:
        """
        self._set(trainer, source_of(trainer, self))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Sets the rates if a change is due.

        :meta private:
        """
        if self.is_due(source := source_of(trainer, self)):
            self._set(trainer, source)

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback acts after the newest update.

        :meta private:
        """
        return source.updates_done // self.every_n_updates > self._last // self.every_n_updates

    def _set(self, trainer: L.Trainer, source: EnvStepDataModule) -> None:
        self._last = source.updates_done
        share = 1.0 + (self.end - 1.0) * min(1.0, source.steps_done / source.total_steps)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group.setdefault("initial_lr", group["lr"])


class LogLevelStats(_LogStats):
    """Every ``every_n_rollouts`` writes ``levels/*`` and ``train/*`` to the trainer's loggers.

    ``levels/*`` are the values of ``levels.stats()``, ``train/*`` the outputs of the training step and the mean return
    of the last ten episodes. The data module adds both clocks.

    Without a ``LevelDataModule``, the levels belong to the :class:`~lightning_replay.levels.LevelBatchSampler` that
    is the ``batch_sampler`` of the trainer's ``DataLoader``. Records are then written at Lightning's own steps.

    Args:
        every_n_rollouts: Number of rollouts between two records, or of batches if there is no ``LevelDataModule``.
        levels: Levels to report in place of the ones that are found, such as a ``LevelBuffer``.

    Raises:
        TypeError: at ``fit``, neither data module nor ``DataLoader`` has levels.
    """

    def __init__(self, every_n_rollouts: int = 10, levels: LevelSelector | None = None) -> None:
        self.every_n_rollouts: int = checked_count("every_n_rollouts", every_n_rollouts)
        check_kind("levels", levels, LevelSelector | None, "a level selector such as LevelBuffer(...), or None")
        self.levels: LevelSelector | None = levels

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepares for the run that begins.

        :meta private:
        """
        self._levels_of(trainer)  # Refuses a run without levels.
        self._last = (self._clocks(trainer)[1], time.perf_counter())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Writes a record if one is due.

        :meta private:
        """
        rollouts, clock, rate = self._clocks(trainer)
        if trainer.loggers and rollouts % self.every_n_rollouts == 0:
            stats = {f"levels/{name}": float(value) for name, value in self._levels_of(trainer).stats().items()}
            self._write(trainer, clock, rate, stats, outputs)

    def _clocks(self, trainer: L.Trainer) -> tuple[int, int, str]:
        """Returns the rollouts so far, and the clock of the speed with the speed's name."""
        source = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(source, LevelDataModule):
            return source.updates_done, source.env_steps_done, "env_steps_per_second"
        return batches_begun(trainer), batches_begun(trainer), "batches_per_second"

    def _levels_of(self, trainer: L.Trainer) -> LevelSelector:
        source = trainer.datamodule  # type: ignore[attr-defined]
        if self.levels is not None:
            return self.levels
        if isinstance(source, LevelDataModule):
            return source.levels
        samplers = [getattr(one, "batch_sampler", None) for one in CombinedLoader(trainer.train_dataloader).flattened]
        found = [sampler.levels for sampler in samplers if isinstance(sampler, LevelBatchSampler)]
        if len(found) != 1:
            raise TypeError(
                "LogLevelStats is about levels, of which "
                f"{type(source or trainer.train_dataloader).__name__} has {len(found) or 'none'}; fit with a "
                "LevelDataModule, or a DataLoader whose batch_sampler is a LevelBatchSampler, or give levels=."
            )
        return found[0]


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= _numbers(value, f"{prefix}/{name}")  # such as replay/tables/goal/fill
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}/{name}"] = value
    return numbers
