# SPDX-License-Identifier: Apache-2.0
"""Steps a vector of environments and turns the steps into rows for a replay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from lightning_replay.agents.parameterized_actions import ParameterizedActions, is_parameterized
from lightning_replay.lit.info_columns import InformationColumns
from lightning_replay.lit.policy import Action, ActionReader
from lightning_replay.lit.task_assignment import TaskAssignment

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
    stored as float32, other dtypes as they come. Each row carries ``trajectory``, a number no other episode has, and
    ``task``, that of the running episode, where environments have tasks.

    Args:
        environments: a vector that resets in the same step.
        seed: of the first reset.
        first_trajectory: number of the first episode; the others count on from there.
        assignment: of tasks to environments; ``None`` where there are none.
        information: what is read of the infos.
    """

    def __init__(
        self,
        environments: VectorEnv,
        seed: int,
        first_trajectory: int = 0,
        assignment: TaskAssignment | None = None,
        information: InformationColumns | None = None,
    ) -> None:
        self.environments = environments
        self._assignment = assignment
        self._information = information or InformationColumns()
        space = environments.single_action_space
        self._actions = ParameterizedActions.of(space) if is_parameterized(space) else None
        self.read_actions = ActionReader(space)
        count = environments.num_envs
        if assignment is not None:
            assignment.begin(environments)
        self.observation, _ = environments.reset(seed=seed)
        self.next_trajectory = first_trajectory + count
        self._trajectory = np.arange(first_trajectory, first_trajectory + count)
        self._return = np.zeros(count)
        self._length = np.zeros(count, dtype=np.int64)
        self._pending: list[dict[str | tuple[str, str], np.ndarray]] = []

    @property
    def num_envs(self) -> int:
        """Rows per step."""
        return self.environments.num_envs

    @property
    def pending_rows(self) -> int:
        """Rows not taken yet."""
        return len(self._pending) * self.num_envs

    def step(self, action: Action, env_steps: int) -> list[Episode]:
        """Applies one action per environment; returns the episodes this ended."""
        taken = action if self._actions is None else self._actions.for_environments(*action)
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
        self._return += reward
        self._length += 1
        return self._finish(np.flatnonzero(done), env_steps) if done.any() else []

    def _finish(self, ended: np.ndarray, env_steps: int) -> list[Episode]:
        episodes = [Episode(env_steps, float(self._return[i]), int(self._length[i])) for i in ended]
        if self._assignment is not None:
            self._assignment.finish(ended, [episode.episode_return for episode in episodes])
        self._return[ended] = 0.0
        self._length[ended] = 0
        self._trajectory[ended] = np.arange(self.next_trajectory, self.next_trajectory + len(ended))
        self.next_trajectory += len(ended)
        return episodes

    def take_rows(self, most: int) -> TensorDict:
        """The steps since the last call as ``[N]`` rows in order of time, at most the first ``most``."""
        columns: dict[str, Tensor | TensorDict] = {}
        groups: dict[str, dict[str, Tensor]] = {}
        for key in self._pending[0]:
            column = _as_column(np.concatenate([step[key] for step in self._pending])[:most])
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

    def close(self) -> None:
        """Closes the environments."""
        self.environments.close()


def _as_column(values: np.ndarray) -> Tensor:
    column = torch.from_numpy(values)
    return column.float() if column.is_floating_point() else column
