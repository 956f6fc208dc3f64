# SPDX-License-Identifier: Apache-2.0
"""Our prioritized recipe in RLlib draws and weighs rows as RLlib's own prioritized buffer does."""

from __future__ import annotations

import numpy as np
import pytest
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers import PrioritizedEpisodeReplayBuffer
from scipy.stats import chi2_contingency

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer

ROWS, DRAWS = 12, 10_000
ALPHA, BETA = 0.6, 0.4


def filled(buffer: PrioritizedEpisodeReplayBuffer) -> PrioritizedEpisodeReplayBuffer:
    """Row t observes t and has priority (t + 1) ** 2."""
    episode = SingleAgentEpisode(
        observations=[np.array([t], np.float32) for t in range(ROWS + 1)],
        actions=[0] * ROWS,
        rewards=[0.0] * ROWS,
        len_lookback_buffer=0,
    )
    buffer.add(episode.to_numpy())
    number, _ = drawn(buffer, 500)
    assert len(set(number)) == ROWS
    buffer.update_priorities((number + 1.0) ** 2)
    return buffer


def drawn(buffer: PrioritizedEpisodeReplayBuffer, count: int) -> tuple[np.ndarray, np.ndarray]:
    episodes = [e.to_numpy() for e in buffer.sample(num_items=count, n_step=1, gamma=0.99, beta=BETA)]
    number = np.concatenate([e.get_observations(slice(0, len(e)))[:, 0] for e in episodes]).astype(int)
    return number, np.concatenate([e.get_extra_model_outputs("weights", slice(0, len(e))) for e in episodes])


@pytest.mark.slow
def test_rows_are_drawn_equally_often_and_weigh_the_same() -> None:
    theirs = PrioritizedEpisodeReplayBuffer(capacity=100, alpha=ALPHA)
    theirs.rng = np.random.default_rng(0)
    ours = RecipeEpisodeReplayBuffer(
        "prioritized", capacity=100, priority_exponent=ALPHA, importance_exponent=BETA, seed=0
    )
    draws = [drawn(filled(buffer), DRAWS) for buffer in (theirs, ours)]
    assert chi2_contingency([np.bincount(number, minlength=ROWS) for number, _ in draws]).pvalue > 1e-4
    weights, own_weights = (dict(zip(number, weight, strict=True)) for number, weight in draws)
    assert own_weights == pytest.approx(weights, abs=1e-6), "ours adds 1e-6 to every priority before the exponent"
    assert len(weights) == ROWS
