# SPDX-License-Identifier: Apache-2.0
"""The replay methods of lightning_replay in Ray RLlib: ``replay_config`` for transitions, ``configure_levels``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_ext.config import configure, replay_config
    from rllib_ext.episode_buffer import RecipeEpisodeReplayBuffer
    from rllib_ext.from_yaml import load_config
    from rllib_ext.interruption import Interruption
    from rllib_ext.levels.config import configure_levels
    from rllib_ext.levels.remote import level_buffer
    from rllib_ext.rows_to_episodes import fill

__all__ = [
    "Interruption",
    "RecipeEpisodeReplayBuffer",
    "configure",
    "configure_levels",
    "fill",
    "level_buffer",
    "load_config",
    "replay_config",
]

_MODULES = {
    "Interruption": "interruption",
    "RecipeEpisodeReplayBuffer": "episode_buffer",
    "configure": "config",
    "configure_levels": "levels.config",
    "fill": "rows_to_episodes",
    "level_buffer": "levels.remote",
    "load_config": "from_yaml",
    "replay_config": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
