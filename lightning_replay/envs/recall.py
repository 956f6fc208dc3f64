# SPDX-License-Identifier: Apache-2.0
"""A task that needs memory: a cue is shown once, and a later question asks for it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_replay.options import checked_count


class RecallCue(gymnasium.Env[np.ndarray, int]):
    """A cue is shown in the first step, and a question asks for it ``delay`` steps later. Reward 1 for naming it.

    An episode takes ``delay + 1`` actions, and only the last counts. Without memory, the mean return is at most
    ``1 / num_cues``. The task is "memory length" of bsuite (Osband et al. 2020, https://arxiv.org/abs/1908.03568) with
    added noise.

    Args:
        num_cues: Cues, drawn with equal probability. The number of actions is the same.
        delay: Steps between cue and question, at least 1.

    Action: the number of a cue.

    Observation: float32 ``[num_cues + 2]``: the cue, one-hot, and zeros after the first step, then 1 with the question,
    else 0, then noise, uniform in [-1, 1].
    """

    def __init__(self, num_cues: int = 2, delay: int = 10) -> None:
        self.num_cues: int = checked_count("num_cues", num_cues, 2)
        self.delay: int = checked_count("delay", delay)
        self.action_space: spaces.Space[Any] = spaces.Discrete(num_cues)
        self.observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (num_cues + 2,), np.float32)
        self._cue = self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Shows a cue, drawn by the seed."""
        super().reset(seed=seed)
        self._cue = int(self.np_random.integers(self.num_cues))
        self._step = 0
        return self._observed(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Takes one step. The action counts only after the question, which ends the episode."""
        is_asked = self._step == self.delay
        self._step += 1
        return self._observed(), float(is_asked and int(action) == self._cue), is_asked, False, {}

    def _observed(self) -> np.ndarray:
        cues = (self._step == 0) * (np.arange(self.num_cues) == self._cue)
        return np.array([*cues, self._step == self.delay, self.np_random.uniform(-1.0, 1.0)], np.float32)
