# SPDX-License-Identifier: Apache-2.0
"""Steps a vector of environments: episode statistics, rows for a replay, and the clock of either kind of collecting."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from lightning_replay.lit.info_columns import InformationColumns
from lightning_replay.lit.policy import Action, ActionReader
from lightning_replay.lit.task_assignment import TaskAssignment

__all__ = ["Collector", "Episode", "Rollout", "RunningEpisodes"]


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
        kept_episodes: finished episodes that are remembered.

    Attributes:
        env_steps: environment steps collected.
        episodes: the newest that finished.
    """

    def __init__(self, seed: int | None, kept_episodes: int) -> None:
        self._generator = np.random.default_rng(seed)
        self.env_steps = 0
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
        """Clock and generator."""
        return {"env_steps": self.env_steps, "generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; environments are built anew."""
        self.close()
        self.env_steps = state["env_steps"]
        self._generator.bit_generator.state = state["generator"]
        self.episodes.clear()


class RunningEpisodes:
    """Environments in progress, the observation, return and length of the episode that each of them plays.

    Args:
        environments: reset here; closed if that raises.
        seed: of the reset.
    """

    def __init__(self, environments: VectorEnv, seed: int | None = None) -> None:
        self.environments = environments
        self.num_envs: int = environments.num_envs
        self.read_actions = ActionReader(environments.single_action_space)
        try:
            self.observation, _ = environments.reset(seed=seed)
        except Exception:
            environments.close()
            raise
        self._return = np.zeros(self.num_envs)
        self._length = np.zeros(self.num_envs, dtype=np.int64)

    def count_step(self, reward: np.ndarray, done: np.ndarray) -> list[tuple[int, float, int]]:
        """Adds one step; returns environment, return and length of each episode that it ended."""
        self._return += reward
        self._length += 1
        if not done.any():
            return []
        ended = [(int(i), float(self._return[i]), int(self._length[i])) for i in np.flatnonzero(done)]
        self._return[done] = 0.0
        self._length[done] = 0
        return ended

    def close(self) -> None:
        """Closes the environments."""
        self.environments.close()


class Rollout(RunningEpisodes):
    """Environments in progress. Call :meth:`step` per action, :meth:`take_rows` before the replay is drawn from.

    The stored next observation at an episode's end is the episode's last one, not the first of the next. Floats are
    stored as float32, other dtypes as they come. Each row carries ``trajectory``, a number no other episode has, and
    ``task``, that of the running episode, where environments have tasks.

    Args:
        environments: a vector that resets in the same step.
        seed: of the first reset.
        first_trajectory: number of the first episode; the others count on from there.
        assignment: of tasks to environments; ``None`` where there are none.
        information: the columns that are read from infos.

    Attributes:
        next_trajectory: number of the next episode that begins.
    """

    def __init__(
        self,
        environments: VectorEnv,
        seed: int,
        first_trajectory: int = 0,
        assignment: TaskAssignment | None = None,
        information: InformationColumns | None = None,
    ) -> None:
        if assignment is not None:
            assignment.begin(environments)
        super().__init__(environments, seed)
        self._assignment = assignment
        self._information = information or InformationColumns()
        self.next_trajectory = first_trajectory + self.num_envs
        self._trajectory = np.arange(first_trajectory, self.next_trajectory)
        self._pending: list[dict[str | tuple[str, str], np.ndarray]] = []

    @property
    def pending_rows(self) -> int:
        """Rows not taken yet."""
        return len(self._pending) * self.num_envs

    def step(self, action: Action, env_steps: int) -> list[Episode]:
        """Applies one action per environment; returns the episodes this ended."""
        actions = self.read_actions.actions
        taken = action if actions is None else actions.for_environments(*action)
        following, reward, terminated, truncated, infos = self.environments.step(taken)
        done = terminated | truncated
        last = following
        if done.any():
            last = following.copy()
            last[done] = np.stack(list(infos["final_obs"][done]))
        row: dict[str | tuple[str, str], np.ndarray] = {
            "observation": self.observation,
            ("next", "observation"): last,
            ("next", "reward"): reward,
            ("next", "terminated"): terminated,
            ("next", "truncated"): truncated,
            ("next", "done"): done,
            "trajectory": self._trajectory.copy(),
        }
        if isinstance(action, tuple):
            row["action", "discrete"], row["action", "parameters"] = action
        else:
            row["action"] = action
        if self._assignment is not None:
            row["task"] = self._assignment.running.copy()
        if self._information.keys:
            row |= {("next", key): column for key, column in self._information.read(infos, done).items()}
        self._pending.append(row)
        self.observation = following
        ended = self.count_step(reward, done)
        if not ended:
            return []
        if self._assignment is not None:
            self._assignment.finish(np.flatnonzero(done), [episode_return for _, episode_return, _ in ended])
        self._trajectory[done] = np.arange(self.next_trajectory, self.next_trajectory + len(ended))
        self.next_trajectory += len(ended)
        return [Episode(env_steps, episode_return, length) for _, episode_return, length in ended]

    def take_rows(self, most: int) -> TensorDict:
        """The steps since the last call as ``[N]`` rows in order of time, at most the first ``most``."""
        columns: dict[str, Tensor | TensorDict] = {}
        groups: dict[str, dict[str, Tensor]] = {}
        for key in self._pending[0]:
            column = torch.from_numpy(np.concatenate(list(map(itemgetter(key), self._pending)))[:most])
            if column.is_floating_point():
                column = column.float()
            if isinstance(key, str):
                columns[key] = column
            else:
                is_flat = key[0] == "next" and key[1] != "observation"
                groups.setdefault(key[0], {})[key[1]] = column.unsqueeze(-1) if is_flat else column
        self._pending.clear()
        size = columns["trajectory"].shape
        for name, group in groups.items():
            columns[name] = TensorDict(group, batch_size=size)
        return TensorDict(columns, batch_size=size)
