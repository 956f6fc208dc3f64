# SPDX-License-Identifier: Apache-2.0
"""Selection of levels, the environment configurations of episodes: Prioritized Level Replay, relatives, baselines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_replay.levels import scores
    from lightning_replay.levels.baselines import SequentialLevels, UniformLevels
    from lightning_replay.levels.batches import LevelBatchSampler
    from lightning_replay.levels.buffer import LearningProgress, LevelBuffer, LevelEditor, tscl
    from lightning_replay.levels.level_set import LevelSet
    from lightning_replay.levels.prioritization import Boltzmann, Greedy, Prioritization, Proportional, Rank, Top
    from lightning_replay.levels.scores import EpisodeScore
    from lightning_replay.levels.selector import LevelSelector, segments, update_rollout
    from lightning_replay.levels.table import LevelSampler, LevelWriter

__all__ = [
    "Boltzmann",
    "EpisodeScore",
    "Greedy",
    "LearningProgress",
    "LevelBatchSampler",
    "LevelBuffer",
    "LevelEditor",
    "LevelSampler",
    "LevelSelector",
    "LevelSet",
    "LevelWriter",
    "Prioritization",
    "Proportional",
    "Rank",
    "SequentialLevels",
    "Top",
    "UniformLevels",
    "scores",
    "segments",
    "tscl",
    "update_rollout",
]

# imported at first use: what a process that steps environments imports from here needs no torch
_MODULES = ("prioritization", "scores", "selector", "table", "buffer", "baselines", "level_set", "batches")


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        exported = importlib.import_module(f"{__name__}.{module}")
        if name in (module, *exported.__all__):
            return exported if name == module else getattr(exported, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
