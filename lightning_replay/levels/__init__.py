# SPDX-License-Identifier: Apache-2.0
"""Levels: which environment configuration each actor plays next. Prioritized Level Replay, its relatives, baselines."""

from __future__ import annotations

from lightning_replay.levels import scores
from lightning_replay.levels.learning_progress import LearningProgress, tscl
from lightning_replay.levels.level_buffer import LevelBuffer, LevelEditor
from lightning_replay.levels.level_sampler import LevelSampler
from lightning_replay.levels.level_source import LevelSource
from lightning_replay.levels.level_writer import LevelWriter
from lightning_replay.levels.prioritization import Boltzmann, Greedy, Prioritization, Proportional, Rank
from lightning_replay.levels.rollout import segments, update_rollout
from lightning_replay.levels.scoring import EpisodeScore
from lightning_replay.levels.unscored import SequentialLevels, UniformLevels

__all__ = [
    "Boltzmann",
    "EpisodeScore",
    "Greedy",
    "LearningProgress",
    "LevelBuffer",
    "LevelEditor",
    "LevelSampler",
    "LevelSource",
    "LevelWriter",
    "Prioritization",
    "Proportional",
    "Rank",
    "SequentialLevels",
    "UniformLevels",
    "scores",
    "segments",
    "tscl",
    "update_rollout",
]
