# SPDX-License-Identifier: Apache-2.0
"""The replay methods of lightning_replay in Ray RLlib: ``.training(replay_buffer_config=replay_config(...))``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_ext.config import configure, replay_config
    from rllib_ext.episode_buffer import RecipeEpisodeReplayBuffer
    from rllib_ext.from_yaml import load_config
    from rllib_ext.rows_to_episodes import fill

__all__ = ["RecipeEpisodeReplayBuffer", "configure", "fill", "load_config", "replay_config"]

_MODULES = {
    "RecipeEpisodeReplayBuffer": "episode_buffer",
    "configure": "config",
    "fill": "rows_to_episodes",
    "load_config": "from_yaml",
    "replay_config": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
