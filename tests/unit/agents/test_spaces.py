# SPDX-License-Identifier: Apache-2.0
"""Environments that an agent cannot act in, and which agent can."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from lightning_replay.agents import DQN, MPDQN, PPO, SAC, TD3, Rainbow

FLAT, IMAGE, ACTIONS = Box(-1, 1, (3,)), Box(0, 255, (3, 14, 14), np.uint8), Discrete(2)


@pytest.mark.parametrize(
    ("agent", "observation", "action", "message"),
    [
        (TD3, FLAT, ACTIONS, "TD3 got the action space Discrete.*Use DQN"),
        (SAC, FLAT, ACTIONS, "SAC got the action space Discrete.*Use DQN"),
        (SAC, FLAT, Box(-np.inf, np.inf, (2,)), "it needs a bounded, one-dimensional Box"),
        (DQN, FLAT, Box(-1, 1, (2,)), "DQN got the action space Box.*Use TD3 or SAC"),
        (DQN, FLAT, Discrete(2, start=1), "it needs Discrete actions that start at 0"),
        (DQN, Discrete(4), ACTIONS, "DQN got the observation space Discrete.*FlattenObservation"),
        (PPO, FLAT, Box(-1, 1, (2,)), "it needs Discrete actions that start at 0"),
        (PPO, Box(-1, 1, (3, 3)), ACTIONS, "it needs flat observations"),
        (PPO, IMAGE, ACTIONS, r"\(height, width, channels\)"),
        (PPO, Discrete(4), ACTIONS, "it needs flat observations"),
        (Rainbow, FLAT, ACTIONS, "Rainbow got the observation space Box.*images, a Box of uint8.*Use DQN for flat"),
        (Rainbow, IMAGE, Box(-1, 1, (2,)), "Rainbow got the action space Box.*Discrete"),
        (MPDQN, FLAT, ACTIONS, "MPDQN got the action space .* Use DQN for Discrete, TD3 or SAC for a Box"),
    ],
)
def test_spaces_of_another_agent_are_refused(agent, observation, action, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agent.sizes_from(observation, action)


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(TypeError, match="env is 3"):
        DQN.for_env(3)
