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
_MODULES = {
    "LevelDataModule": "lit.datamodules.levels",
    "ReplayDataModule": "lit.datamodules.replay",
    "ReturnNormalization": "lit.return_normalization",
    "UpdateBatches": "agents.feedback",
    "UpdatePriorities": "agents.feedback",
    "UpdateStream": "lit.datamodules.env_steps",
    "level_returns": "lit.evaluation",
    "stochastic_policy": "lit.evaluation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightning_replay.{_MODULES.get(name, 'lit.callbacks')}"), name)
