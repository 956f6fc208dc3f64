# SPDX-License-Identifier: Apache-2.0
"""Steps of a level vector as lists, for loops whose vectors step environments in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import iterate
from tensordict import TensorDict
from torch import Tensor

from lightning_replay.levels.environments import LevelVectorWrapper, of_rows
from lightning_replay.options import check_kind


class StepLists:
    """Steps of a level vector as lists with an entry for each environment, as torch-ac's ``ParallelEnv`` returns them.

    torch-ac steps environments in other processes, which cannot choose levels. Build the vector by
    ``make_level_vector(..., asynchronous=True)``: it has such processes, and the process that trains chooses. Then set
    ``algo.env`` and ``algo.obs``, see the page on migrating.

    Args:
        envs: Vector whose environments play levels.

    Example:
        >>> from lightning_replay.levels import SequentialLevels
        >>> from lightning_replay.levels.environments import make_level_vector
        >>> steps = StepLists(make_level_vector("CartPole-v1", 2, SequentialLevels(range(7, 20))))
        >>> len(steps.reset())
        2
        >>> for _ in range(3):
        ...     observations, rewards, terminated, truncated, infos = steps.step([0, 1])
        >>> steps.rollout(torch.zeros(3, 2), torch.zeros(2))["level_id"].tolist()
        [[7, 7, 7], [8, 8, 8]]
    """

    def __init__(self, envs: LevelVectorWrapper) -> None:
        check_kind("envs", envs, LevelVectorWrapper, "the vector that make_level_vector or LevelVectorWrapper returns")
        self.envs: LevelVectorWrapper = envs
        self._steps: list[list[np.ndarray]] = []  # Level, reward, and flags of each step, [num_envs] each.

    def reset(self) -> list[Any]:
        """Begins an episode on a drawn level everywhere, and returns the observations."""
        self._steps = []
        return [*iterate(self.envs.observation_space, self.envs.reset()[0])]

    def step(self, actions: Sequence[Any] | np.ndarray) -> tuple[list[Any], ...]:
        """Takes a step, and returns observations, rewards, ``terminated``, ``truncated``, and infos."""
        observations, *results, infos = self.envs.step(np.asarray(actions))
        self._steps.append([infos["step_level_id"], *map(np.copy, results)])
        each = [of_rows(infos, np.arange(self.envs.num_envs) == row) for row in range(self.envs.num_envs)]
        return [*iterate(self.envs.observation_space, observations)], *(one.tolist() for one in results), each

    def rollout(self, state_value: Tensor, last_value: Tensor) -> TensorDict:
        """Returns the steps since the last call, for :func:`~lightning_replay.levels.update_rollout`.

        Args:
            state_value: Values of the observations that were acted on, ``[T, num_envs]`` as torch-ac keeps them.
            last_value: Values of the newest observations, ``[num_envs]``.

        Returns:
            TensorDict ``[num_envs, T]`` with ``level_id``. At a truncated end the next value is the value before it.

        Raises:
            ValueError: No steps, or values of another number of steps or environments. The steps are kept.
        """
        if not self._steps:
            raise ValueError("no step was taken since the last rollout; call step() first")
        level, reward, terminated, truncated = (
            torch.from_numpy(np.stack(column, 1)) for column in zip(*self._steps, strict=True)
        )
        value = state_value.detach().cpu().T
        if value.shape != level.shape or last_value.numel() != len(level):
            raise ValueError(
                f"state_value is {list(state_value.shape)} and last_value {list(last_value.shape)}; give "
                f"[{level.shape[1]}, {len(level)}] and [{len(level)}], values of the steps since the last rollout"
            )
        self._steps = []
        after = torch.cat([value[:, 1:], last_value.detach().cpu().reshape(-1, 1)], 1)
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        following = {"reward": reward, "state_value": torch.where(truncated, value, after), **ends}
        return TensorDict({"level_id": level, "state_value": value, "next": following}, level.shape)
