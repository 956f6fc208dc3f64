# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning's door: a data module that collects and replays, callbacks, a command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# imported at first use: `lightning-replay configs` needs neither Lightning nor TorchRL
_MODULES = {"ReplayDataModule": "datamodule", "ReplayStream": "stream", "UpdateBatches": "stream"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'callbacks')}"), name)
