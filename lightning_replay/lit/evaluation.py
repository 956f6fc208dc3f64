# SPDX-License-Identifier: Apache-2.0
"""Evaluation of an agent: on episodes without exploration, or on levels under its policy in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_replay.agents.foreign import acting_agent
from lightning_replay.envs.building import build_environment, check_env
from lightning_replay.envs.step_check import MAX_EPISODE_STEPS, LimitedEpisodes, checked_reset
from lightning_replay.levels import SequentialLevels
from lightning_replay.levels.environments.level_wrappers import make_level_vector
from lightning_replay.lit.policy import ActionReader, act_on, acting, as_array, as_input
from lightning_replay.validation import checked_count

__all__ = ["EvaluationStream", "episode_returns", "level_returns", "stochastic_policy"]

Policy = Callable[[np.ndarray], Any]


def episode_returns(
    agent: L.LightningModule,
    environment: gymnasium.Env[Any, Any],
    episodes: int,
    seed: int,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> Iterator[float]:
    """Plays whole episodes and yields the return of each; episode ``i`` starts from ``seed + i``.

    One that has not ended after ``max_episode_steps`` counts up to there, with a warning.
    """
    environment = LimitedEpisodes(environment, max_episode_steps)
    policy, read = acting_agent(agent), ActionReader(environment.action_space)
    for episode in range(episodes):
        observation, _ = checked_reset(environment.reset(seed=seed + episode), environment.env)
        total, done = 0.0, False
        with acting(policy):
            while not done:
                given = act_on(policy, observation[None], False, read)
                action = given[0] if read.actions is None else read.actions.for_one(*given)
                observation, reward, terminated, truncated, _ = environment.step(action)
                total += float(reward)
                done = terminated or truncated
        yield total


def level_returns(
    policy: Policy,
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    level_ids: Sequence[int],
    num_envs: int = 16,
    seed: int | None = None,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> np.ndarray:
    """Plays one episode on each level and returns its returns, float64 ``[L]``.

    Args:
        policy: actions ``[N, ...]`` for observations ``[N, ...]``, a tensor or an array.
        env: Gymnasium id, or a callable that builds one environment.
        level_ids: distinct; each is played once.
        num_envs: episodes played at a time.
        seed: of the environments' own randomness, where levels are set by ``set_level``.
        max_episode_steps: after which an episode that has not ended counts up to there, with a warning.

    Raises:
        TypeError, ValueError: the policy returned no actions of the environment's space.

    Example:
        >>> level_returns(lambda observations: np.zeros(len(observations), dtype=int), "CartPole-v1", [3, 4, 5])
        array([9., 8., 9.])
    """
    check_env(env)
    count = min(num_envs, len(level_ids))
    limited = partial(_limited, env, checked_count("max_episode_steps", max_episode_steps))
    environments = make_level_vector(limited, count, SequentialLevels(level_ids), seed=seed, check=False)
    read = ActionReader(environments.single_action_space)
    try:
        returns = np.zeros(len(level_ids))
        is_played = np.zeros(len(level_ids), dtype=np.bool_)
        # index of the level that each environment plays; episodes begun after the last level do not count
        place, total, following = np.arange(count), np.zeros(count), count
        observation, _ = environments.reset()
        while not is_played.all():
            observation, reward, terminated, truncated, _ = environments.step(
                read(policy(observation), count, "policy")
            )
            total += reward
            for i in np.flatnonzero(terminated | truncated):
                if place[i] < len(level_ids):
                    returns[place[i]], is_played[place[i]] = total[i], True
                place[i], total[i], following = following, 0.0, following + 1
        return returns
    finally:
        environments.close()


def _limited(env: str | Callable[[], gymnasium.Env[Any, Any]], max_episode_steps: int) -> LimitedEpisodes:
    return LimitedEpisodes(build_environment(env, {}), max_episode_steps)


@contextmanager
def stochastic_policy(agent: L.LightningModule, seed: int) -> Iterator[Policy]:
    """Yields the agent's policy with exploration; the random numbers of the training are left unchanged.

    Args:
        agent: has ``act(observation, explore)``.
        seed: of the actions drawn.
    """
    devices = [agent.device] if agent.device.type == "cuda" else []
    acts = acting_agent(agent)

    def policy(observation: np.ndarray) -> Any:
        returned = acts.act(as_input(observation).to(acts.device), explore=True)
        return as_array(returned) if isinstance(returned, Tensor) else returned

    with acting(acts), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield policy


class EvaluationStream:
    """Validation data for ``trainer.validate``: one item ``{"return": ...}`` per episode that ``play(agent)`` plays."""

    def __init__(
        self, agent: L.LightningModule, episodes: int, play: Callable[[L.LightningModule], Iterable[float]]
    ) -> None:
        self._agent = agent
        self._episodes = episodes
        self._play = play

    def __len__(self) -> int:
        return self._episodes

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for episode_return in self._play(self._agent):
            yield {"return": torch.tensor(episode_return, dtype=torch.float32, device=self._agent.device)}
