# SPDX-License-Identifier: Apache-2.0
"""Plays chosen levels and turns the steps into rollouts with the level of each step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lightning_replay.levels import LevelSelector
from lightning_replay.levels.environments.level_wrappers import LevelVectorWrapper
from lightning_replay.lit.collectors.vector import Episode
from lightning_replay.lit.policy import ActionReader, act_with_value_on, acting, values_of
from lightning_replay.lit.return_normalization import ReturnNormalization

__all__ = ["LevelCollection", "LevelEpisode"]

_PLAYED_LEVELS = 10_000


@dataclass(frozen=True)
class LevelEpisode(Episode):
    """A finished training episode and the level it was played on; its return is that of the unchanged rewards."""

    level_id: int


class LevelCollection:
    """Clock and state of collecting rollouts. Environments are built at the first step, and anew after :meth:`close`.

    New environments begin new episodes: every actor chooses a level first, then what it played before is abandoned.

    Args:
        levels: chooses the level of each episode.
        environments: builds the vector of environments from the seed of their own generators.
        seed: of those seeds.
        normalization: of the rewards; ``None`` leaves them.
    """

    def __init__(
        self,
        levels: LevelSelector,
        environments: Callable[[int], LevelVectorWrapper],
        seed: int | None,
        normalization: ReturnNormalization | None = None,
    ) -> None:
        self._levels = levels
        self._make = environments
        self._generator = np.random.default_rng(seed)
        self._normalization = normalization
        self._environments: LevelVectorWrapper | None = None
        self._observation = np.zeros(0)
        self._return = np.zeros(0)
        self._length = np.zeros(0, dtype=np.int64)
        self._is_trained = np.zeros(0, dtype=np.bool_)
        self._played: dict[int, None] = {}  # in order of the last episode's start
        self.env_steps = 0
        self.episodes: deque[LevelEpisode] = deque(maxlen=100_000)

    @property
    def played_levels(self) -> list[int]:
        """Different levels played so far, at most the 10,000 played last."""
        return list(self._played)

    @property
    def recent_return(self) -> float:
        """Mean return of the last ten episodes, NaN before the first."""
        recent = [episode.episode_return for episode in list(self.episodes)[-10:]]
        return float(np.mean(recent)) if recent else math.nan

    def collect(self, agent: L.LightningModule, length: int) -> TensorDictBase:
        """Plays ``length`` steps in every environment with the agent's policy as it is.

        Returns:
            TensorDict ``[N, length]`` on the CPU: observation; what ``agent.act_with_value`` recorded, such as action,
            action_log_prob, logits, state_value; level_id int64, the level under which the observation was made;
            is_trained bool, whether the learner may learn from the episode; of ``next`` reward, as normalised,
            state_value, terminated, truncated, done, each ``[N, length, 1]``.
        """
        rows: list[TensorDictBase] = []
        cut: list[tuple[int, int, np.ndarray]] = []  # environment, step and last observation where time ran out
        with acting(agent):
            environments = self._begin() if self._environments is None else self._environments
            for step in range(length):
                row = act_with_value_on(agent, self._observation, self._read_actions)
                following, reward, terminated, truncated, infos = environments.step(row["action"].numpy())
                for i in np.flatnonzero(truncated & ~terminated):
                    cut.append((int(i), step, infos["final_obs"][i]))
                rows.append(self._note(row, reward, terminated, truncated, infos["step_level_id"]))
                self._observation = following
            rollout = torch.stack(rows, dim=1)
            self._add_next_values(agent, rollout, cut)
        return rollout

    def _begin(self) -> LevelVectorWrapper:
        environments = self._make(int(self._generator.integers(2**31)))
        try:
            self._observation, _ = environments.reset()
        except Exception:
            environments.close()
            raise
        self._environments = environments
        self._read_actions = ActionReader(environments.single_action_space)
        count = environments.num_envs
        self._return, self._length = np.zeros(count), np.zeros(count, dtype=np.int64)
        self._is_trained = np.ones(count, dtype=np.bool_)
        self._start_episodes(np.arange(count))
        if self._normalization is not None:
            self._normalization.restart()
        return environments

    def _start_episodes(self, began: np.ndarray) -> None:
        """Records the levels of episodes that begin, and whether they are trained on or only scored."""
        assert self._environments is not None
        actors, level_ids = self._environments.actors, self._environments.level_ids.tolist()
        for i in began:
            self._is_trained[i] = self._levels.trains_on(actors[i], level_ids[i])
            self._played.pop(level_ids[i], None)
            self._played[level_ids[i]] = None
        while len(self._played) > _PLAYED_LEVELS:
            del self._played[next(iter(self._played))]

    def _note(
        self,
        row: TensorDictBase,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        level_id: np.ndarray,
    ) -> TensorDictBase:
        """Adds what a step gave; counts it and the episodes it ended."""
        done = terminated | truncated
        trained = reward if self._normalization is None else self._normalization(reward, done)
        columns = {"reward": trained.astype(np.float32), "terminated": terminated, "truncated": truncated, "done": done}
        row["next"] = TensorDict(
            {name: torch.from_numpy(np.asarray(column)).unsqueeze(-1) for name, column in columns.items()}, row.shape
        )
        row["level_id"] = torch.from_numpy(level_id.astype(np.int64))
        row["is_trained"] = torch.from_numpy(self._is_trained.copy())
        self.env_steps += len(reward)
        self._return += reward
        self._length += 1
        ended = np.flatnonzero(done)
        for i in ended:
            self.episodes.append(
                LevelEpisode(self.env_steps, float(self._return[i]), int(self._length[i]), int(level_id[i]))
            )
        self._return[ended] = 0.0
        self._length[ended] = 0
        self._start_episodes(ended)
        return row

    def _add_next_values(
        self, agent: L.LightningModule, rollout: TensorDictBase, cut: list[tuple[int, int, np.ndarray]]
    ) -> None:
        """Values of the observations that followed: the next row's, or the last observation's where time ran out."""
        behind = [self._observation, *(last[None] for _, _, last in cut)]
        found = values_of(agent, np.concatenate(behind))
        count = len(self._observation)
        values = torch.cat([rollout["state_value"][:, 1:], found[:count].unsqueeze(1)], dim=1)
        for (i, step, _), value in zip(cut, found[count:], strict=True):
            values[i, step] = value
        rollout["next", "state_value"] = values.masked_fill(rollout["next", "terminated"], 0.0)

    def close(self) -> None:
        """Closes the environments; their episodes are given up when the next ones begin."""
        if self._environments is not None:
            self._environments.close()
            self._environments = None

    def state_dict(self) -> dict[str, Any]:
        """Clock, generator, moments of the returns and the levels played: a tensor and plain values."""
        return {
            "env_steps": self.env_steps,
            "generator": self._generator.bit_generator.state,
            "normalization": None if self._normalization is None else self._normalization.state_dict(),
            "played": torch.tensor(self.played_levels, dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; environments begin anew."""
        self.close()
        self.env_steps = state["env_steps"]
        self._generator.bit_generator.state = state["generator"]
        self.episodes.clear()
        self._played = dict.fromkeys(state["played"].tolist())
        if self._normalization is not None and state["normalization"] is not None:
            self._normalization.load_state_dict(state["normalization"])
