# SPDX-License-Identifier: Apache-2.0
"""Steps a vector of environments and turns the steps into rows for a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

__all__ = ["Episode", "Rollout"]


@dataclass(frozen=True)
class Episode:
    """A finished training episode: the environment step it ended at, its return and its length."""

    env_steps: int
    episode_return: float
    length: int


class Rollout:
    """Environments in progress. Call :meth:`step` per action, :meth:`take_rows` before the replay is drawn from.

    The stored next observation at an episode's end is the episode's last one, not the first of the next. Floats are
    stored as float32, other dtypes as they come. Each row carries ``trajectory``, a number no other episode has.

    Args:
        environments: a vector that resets in the same step.
        seed: of the first reset.
        first_trajectory: number of the first episode; the others count on from there.
    """

    def __init__(self, environments: VectorEnv, seed: int, first_trajectory: int = 0) -> None:
        self.environments = environments
        count = environments.num_envs
        self.observation, _ = environments.reset(seed=seed)
        self.next_trajectory = first_trajectory + count
        self._trajectory = np.arange(first_trajectory, first_trajectory + count)
        self._return = np.zeros(count)
        self._length = np.zeros(count, dtype=np.int64)
        self._pending: list[dict[str, np.ndarray]] = []

    @property
    def num_envs(self) -> int:
        """Rows per step."""
        return self.environments.num_envs

    @property
    def pending_rows(self) -> int:
        """Rows not taken yet."""
        return len(self._pending) * self.num_envs

    def step(self, action: np.ndarray, env_steps: int) -> list[Episode]:
        """Applies one action per environment; returns the episodes this ended."""
        following, reward, terminated, truncated, infos = self.environments.step(action)
        done = terminated | truncated
        last = following
        if done.any():
            last = following.copy()
            last[done] = np.stack(list(infos["final_obs"][done]))
        self._pending.append(
            {
                "observation": self.observation,
                "action": action,
                "next_observation": last,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "done": done,
                "trajectory": self._trajectory.copy(),
            }
        )
        self.observation = following
        self._return += reward
        self._length += 1
        return self._finish(np.flatnonzero(done), env_steps) if done.any() else []

    def _finish(self, ended: np.ndarray, env_steps: int) -> list[Episode]:
        episodes = [Episode(env_steps, float(self._return[i]), int(self._length[i])) for i in ended]
        self._return[ended] = 0.0
        self._length[ended] = 0
        self._trajectory[ended] = np.arange(self.next_trajectory, self.next_trajectory + len(ended))
        self.next_trajectory += len(ended)
        return episodes

    def take_rows(self, most: int) -> TensorDict:
        """The steps since the last call as ``[N]`` rows in order of time, at most the first ``most``."""
        columns: dict[str, Any] = {
            key: _as_column(np.concatenate([step[key] for step in self._pending])[:most]) for key in self._pending[0]
        }
        self._pending.clear()
        following = {"observation": columns.pop("next_observation")}
        for key in ("reward", "terminated", "truncated", "done"):
            following[key] = columns.pop(key).unsqueeze(-1)
        size = columns["trajectory"].shape
        columns["next"] = TensorDict(following, batch_size=size)
        return TensorDict(columns, batch_size=size)

    def close(self) -> None:
        """Closes the environments."""
        self.environments.close()


def _as_column(values: np.ndarray) -> Tensor:
    column = torch.from_numpy(values)
    return column.float() if column.is_floating_point() else column
