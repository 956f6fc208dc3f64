# SPDX-License-Identifier: Apache-2.0
"""Environments whose level is a corridor's length: by seed, by ``set_level``, and two that do not follow it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Corridor(gymnasium.Env):
    """Goes on for as many steps as its length, which ``reset(seed=...)`` fixes; sees its length and its place."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1000, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.seeds: list[int | None] = []
        self.options: list[dict[str, Any] | None] = []

    def choose_length(self) -> int:
        return int(self.np_random.integers(1, 1000))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.options.append(options)
        self.length, self.place = self.choose_length(), 0
        return self.see(), {"begun": len(self.seeds)}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += 1
        done = self.place >= self.length
        return self.see(), float(self.place), done, False, {"place": self.place, "way": {"left": self.length}}

    def see(self) -> Any:
        return np.array([self.length, self.place], np.float32)


class ToldCorridor(Corridor):
    """The level is the length, and there is none before ``set_level``; seeds do not change it."""

    level_id: int

    def set_level(self, level_id: int) -> None:
        self.level_id = level_id

    def choose_length(self) -> int:
        return self.level_id


class StubbornCorridor(Corridor):
    """Every episode is 2 steps long, whatever the seed."""

    def choose_length(self) -> int:
        return 2


class RestlessCorridor(Corridor):
    """Every episode is longer than the last one, whatever the seed."""

    def choose_length(self) -> int:
        return len(self.seeds)


class PairCorridor(ToldCorridor):
    """Observations of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(
            {"length": spaces.Discrete(1001), "place": spaces.Tuple([spaces.Box(0, 1000, (1,), np.int64)])}
        )

    def see(self) -> Any:
        return {"length": self.length, "place": (np.array([self.place]),)}


def lengths_of(*level_ids: int) -> list[float]:
    env = Corridor()
    return [float(env.reset(seed=level_id)[0][0]) for level_id in level_ids]
