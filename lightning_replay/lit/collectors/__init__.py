# SPDX-License-Identifier: Apache-2.0
"""Collecting transitions and rollouts between the updates of a Trainer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Collector", "Episode"]


@dataclass(frozen=True)
class Episode:
    """A finished training episode: the environment step it ended at, its return and its length."""

    env_steps: int
    episode_return: float
    length: int


class Collector(ABC):
    """Clock, generator and finished episodes of collecting from environments that are built when they are needed.

    Args:
        seed: of environments and random actions.
        kept_episodes: finished episodes that are kept, the newest.

    Attributes:
        env_steps: environment steps collected.
        episodes: the newest finished ones.
    """

    def __init__(self, seed: int | None, kept_episodes: int) -> None:
        self._generator = np.random.default_rng(seed)
        self.env_steps: int = 0
        self.episodes: deque[Any] = deque(maxlen=kept_episodes)

    @property
    def recent_return(self) -> float:
        """Mean return of the last ten episodes, NaN before the first."""
        recent = [episode.episode_return for episode in list(self.episodes)[-10:]]
        return float(np.mean(recent)) if recent else math.nan

    @abstractmethod
    def close(self) -> None:
        """Closes the environments, whose episodes are interrupted; new ones are built at the next step."""

    def state_dict(self) -> dict[str, Any]:
        return {"env_steps": self.env_steps, "generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.env_steps = state["env_steps"]
        self._generator.bit_generator.state = state["generator"]
        self.episodes.clear()
