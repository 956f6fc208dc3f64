# SPDX-License-Identifier: Apache-2.0
"""A progress bar in environment steps."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm.auto import tqdm

from lightning_replay.lit.datamodules.env_steps import ActsAtUpdates, EnvStepDataModule, source_of
from lightning_replay.validation import checked_number

__all__ = ["ReplayProgressBar"]


class ReplayProgressBar(ProgressBar, ActsAtUpdates):
    """Shows environment steps, recent training return, last evaluation and updates per second.

    Give it to the trainer among its callbacks; it replaces Lightning's bar.

    Args:
        refresh_seconds: time between two refreshes, at least 10 if the output is no terminal. A refresh costs as much
            as a small update.

    Attributes:
        evaluation: the newest return of an evaluation, which ``Evaluate`` sets; NaN before the first.
    """

    def __init__(self, refresh_seconds: float = 0.5) -> None:
        super().__init__()
        checked_number("refresh_seconds", refresh_seconds, 0.0)
        self.refresh_seconds: float = refresh_seconds if sys.stderr.isatty() else max(refresh_seconds, 10.0)
        self.evaluation: float = math.nan
        self._is_enabled = True
        self._bar: tqdm | None = None
        self._last_updates = 0
        self._last_time = 0.0
        self._last_described = 0.0

    def enable(self) -> None:
        self._is_enabled = True

    def disable(self) -> None:
        self._is_enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        source = trainer.datamodule  # type: ignore[attr-defined]
        if not self._is_enabled or not isinstance(source, EnvStepDataModule):
            return
        self._bar = tqdm(total=source.pace.env_steps, initial=source.env_steps_done, unit="step", dynamic_ncols=True)
        self._last_updates, self._last_time = source.updates_done, time.perf_counter()
        self._last_described = self._last_time

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_due(source_of(trainer, self)):
            self._refresh(trainer, time.perf_counter())

    def is_due(self, source: EnvStepDataModule) -> bool:
        return self._bar is not None and time.perf_counter() - self._last_time >= self.refresh_seconds

    def describe(self, activity: str) -> None:
        """Shows an activity between two steps, if a refresh is due; an empty text removes it."""
        now = time.perf_counter()
        if self._bar is None or (activity and now - self._last_described < self.refresh_seconds):
            return
        self._last_described = now
        self._bar.set_description_str(activity, refresh=bool(activity))

    def _refresh(self, trainer: L.Trainer, now: float) -> None:
        source = source_of(trainer, self)
        assert self._bar is not None
        shown = {"return": source.collection.recent_return, "eval/return": self.evaluation}
        shown["updates/s"] = (source.updates_done - self._last_updates) / max(now - self._last_time, 1e-9)
        postfix = {
            name: f"{value:.{1 if abs(value) >= 10 else 2}f}" for name, value in shown.items() if not math.isnan(value)
        }
        self._bar.set_postfix(postfix, refresh=False)
        self._bar.n = source.env_steps_done
        self._bar.refresh()
        self._last_updates, self._last_time = source.updates_done, now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._refresh(trainer, time.perf_counter())
            self._bar.close()
            self._bar = None
