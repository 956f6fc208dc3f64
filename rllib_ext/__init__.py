# SPDX-License-Identifier: Apache-2.0
"""The replay methods of lightning_replay in Ray RLlib: ``configure``, with ``replay_config`` or with ``levels``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_ext.api import configure, replay_config
    from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
    from rllib_ext.buffer.fill import fill
    from rllib_ext.config_file import load_config
    from rllib_ext.interruption import Interruption
    from rllib_ext.levels.server import level_buffer

__all__ = [
    "Interruption",
    "RecipeEpisodeReplayBuffer",
    "configure",
    "fill",
    "level_buffer",
    "load_config",
    "replay_config",
]

_MODULES = {
    "Interruption": "interruption",
    "RecipeEpisodeReplayBuffer": "buffer.buffer",
    "configure": "api",
    "fill": "buffer.fill",
    "level_buffer": "levels.server",
    "load_config": "config_file",
    "replay_config": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
