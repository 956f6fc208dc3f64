# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning's door: a data module that collects and replays, callbacks, a command line."""

from lightning_replay.lit.callbacks import (
    Evaluate,
    LearningCurve,
    LogReplayStats,
    ReplayProgressBar,
    UpdatePriorities,
)
from lightning_replay.lit.datamodule import ReplayDataModule
from lightning_replay.lit.stream import ReplayStream, UpdateBatches

__all__ = [
    "Evaluate",
    "LearningCurve",
    "LogReplayStats",
    "ReplayDataModule",
    "ReplayProgressBar",
    "ReplayStream",
    "UpdateBatches",
    "UpdatePriorities",
]
