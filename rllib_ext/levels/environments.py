# SPDX-License-Identifier: Apache-2.0
"""Environments on EnvRunners whose next level is set before their reset."""

from __future__ import annotations

from typing import Any

from lightning_replay.levels.environments.level_wrappers import LevelWrapper

LEVEL_ID = "level_id"  # in infos, and in the custom data of episodes


class PlayedLevel(LevelWrapper):
    """Plays the level that was set last, and tracks the episode."""

    episode_id: str | None = None  # RLlib's, of the episode that the level was set for
    is_waiting: bool = False  # whether that episode has not begun
    is_running: bool = False  # whether it has begun and is not done

    def set_next(self, level_id: int, episode_id: str) -> None:
        self.set_level(level_id)
        self.episode_id, self.is_waiting, self.is_running = episode_id, True, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.is_waiting, self.is_running = False, True
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.is_running = not (result[2] or result[3])
        return result
