# SPDX-License-Identifier: Apache-2.0
"""One test per gate of ray 2.60.0 that ``rllib_ext/gates.py`` lists: a release that moves a gate fails here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.utils import update_priorities_in_episode_replay_buffer

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from rllib_ext.rllib_compat import ACCEPTED_NAME

CONFIG: dict[str, Any] = {"type": RecipeEpisodeReplayBuffer, "recipe": "uniform", "capacity": 100}
ALGORITHMS = [DQNConfig, SACConfig, TQCConfig]


def configured(algorithm: type[AlgorithmConfig]) -> AlgorithmConfig:
    env = "CartPole-v1" if algorithm is DQNConfig else "Pendulum-v1"
    return algorithm().environment(env).training(replay_buffer_config=dict(CONFIG))


def test_the_release_the_gates_were_measured_on() -> None:
    assert ray.__version__ == "2.60.0"


def test_creation_asks_whether_a_word_is_in_the_type() -> None:
    assert "EpisodeReplayBuffer" in RecipeEpisodeReplayBuffer
    assert "MultiAgentReplayBuffer" not in RecipeEpisodeReplayBuffer
    assert 3 not in RecipeEpisodeReplayBuffer
    config = {"replay_buffer_config": dict(CONFIG)}
    algorithm = Algorithm.__new__(Algorithm)
    algorithm.config = AlgorithmConfig()
    buffer = algorithm._create_local_replay_buffer_if_necessary(config)
    assert type(buffer) is RecipeEpisodeReplayBuffer
    assert "metrics_num_episodes_for_smoothing" in config["replay_buffer_config"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_class_is_accepted_alone_and_survives_a_dictionary(algorithm: type[AlgorithmConfig]) -> None:
    default = algorithm().replay_buffer_config["type"]
    assert default != RecipeEpisodeReplayBuffer and default != ACCEPTED_NAME
    config = configured(algorithm)
    config.validate()
    assert config.replay_buffer_config == CONFIG  # nothing of the default is merged in
    again = algorithm().update_from_dict(config.to_dict())
    assert again.replay_buffer_config["type"] is RecipeEpisodeReplayBuffer
    again.validate()


def test_td_errors_reach_the_buffer() -> None:
    given: list[Any] = []
    buffer = RecipeEpisodeReplayBuffer.__new__(RecipeEpisodeReplayBuffer)
    assert isinstance(buffer, PrioritizedEpisodeReplayBuffer)
    assert issubclass(RecipeEpisodeReplayBuffer, EpisodeReplayBuffer)
    buffer.update_priorities = lambda td_error, module_id: given.append((td_error, module_id))  # type: ignore[method-assign]
    update_priorities_in_episode_replay_buffer(
        replay_buffer=buffer, td_errors={"default_policy": {"td_error": [1.0]}, "__all_modules__": {}}
    )
    assert given == [([1.0], "default_policy")]


def test_importing_the_class_does_not_import_torchrl() -> None:
    code = "import sys, rllib_ext.buffer.buffer\nassert not {'torchrl', 'tensordict'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
