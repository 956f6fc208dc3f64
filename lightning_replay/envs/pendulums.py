# SPDX-License-Identifier: Apache-2.0
"""Thousands of pendulums in one tensor, on any device: a vectorized simulator in plain torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_replay.options import checked_count, checked_number

_MAX_SPEED = 8.0
_MAX_TORQUE = 2.0
_SECONDS = 0.05  # Duration of one step.


class Pendulums:
    """Simulates ``Pendulum-v1`` of Gymnasium for thousands of environments at once. Every value is a tensor.

    Dynamics, rewards, observations, and starts are as in Gymnasium, in float32. An episode is truncated after
    ``max_steps``. Its environment is reset in the same step, and the last observation is in
    ``info["final_observation"]``. No step waits for the device.

    Args:
        num_envs: Number of pendulums.
        device: Device of all tensors, such as ``"cuda"``.
        max_steps: Steps of an episode.
        staggered: Whether the first episodes are shorter by random numbers of steps, so that not all end at once.
        noise: Standard deviation of the noise in the actor's observation. With a number, observations are dictionaries:
            ``observation`` with noise, and ``critic_observation`` without. Without one, they are tensors without noise.

    Action: float32 ``[num_envs, 1]``, the torque in [-2, 2].

    Observation: float32 ``[num_envs, 3]``: cosine and sine of the angle, and the speed.

    Example:
        >>> envs = Pendulums(num_envs=4096)
        >>> observation, info = envs.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = envs.step(torch.zeros(4096, 1))
        >>> observation.shape, reward.shape, info["final_observation"].shape
        (torch.Size([4096, 3]), torch.Size([4096]), torch.Size([4096, 3]))
    """

    def __init__(
        self,
        num_envs: int,
        device: str | torch.device = "cpu",
        *,
        max_steps: int = 200,
        staggered: bool = False,
        noise: float | None = None,
    ) -> None:
        self.num_envs: int = checked_count("num_envs", num_envs)
        self.device: torch.device = torch.device(device)
        self.max_steps: int = checked_count("max_steps", max_steps)
        self.staggered = staggered
        self.noise: float | None = None if noise is None else checked_number("noise", noise, 0.0)
        high = np.array([1.0, 1.0, _MAX_SPEED], np.float32)
        exact = spaces.Box(-high, high)
        both = spaces.Dict({"observation": spaces.Box(-np.inf, np.inf, (3,)), "critic_observation": exact})
        self.single_observation_space: spaces.Space[Any] = exact if noise is None else both
        self.single_action_space: spaces.Space[Any] = spaces.Box(-_MAX_TORQUE, _MAX_TORQUE, (1,))
        self._generator = torch.Generator(self.device)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode in each environment. The seed determines all that is drawn later."""
        if seed is not None:
            self._generator.manual_seed(seed)
        self._angle, self._speed = self._starts()
        self._age = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        if self.staggered:
            self._age.random_(self.max_steps, generator=self._generator)
        return self._observed(self._angle, self._speed), {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Takes a step in each environment, and resets the environments whose episodes end."""
        torque = action.reshape(self.num_envs).to(torch.float32).clamp(-_MAX_TORQUE, _MAX_TORQUE)
        reward = -(self._angle.square() + 0.1 * self._speed.square() + 0.001 * torque.square())
        push = 15.0 * self._angle.sin() + 3.0 * torque
        self._speed = (self._speed + push * _SECONDS).clamp(-_MAX_SPEED, _MAX_SPEED)
        self._angle = torch.remainder(self._angle + self._speed * _SECONDS + math.pi, 2.0 * math.pi) - math.pi
        self._age += 1

        truncated = self._age >= self.max_steps
        last = self._observed(self._angle, self._speed)
        angle, speed = self._starts()
        first = self._observed(angle, speed)
        self._angle = torch.where(truncated, angle, self._angle)
        self._speed = torch.where(truncated, speed, self._speed)
        self._age = self._age * ~truncated
        ended = truncated[:, None]
        if isinstance(last, dict):
            observation: Any = {name: torch.where(ended, first[name], last[name]) for name in last}
        else:
            observation = torch.where(ended, first, last)
        return observation, reward, torch.zeros_like(truncated), truncated, {"final_observation": last}

    def close(self) -> None:
        """Does nothing, because nothing is open."""

    def _starts(self) -> tuple[Tensor, Tensor]:
        uniform = (
            torch.rand(2, self.num_envs, dtype=torch.float32, generator=self._generator, device=self.device) * 2.0 - 1.0
        )
        return uniform[0] * math.pi, uniform[1]

    def _observed(self, angle: Tensor, speed: Tensor) -> Any:
        exact = torch.stack([angle.cos(), angle.sin(), speed], dim=1)
        if self.noise is None:
            return exact
        noise = torch.randn(exact.shape, dtype=exact.dtype, generator=self._generator, device=self.device)
        return {"observation": exact + self.noise * noise, "critic_observation": exact}
