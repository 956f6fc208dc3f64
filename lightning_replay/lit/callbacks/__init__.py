# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks: priority feedback, evaluation, checkpoints, statistics, progress, pictures."""

from lightning_replay.agents.feedback import UpdatePriorities
from lightning_replay.lit.callbacks.checkpoint import ReplayCheckpoint
from lightning_replay.lit.callbacks.evaluate import Evaluate, GeneralizationGap
from lightning_replay.lit.callbacks.inspection import InspectBuffer
from lightning_replay.lit.callbacks.learning_curve import LearningCurve, draw_learning_curves
from lightning_replay.lit.callbacks.level_pictures import (
    LevelCurriculum,
    ScoreAgainstStaleness,
    draw_level_curriculum,
    draw_score_against_staleness,
)
from lightning_replay.lit.callbacks.progress import ReplayProgressBar
from lightning_replay.lit.callbacks.statistics import LogLevelStats, LogReplayStats

__all__ = [
    "Evaluate",
    "GeneralizationGap",
    "InspectBuffer",
    "LearningCurve",
    "LevelCurriculum",
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
