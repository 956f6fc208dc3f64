# SPDX-License-Identifier: Apache-2.0
"""Selection of levels, the environment configurations of episodes: Prioritized Level Replay, relatives, baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_replay.lazy import Getter, lazy_names

if TYPE_CHECKING:
    from lightning_replay.levels import scores
    from lightning_replay.levels.baselines import SequentialLevels, UniformLevels
    from lightning_replay.levels.batches import LevelBatchSampler
    from lightning_replay.levels.buffer import LearningProgress, LevelBuffer, LevelEditor, plr, tscl
    from lightning_replay.levels.level_set import LevelSet
    from lightning_replay.levels.prioritization import Boltzmann, Greedy, Prioritization, Proportional, Rank, Top
    from lightning_replay.levels.scores import EpisodeScore
    from lightning_replay.levels.selector import LevelSelector, segments, update_rollout
    from lightning_replay.levels.step_lists import StepLists
    from lightning_replay.levels.streams import LevelStream
    from lightning_replay.levels.torchrl_parts import LevelSampler, LevelWriter

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
    "LevelStream",
    "LevelWriter",
    "Prioritization",
    "Proportional",
    "Rank",
    "SequentialLevels",
    "StepLists",
    "Top",
    "UniformLevels",
    "plr",
    "scores",
    "segments",
    "tscl",
    "update_rollout",
]

# A process that steps environments loads this package without torch. Levels are selected without TorchRL.
__getattr__: Getter = lazy_names(
    __name__,
    {
        ".baselines": ("SequentialLevels", "UniformLevels"),
        ".batches": ("LevelBatchSampler",),
        ".buffer": ("LearningProgress", "LevelBuffer", "LevelEditor", "plr", "tscl"),
        ".level_set": ("LevelSet",),
        ".prioritization": ("Boltzmann", "Greedy", "Prioritization", "Proportional", "Rank", "Top"),
        ".scores": ("EpisodeScore",),
        ".selector": ("LevelSelector", "segments", "update_rollout"),
        ".step_lists": ("StepLists",),
        ".streams": ("LevelStream",),
        ".torchrl_parts": ("LevelSampler", "LevelWriter"),
    },
    submodules=("scores",),
)
