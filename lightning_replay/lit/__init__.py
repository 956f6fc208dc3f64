# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning integration: data modules that replay transitions or levels, callbacks, a command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_replay.agents.interfaces import UpdateBatches, UpdatePriorities
    from lightning_replay.lit.callbacks import LinearLearningRate, LogLevelStats, LogReplayStats
    from lightning_replay.lit.checkpoints import ReplayCheckpoint
    from lightning_replay.lit.data import UpdateStream
    from lightning_replay.lit.evaluation import Evaluate, GeneralizationGap, ReplayProgressBar
    from lightning_replay.lit.level_collection import ReturnNormalization
    from lightning_replay.lit.level_data import LevelDataModule
    from lightning_replay.lit.pictures import InspectBuffer, LearningCurve, LevelCurriculum, ScoreAgainstStaleness
    from lightning_replay.lit.replay_data import ReplayDataModule
    from lightning_replay.lit.rollouts import level_returns, stochastic_policy

__all__ = [
    "Evaluate",
    "GeneralizationGap",
    "InspectBuffer",
    "LearningCurve",
    "LevelCurriculum",
    "LevelDataModule",
    "LinearLearningRate",
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
_MODULES = ("callbacks", "data", "level_data", "replay_data", "playing", "level_collection")


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        exported = importlib.import_module(f"{__name__}.{module}")
        if name in vars(exported):
            return vars(exported)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
