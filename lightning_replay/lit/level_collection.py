# SPDX-License-Identifier: Apache-2.0
"""Collects rollouts of chosen levels, with returns normalized on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import lightning as L
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_replay.agents.interfaces import rollout_agent
from lightning_replay.levels import LevelSelector
from lightning_replay.levels.environments import LevelVectorWrapper
from lightning_replay.levels.scores import Discounting
from lightning_replay.lit.collection import Collector, Episode
from lightning_replay.lit.rollouts import act_with_value_on, acting, batch_of_one, values_of
from lightning_replay.options import ABOVE_ZERO, checked_number, checked_share
from lightning_replay.state import Stateful


class ReturnNormalization(Stateful, Discounting):
    """``r / sqrt(var(R) + 1e-8)``, R the discounted sum of rewards of each running episode, clipped to ``±clip``.

    The variance is over all R of all environments and steps so far. Prioritized Level Replay trains on such rewards
    (appendix of https://arxiv.org/abs/2010.03934). Values and scores of levels are then in these units and drift with
    the variance.

    Args:
        discount: γ of the sum, the agent's.
        clip: Largest magnitude of a normalized reward.

    Example:
        >>> normalization = ReturnNormalization(discount=0.5)
        >>> normalization(np.array([2.0, 0.0]), np.array([False, False]))  # R is 2 and 0, its variance 1
        array([2., 0.], dtype=float32)
    """

    # Not the running sums, which belong to episodes that are not resumed.
    saved_attributes: tuple[str, ...] = ("_count", "_mean", "_squares")

    def __init__(self, discount: float = 0.999, clip: float = 10.0) -> None:
        self.discount: float = checked_share("discount", discount)
        self.clip: float = checked_number("clip", clip, ABOVE_ZERO)
        self._count = 0
        self._mean = self._squares = 0.0
        self._returns = np.zeros(0)

    @property
    def scale(self) -> float:
        """Divisor of the rewards, 1 before the first."""
        return float(np.sqrt(self._squares / self._count + 1e-8)) if self._count else 1.0

    def __call__(self, reward: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Adds one step's rewards to the returns and normalizes them, float32 ``[N]``. ``done`` ends episodes."""
        if len(self._returns) != len(reward):
            self._returns = np.zeros(len(reward))
        self._returns = self.discount * self._returns + reward
        # Moments of this step's returns are merged into those so far, without cancellation (Chan et al. 1979).
        mean = float(self._returns.mean())
        count = len(reward)
        together = self._count + count
        shift = mean - self._mean
        self._squares += float(((self._returns - mean) ** 2).sum()) + shift**2 * self._count * count / together
        self._mean += shift * count / together
        self._count = together
        self._returns[done] = 0.0
        return np.clip(reward / self.scale, -self.clip, self.clip).astype(np.float32)

    def restart(self) -> None:
        """Begins new episodes. The variance stays."""
        self._returns = np.zeros(0)


_PLAYED_LEVELS = 10_000
Column = TypeVar("Column")


class PlayedStep(NamedTuple, Generic[Column]):
    """A step of all environments: arrays ``[N]``, and of a whole rollout tensors ``[N, T]``."""

    reward: Column  #: Reward that the agent learns from, normalized if there is a normalization.
    terminated: Column
    truncated: Column
    done: Column
    level_id: Column  #: Level that the step was made on.
    is_trained: Column  #: Whether the agent may learn from the episode.
    raw_reward: Column  #: Reward as the environment gave it.


class LevelCollection(Collector):
    """Clock and state of collecting rollouts, in environments that are built when they are needed."""

    saved_attributes: tuple[str, ...] = (*Collector.saved_attributes, "_played")
    saved_parts: tuple[str, ...] = ("_normalization",)
    env_steps: int
    rewards: Tensor  #: Of the newest rollout, as the environments gave them, float64 ``[N, T, 1]``.

    def __init__(
        self,
        levels: LevelSelector,
        environments: Callable[..., LevelVectorWrapper],
        seed: int | None,
        normalization: ReturnNormalization | None = None,
    ) -> None:
        super().__init__(seed, kept_episodes=100_000)
        self._levels = levels
        self._make = environments
        self._normalization = normalization
        self._played: dict[int, None] = {}  # levels in the order of the last episode on each

    @property
    def played_levels(self) -> list[int]:
        """Levels that were played, in the order of the last episode on each."""
        return list(self._played)

    def collect(self, agent: L.LightningModule, length: int) -> TensorDictBase:
        """Plays ``length`` steps in every environment with the agent's policy as it is.

        Returns:
            TensorDict ``[N, length]`` on the CPU: observation; the columns of ``agent.act_with_value``, such as action,
            action_log_prob, logits, state_value; level_id int64, the level of the observation; is_trained bool, whether
            the agent may learn from the episode; ``next`` reward (normalized), state_value, terminated, truncated,
            done, each ``[N, length, 1]``.
        """
        policy = rollout_agent(agent)
        recorded: list[dict[str, Tensor]] = []
        played: list[PlayedStep[np.ndarray]] = []
        cut: list[tuple[int, int, Any]] = []  # environment, step and last observation where time ran out
        with acting(policy):
            if self._vector is None:
                self._begin()
            for step in range(length):
                row, action = act_with_value_on(policy, self._observation, self._read_actions)
                # If an episode ends, this step also chooses the next level and begins it.
                following, reward, terminated, truncated, infos = self._vector.step(action)
                done = terminated | truncated
                level_id = infos["step_level_id"]
                trained = self._normalization(reward, done) if self._normalization else reward
                is_trained = self._is_trained.copy()
                recorded.append(row)
                played.append(PlayedStep(trained, terminated, truncated, done, level_id, is_trained, reward))
                self._observation = following
                self.env_steps += len(reward)
                ended = self._count_step(reward, done)
                if not ended:
                    continue
                cut += [(i, step, infos["final_obs"][i]) for i in np.flatnonzero(truncated & ~terminated).tolist()]
                self.episodes.extend(
                    Episode(self.env_steps, total, steps, int(level_id[i])) for i, total, steps in ended
                )
                self._start_episodes([i for i, _, _ in ended])
            rollout, self.rewards = _joined(recorded, played)
            # Values of the observations that followed: from the next row, or from the last one if time ran out.
            found = values_of(policy, [self._observation, *(batch_of_one(last) for _, _, last in cut)])
        values = torch.cat([rollout["state_value"][:, 1:], found[: self._num_envs].unsqueeze(1)], dim=1)
        for (i, step, _), value in zip(cut, found[self._num_envs :], strict=True):
            values[i, step] = value
        rollout["next", "state_value"] = values.masked_fill(rollout["next", "terminated"], 0.0)
        return rollout

    def _begin(self) -> None:
        self._run(self._make(seed=int(self._generator.integers(2**31))))
        self._is_trained = np.ones(self._num_envs, dtype=np.bool_)
        self._start_episodes(range(self._num_envs))
        if self._normalization is not None:
            self._normalization.restart()

    def _start_episodes(self, began: Iterable[int]) -> None:
        level_ids = self._vector.level_ids.tolist()
        for i in began:
            self._is_trained[i] = self._levels.trains_on(self._vector.actors[i], level_ids[i])
            self._played.pop(level_ids[i], None)  # The level moves to the end.
            self._played[level_ids[i]] = None
        while len(self._played) > _PLAYED_LEVELS:
            del self._played[next(iter(self._played))]


def _joined(recorded: list[dict[str, Tensor]], played: list[PlayedStep[np.ndarray]]) -> tuple[TensorDict, Tensor]:
    # Concatenated arrays are joined in a fifth of the time of np.stack.
    steps = PlayedStep[Tensor]._make(
        torch.from_numpy(np.concatenate(column).reshape(len(played), -1).T.copy())
        for column in zip(*played, strict=True)
    )
    shape = steps.reward.shape
    ends = {"done": steps.done, "terminated": steps.terminated, "truncated": steps.truncated}
    following = {name: column.unsqueeze(-1) for name, column in {"reward": steps.reward.float(), **ends}.items()}
    columns: dict[str, Any] = {key: torch.stack([row[key] for row in recorded], dim=1) for key in recorded[0]}
    columns |= {"next": TensorDict(following, shape), "level_id": steps.level_id.long(), "is_trained": steps.is_trained}
    return TensorDict(columns, shape), steps.raw_reward.double().unsqueeze(-1)
