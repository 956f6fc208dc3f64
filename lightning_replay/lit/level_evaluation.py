# SPDX-License-Identifier: Apache-2.0
"""The test protocol: one episode on each of some levels under the policy as it acts in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_replay.levels import SequentialLevels
from lightning_replay.levels.environments.level_wrappers import make_level_vector
from lightning_replay.lit.environments import make_environment
from lightning_replay.lit.policy import ActionReader, acting, as_array, as_input

if TYPE_CHECKING:
    from lightning_replay.lit.datamodules.levels import LevelDataModule

__all__ = ["LevelEvaluationStream", "level_returns", "stochastic_policy"]

Policy = Callable[[np.ndarray], Any]


def level_returns(
    policy: Policy,
    env: str | Callable[[], gymnasium.Env],
    level_ids: Sequence[int],
    num_envs: int = 16,
    seed: int | None = None,
) -> np.ndarray:
    """Return of one episode on each level, float64 ``[L]``.

    Args:
        policy: actions ``[N, ...]`` for observations ``[N, ...]``, a tensor or an array.
        env: Gymnasium id, or a callable that builds one environment.
        level_ids: distinct; each is played once.
        num_envs: episodes played at a time.
        seed: of the environments' own randomness, where levels are set by ``set_level``.

    Raises:
        TypeError, ValueError: the policy returned no actions of the environment's space.

    Example:
        >>> level_returns(lambda observations: np.zeros(len(observations), dtype=int), "CartPole-v1", [3, 4, 5])
        array([9., 8., 9.])
    """
    count = min(num_envs, len(level_ids))
    environments = make_level_vector(env, count, SequentialLevels(level_ids), seed=seed, check=False)
    source = policy.source if isinstance(policy, _StochasticPolicy) else "policy"
    read = ActionReader(environments.single_action_space)
    try:
        returns = np.zeros(len(level_ids))
        is_played = np.zeros(len(level_ids), dtype=np.bool_)
        # which of the levels each environment plays; those that begin a second round play for nobody
        place, total, following = np.arange(count), np.zeros(count), count
        observation, _ = environments.reset()
        while not is_played.all():
            observation, reward, terminated, truncated, _ = environments.step(read(policy(observation), count, source))
            total += reward
            for i in np.flatnonzero(terminated | truncated):
                if place[i] < len(level_ids):
                    returns[place[i]], is_played[place[i]] = total[i], True
                place[i], total[i], following = following, 0.0, following + 1
        return returns
    finally:
        environments.close()


@contextmanager
def stochastic_policy(agent: L.LightningModule, seed: int) -> Iterator[Policy]:
    """The agent's policy with its exploration, on random numbers of its own: training goes on as if nothing was played.

    Args:
        agent: has ``act(observation, explore)``.
        seed: of the actions drawn.
    """
    devices = [agent.device] if agent.device.type == "cuda" else []
    with acting(agent), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield _StochasticPolicy(agent)


class _StochasticPolicy:
    """An agent's actions with exploration, as arrays."""

    def __init__(self, agent: L.LightningModule) -> None:
        self.source = f"{type(agent).__name__}.act"
        self._agent = agent

    def __call__(self, observation: np.ndarray) -> Any:
        agent = self._agent
        returned = agent.act(as_input(observation).to(agent.device), explore=True)  # type: ignore[operator]
        return as_array(returned) if isinstance(returned, Tensor) else returned


class LevelEvaluationStream:
    """Validation data for ``trainer.validate``: one item ``{"return": ...}`` per held-out level.

    Args:
        source: the data module whose levels and agent are evaluated.
        seed: of the actions drawn.
    """

    def __init__(self, source: LevelDataModule, seed: int = 10_000) -> None:
        self._source = source
        self._seed = seed

    def __len__(self) -> int:
        return len(self._source.held_out_levels)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        source = self._source
        assert source.trainer is not None
        agent = source.trainer.lightning_module
        with stochastic_policy(agent, self._seed) as policy:
            env = partial(make_environment, source.env, source.evaluation_env_kwargs)
            returns = level_returns(policy, env, source.held_out_levels, source.pace.num_envs, self._seed)
        for episode_return in returns:
            yield {"return": torch.tensor(episode_return, dtype=torch.float32, device=agent.device)}
