# SPDX-License-Identifier: Apache-2.0
"""The episodes that environments play, counted step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import VectorEnv

from lightning_replay.lit.policy import ActionReader

__all__ = ["RunningEpisodes"]


class RunningEpisodes:
    """Environments in progress, with the observation, return and length of the episode that each of them plays.

    Args:
        environments: reset here; closed if that raises.
        seed: of the reset.
    """

    observation: Any

    def __init__(self, environments: VectorEnv[Any, Any, Any], seed: int | None = None) -> None:
        self.environments = environments
        self.num_envs: int = environments.num_envs
        self.action_space: Space[Any] = environments.single_action_space
        self.read_actions: ActionReader = ActionReader(self.action_space)
        try:
            self.observation, _ = environments.reset(seed=seed)
        except Exception:
            environments.close()
            raise
        self._return = np.zeros(self.num_envs)
        self._steps = 0
        self._began = [0] * self.num_envs  # the step before the first of each episode

    def count_step(self, reward: np.ndarray, done: np.ndarray) -> list[tuple[int, float, int]]:
        """Adds one step; returns environment, return and length of each episode that it ended."""
        self._return += reward
        self._steps += 1
        if not np.count_nonzero(done):
            return []
        ended = [(i, float(self._return[i]), self._steps - self._began[i]) for i in np.flatnonzero(done).tolist()]
        self._return[done] = 0.0
        for i, _, _ in ended:
            self._began[i] = self._steps
        return ended
