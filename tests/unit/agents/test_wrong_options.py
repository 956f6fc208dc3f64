# SPDX-License-Identifier: Apache-2.0
"""Every option of every agent refuses what it is not, by its name, and which environments an agent cannot act in."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple

from lightning_replay.agents import CQL, DQN, IQL, MPDQN, PPO, SAC, TD3, Rainbow, RecurrentDQN
from lightning_replay.agents.agent import _CHECKS
from lightning_replay.schedules import Linear
from tests.wrong_options import assert_refused, by_option, wrong_options

AGENTS = [CQL, DQN, IQL, MPDQN, PPO, Rainbow, RecurrentDQN, SAC, TD3]
ANY_SIGN = {"target_entropy", "target_high", "target_low", "value_high", "value_low"}


@pytest.mark.parametrize("agent", AGENTS)
def test_every_option_has_its_check(agent) -> None:
    assert set(inspect.signature(agent.__init__).parameters) - {"self"} <= set(_CHECKS)


def test_every_check_is_that_of_an_option() -> None:
    assert set(_CHECKS) <= {name for agent in AGENTS for name in inspect.signature(agent.__init__).parameters}


WRONG = by_option(one for agent in AGENTS for one in wrong_options(agent, {}, any_sign=ANY_SIGN))


@pytest.mark.parametrize("option", WRONG)
def test_is_refused_by_name(option: str) -> None:
    for one in WRONG[option]:
        assert_refused(one)


PIXELS = {"encoder": "convolutions", "shape": [9, 9, 3], "high": 255, "channels_first": False}


@pytest.mark.parametrize(
    ("agent", "options", "error", "message"),
    [
        (DQN, {"hidden_sizes": (64, 2.5)}, TypeError, r"hidden_sizes\[1\] is 2.5; it must be a whole number"),
        (DQN, {"conflict_aversion": Linear(0.5, 1.0, 9)}, ValueError, "conflict_aversion at reading 9 of"),
        (SAC, {"action_low": ["-1"]}, TypeError, r"action_low\[0\] is '-1'; it must be a finite number"),
        (PPO, {"categories": (11, 0)}, ValueError, r"categories\[1\] is 0; it must be a whole number"),
        (DQN, {"observation_size": {}}, ValueError, "observation_size is empty; give the size"),
        (
            DQN,
            {"observation_size": {"a": 3, "b": {"c": 0}}},
            ValueError,
            r"observation_size\['b'\]\['c'\] is 0",
        ),
        (
            DQN,
            {"observation_size": {"a": {"encoder": "one_hot", "low": 3, "high": 2}}},
            ValueError,
            ".*the smallest",
        ),
        (DQN, {"observation_size": {"a": {"encoder": "cnn"}}}, ValueError, r"observation_size\['a'\]\['encoder'\]"),
        (TD3, {"observation_size": {"encoder": "flat", "size": 3}}, ValueError, r".*needs \['shape'\] and may have"),
        (SAC, {"observation_size": PIXELS | {"shape": [9]}}, ValueError, ".*an image has two or three dimensions"),
        (SAC, {"observation_size": PIXELS | {"strides": [1]}}, ValueError, ".*for each convolution"),
        (Rainbow, {"channels": (32, True)}, TypeError, r"channels\[1\] is True; it must be a whole number"),
    ],
)
def test_sequences_and_ranges(agent, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        agent(**options)


FLAT, IMAGE, ACTIONS = Box(-1, 1, (3,)), Box(0, 255, (3, 14, 14), np.uint8), Discrete(2)
VECTOR = Box(-1, 1, (2,))
CAMERAS = Tuple((Box(0, 255, (2, 14, 14, 3), np.uint8), FLAT))
MIXED = Dict({"mission": Text(9), "arm": CAMERAS, "state": FLAT})


@pytest.mark.parametrize(
    ("agent", "observation", "action", "message"),
    [
        (TD3, FLAT, ACTIONS, "TD3 got the action space Discrete.*Use DQN"),
        (SAC, FLAT, ACTIONS, "SAC got the action space Discrete.*Use DQN"),
        (SAC, FLAT, Box(-np.inf, np.inf, (2,)), "it needs a bounded, one-dimensional Box"),
        (DQN, FLAT, Box(-1, 1, (2,)), "DQN got the action space Box.*Use TD3 or SAC"),
        (DQN, FLAT, MultiDiscrete([2, 3]), "MultiDiscrete.*an agent of your own for MultiDiscrete .*lightning-agents"),
        (DQN, FLAT, Discrete(2, start=1), "it needs Discrete actions that start at 0"),
        (DQN, Text(9), ACTIONS, r"DQN has no encoder for observation, Text"),
        (SAC, MIXED, VECTOR, r"SAC has no encoder for .*\['arm'\]\['0'\], Box.*\['mission'\], Text.*FilterObservation"),
        (PPO, FLAT, Box(-1, 1, (2,)), "it needs Discrete actions that start at 0"),
        (PPO, Box(-1, 1, (3, 3)), ACTIONS, "it needs flat observations"),
        (PPO, IMAGE, ACTIONS, r"\(height, width, channels\)"),
        (PPO, Discrete(4), ACTIONS, "it needs flat observations.*, or convert .* for numbers"),
        (PPO, MIXED, ACTIONS, "it needs flat observations.*DQN, SAC and TD3 .* not for cameras"),
        (Rainbow, FLAT, ACTIONS, "Rainbow got the observation space Box.*images, a Box of uint8.*Use DQN for other"),
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
