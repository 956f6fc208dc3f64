# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning integration: data modules that replay transitions or levels, callbacks, a command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_replay.agents.feedback import UpdateBatches, UpdatePriorities
    from lightning_replay.lit.callbacks import (
        Evaluate,
        GeneralizationGap,
        InspectBuffer,
        LearningCurve,
        LevelCurriculum,
        LogLevelStats,
        LogReplayStats,
        ReplayCheckpoint,
        ReplayProgressBar,
        ScoreAgainstStaleness,
    )
    from lightning_replay.lit.datamodules.env_steps import UpdateStream
    from lightning_replay.lit.datamodules.levels import LevelDataModule
    from lightning_replay.lit.datamodules.replay import ReplayDataModule
    from lightning_replay.lit.evaluation import level_returns, stochastic_policy
    from lightning_replay.lit.return_normalization import ReturnNormalization

__all__ = [
    "Evaluate",
    "GeneralizationGap",
    "InspectBuffer",
    "LearningCurve",
    "LevelCurriculum",
    "LevelDataModule",
    "LogLevelStats",
    "LogReplayStats",
    "ReplayCheckpoint",
    "ReplayDataModule",
    "ReplayProgressBar",
    "ReturnNormalization",
    "ScoreAgainstStaleness",
    "UpdateBatches",
    "UpdatePriorities",
    "UpdateStream",
    "level_returns",
    "stochastic_policy",
]

# imported at first use: `lightning-replay configs` needs neither Lightning nor TorchRL
_MODULES = (
    *("callbacks", "datamodules.env_steps", "datamodules.levels", "datamodules.replay", "evaluation"),
    "return_normalization",
)


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        exported = importlib.import_module(f"{__name__}.{module}")
        if name in exported.__all__:
            return getattr(exported, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
