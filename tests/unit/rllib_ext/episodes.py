# SPDX-License-Identifier: Apache-2.0
"""Episodes in which each number encodes its place."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer


def numbered(
    name: str, length: int, *, start: int = 0, offset: float = 0.0, numpy: bool = True, lookback: int = 0, **more: Any
) -> SingleAgentEpisode:
    """Steps ``start .. start + length``: observation [offset + t, -t], action t % 2, reward offset + t."""
    first = start - lookback
    steps = range(first, start + length)
    columns = {
        "observations": [np.array([offset + t, -t], np.float32) for t in range(first, start + length + 1)],
        "actions": [np.int64(t % 2) for t in steps],
        "rewards": [offset + t for t in steps],
        "extra_model_outputs": {"action_logp": [0.5 for _ in steps]},
    }
    episode = SingleAgentEpisode(id_=name, t_started=start, len_lookback_buffer=lookback, **{**columns, **more})
    return episode.to_numpy() if numpy else episode


def sampled(space: gym.Space, action_space: gym.Space, length: int, *, numpy: bool = True) -> SingleAgentEpisode:
    """An episode of random observations and actions of any space."""
    space.seed(0)
    action_space.seed(0)
    observations, actions = ([one.sample() for _ in range(length + 1)] for one in (space, action_space))
    columns = {"observations": observations, "actions": actions[:-1], "terminated": True}
    return numbered("sampled", length, numpy=numpy, **columns)


def column(episodes: list[Any], method: str, *args: Any) -> np.ndarray:
    """One column of all rows of a train batch, as the learner connectors read it."""
    return np.concatenate([getattr(episode, method)(*args, slice(0, len(episode))) for episode in episodes])


def numbers(episodes: list[Any]) -> np.ndarray:
    """The first number that each row observes."""
    return column(episodes, "get_observations")[:, 0].astype(int)


def buffer_of(config: dict[str, Any]) -> RecipeEpisodeReplayBuffer:
    return RecipeEpisodeReplayBuffer(**{name: value for name, value in config.items() if name != "type"})
