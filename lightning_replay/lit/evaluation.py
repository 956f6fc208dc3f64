# SPDX-License-Identifier: Apache-2.0
"""Returns of an agent that does not explore, in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import gymnasium
import lightning as L
import torch
from torch import Tensor

from lightning_replay.agents.parameterized_actions import ParameterizedActions, is_parameterized
from lightning_replay.envs.step_check import checked_reset, checked_step
from lightning_replay.lit.policy import ActionReader, act_on, acting

if TYPE_CHECKING:
    from lightning_replay.lit.datamodules.replay import ReplayDataModule

__all__ = ["EvaluationStream", "episode_returns"]


def episode_returns(agent: L.LightningModule, environment: gymnasium.Env, episodes: int, seed: int) -> Iterator[float]:
    """Plays whole episodes and yields the return of each; episode ``i`` starts from ``seed + i``."""
    space = environment.action_space
    actions = ParameterizedActions.of(space) if is_parameterized(space) else None
    read = ActionReader(space)
    for episode in range(episodes):
        observation, _ = checked_reset(environment.reset(seed=seed + episode), environment)
        total, done = 0.0, False
        with acting(agent):
            while not done:
                given = act_on(agent, observation[None], False, read)
                action = given[0] if actions is None else actions.for_one(*given)
                observation, reward, terminated, truncated, _ = checked_step(environment.step(action), environment)
                total += float(reward)
                done = terminated or truncated
        yield total


class EvaluationStream:
    """Validation data for ``trainer.validate``: one item ``{"return": ...}`` per episode played.

    Args:
        source: the data module whose environment and agent are evaluated.
        episodes: how many.
        seed: of the first episode.
    """

    def __init__(self, source: ReplayDataModule, episodes: int, seed: int = 10_000) -> None:
        self._source = source
        self._episodes = episodes
        self._seed = seed

    def __len__(self) -> int:
        return self._episodes

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        assert self._source.trainer is not None
        agent = self._source.trainer.lightning_module
        environment = self._source.make_environment()
        try:
            for episode_return in episode_returns(agent, environment, self._episodes, self._seed):
                yield {"return": torch.tensor(episode_return, device=agent.device)}
        finally:
            environment.close()
