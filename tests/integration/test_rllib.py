# SPDX-License-Identifier: Apache-2.0
"""Real algorithms on a real Ray, with nothing changed but ``replay_buffer_config``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer

from .rllib_algorithms import small, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray")]


CONFIGS = {
    "dqn": lambda: small(DQNConfig, "CartPole-v1", "prioritized", priority_exponent=0.6).env_runners(num_env_runners=1),
    "dqn_n_step": lambda: small(DQNConfig, "CartPole-v1", "uniform", layout="rows").training(n_step=(1, 3)),
    "sac": lambda: small(SACConfig, "Pendulum-v1", "neighborhood_mixup", num_neighbors=4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_iterations(name: str) -> None:
    algorithm = CONFIGS[name]().build_algo()
    result = trained(algorithm)
    buffer = algorithm.local_replay_buffer
    algorithm.stop()
    assert type(buffer) is RecipeEpisodeReplayBuffer
    assert len(buffer) == result["env_runners"]["num_env_steps_sampled_lifetime"] >= 80
    assert result["replay_buffer"]["num_env_steps_stored"] == len(buffer)
    assert result["replay_buffer"]["num_env_steps_sampled_lifetime"] >= 16 * 40 / 3
    assert result["replay_buffer"]["num_fragment_gaps_lifetime"] == 0
    learner = result["learners"]["default_policy"]
    assert np.isfinite(learner["total_loss"] if "total_loss" in learner else learner["qf_loss"])
    if buffer.replay.is_prioritized:
        assert buffer.replay.stats()["priorities_updated"] >= 16 * 10
        assert buffer.replay.stats()["late_updates_dropped"] == 0


def test_config_seed_decides_the_draws() -> None:
    def generator_state(seed: int) -> torch.Tensor:
        algorithm = small(DQNConfig, "CartPole-v1", "uniform").debugging(seed=seed).build_algo()
        state = algorithm.local_replay_buffer.replay.state_dict()["sampler"]["generator"]
        algorithm.stop()
        return state

    state = generator_state(3)
    assert torch.equal(generator_state(3), state) and not torch.equal(generator_state(4), state)
