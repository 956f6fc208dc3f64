# SPDX-License-Identifier: Apache-2.0
"""Episodes of a recurrent module in which each number encodes its place."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer

from .episodes import numbered


def state_after(number: float) -> dict[str, np.ndarray]:
    """The state after the step of this number, as an LSTM's: ``h`` and ``c``, ``[layers, cells]``."""
    return {"h": np.full((1, 2), number, np.float32), "c": np.full((1, 2), -number, np.float32)}


def recurrent(name: str, length: int, *, start: int = 0, lookback: int = 0, **options: Any) -> SingleAgentEpisode:
    """Those of ``numbered``; the state after a step has its number."""
    first = options.get("offset", 0) + start
    states = [state_after(number) for number in range(first - lookback, first + length)]
    return numbered(name, length, start=start, lookback=lookback, extra_model_outputs={"state_out": states}, **options)


def numbers(episode: SingleAgentEpisode) -> list[int]:
    return episode.get_observations(slice(0, len(episode)))[:, 0].astype(int).tolist()


def state_before(episode: SingleAgentEpisode) -> int | None:
    """The number of the state an episode begins in; ``None`` for the module's own initial state."""
    if episode.t_started == 0:
        return None
    state = episode.get_extra_model_outputs("state_out", -1, neg_index_as_lookback=True)
    assert (state["h"] == -state["c"]).all() and state["h"].shape == (1, 2)
    return int(state["h"][0, 0])


def filled(recipe: str = "uniform", capacity: int = 100, **options: Any) -> RecipeEpisodeReplayBuffer:
    """Steps 0 to 4 terminated, 100 to 106 truncated, 200 to 202 running."""
    buffer = RecipeEpisodeReplayBuffer(recipe, capacity=capacity, seed=0, **options)
    buffer.add([recurrent("a", 3), recurrent("b", 7, offset=100, truncated=True)])
    buffer.add([recurrent("a", 2, start=3, terminated=True), recurrent("c", 3, offset=200)])
    return buffer


def drawn(buffer: RecipeEpisodeReplayBuffer, steps: int, longest: int, burn_in: int = 0) -> list[SingleAgentEpisode]:
    """The arguments with which RLlib samples sequences."""
    return buffer.sample(
        num_items=steps,
        n_step=1,
        batch_length_T=longest,
        lookback=1,
        min_batch_length_T=burn_in,
        gamma=0.99,
        beta=None,
        sample_episodes=True,
    )
