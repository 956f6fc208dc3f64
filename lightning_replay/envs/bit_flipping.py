# SPDX-License-Identifier: Apache-2.0
"""Bits that are flipped one by one until they equal the bits of the goal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_replay.options import checked_count, checked_optional_count


class BitFlipping(gymnasium.Env[Any, Any]):
    """Every action flips one bit. The reward is 0 at the goal, which terminates the episode, and -1 at other steps.

    :meth:`reset` draws bits and goal. With 20 bits, an agent hardly ever reaches a goal by chance. Andrychowicz et al.
    2017, https://arxiv.org/abs/1707.01495, section 3.1.

    Args:
        bits: Number of bits.
        max_steps: Steps after which an episode is truncated, or ``None`` for the number of bits.

    Action: Discrete, the bit.

    Observation: ``observation`` and ``achieved_goal``, the bits, and ``desired_goal``, float32 ``[bits]`` of 0 and 1.

    Info: ``success`` (bool).
    """

    def __init__(self, bits: int = 20, max_steps: int | None = None) -> None:
        self.bits: int = checked_count("bits", bits)
        self.max_steps: int = checked_optional_count("max_steps", max_steps) or self.bits
        entries = ("observation", "achieved_goal", "desired_goal")
        each = spaces.Box(0.0, 1.0, (self.bits,), np.float32)
        self.observation_space: spaces.Dict = spaces.Dict(dict.fromkeys(entries, each))
        self.action_space: spaces.Space[Any] = spaces.Discrete(self.bits)
        self._state = self._goal = np.zeros(self.bits, dtype=np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draws bits, and a goal that differs from them."""
        super().reset(seed=seed)
        self._steps = 0
        self._goal = self._state = self.np_random.integers(2, size=self.bits).astype(np.float32)
        while (self._goal == self._state).all():
            self._goal = self.np_random.integers(2, size=self.bits).astype(np.float32)
        return self._seen(), {"success": False}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Flips one bit. ``action`` is its number."""
        self._state = self._state.copy()
        self._state[action] = 1.0 - self._state[action]
        self._steps += 1
        reached = bool(self.compute_terminated(self._state, self._goal, {}))
        reward = float(self.compute_reward(self._state, self._goal, {}))
        return self._seen(), reward, reached, self._steps >= self.max_steps and not reached, {"success": reached}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        """Returns the rewards ``[...]`` of goals ``[..., bits]``."""
        return self.compute_terminated(achieved_goal, desired_goal, info).astype(np.float32) - 1.0

    def compute_terminated(
        self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: dict[str, Any]
    ) -> np.ndarray:
        """Returns whether the goals ``[..., bits]`` are equal, bool ``[...]``."""
        return np.asarray((achieved_goal == desired_goal).all(-1))

    def _seen(self) -> dict[str, np.ndarray]:
        return {"observation": self._state, "achieved_goal": self._state, "desired_goal": self._goal}
