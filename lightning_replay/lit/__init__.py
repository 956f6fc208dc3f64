# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning integration: data modules that replay transitions or levels, callbacks, a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

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

# `lightning-replay configs` loads this package without Lightning and TorchRL.
__getattr__: Getter = lazy_names(
    __name__,
    {
        "lightning_replay.agents.interfaces": ("UpdateBatches", "UpdatePriorities"),
        ".callbacks": ("LinearLearningRate", "LogLevelStats", "LogReplayStats"),
        ".checkpoints": ("ReplayCheckpoint",),
        ".data": ("UpdateStream",),
        ".evaluation": ("Evaluate", "GeneralizationGap", "ReplayProgressBar"),
        ".level_collection": ("ReturnNormalization",),
        ".level_data": ("LevelDataModule",),
        ".pictures": ("InspectBuffer", "LearningCurve", "LevelCurriculum", "ScoreAgainstStaleness"),
        ".replay_data": ("ReplayDataModule",),
        ".rollouts": ("level_returns", "stochastic_policy"),
    },
)
