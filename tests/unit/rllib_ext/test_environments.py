# SPDX-License-Identifier: Apache-2.0
"""The step that configure plays: a legal action where a mask is found, and words where all actions raise."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig

import rllib_ext
from rllib_ext.environments import check_environment

NUMBERS = Box(-1.0, 1.0, (2,), np.float32)
SPACES: dict[str, Any] = {  # -> an action space, its mask, and what is legal
    "discrete": (Discrete(20), np.eye(20, dtype=np.int8)[7], 7),
    "from three": (Discrete(20, start=3), np.eye(20, dtype=np.int8)[7], 10),
    "several": (MultiDiscrete([9, 9]), (np.eye(9, dtype=np.int8)[2], np.eye(9, dtype=np.int8)[8]), [2, 8]),
    "nested": (
        Tuple((Discrete(9), Discrete(9))),
        (np.eye(9, dtype=np.int8)[1], np.eye(9, dtype=np.int8)[5]),
        (1, 5),
    ),
}


class Masked(gym.Env[Any, Any]):
    """Raises at every action but one, and gives a mask of this form in one of these places."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.action_space, mask, self._legal = SPACES[config["space"]]
        forms = {"bool": bool, "float32": np.float32, "int8": np.int8}
        form = config.get("form", "int8")
        parts = mask if isinstance(mask, tuple) else (mask,)
        changed = tuple(part.tolist() if form == "list" else part.astype(forms[form]) for part in parts)
        self._mask: Any = changed if isinstance(mask, tuple) else changed[0]
        self._mask = config.get("illegible", self._mask)
        self._place = config.get("place")
        with_mask = Dict({"observations": NUMBERS, "action_mask": Box(0.0, 1.0, (20,), np.float32)})
        self.observation_space = with_mask if self._place == "observation" else NUMBERS
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation = {"observations": NUMBERS.sample(), "action_mask": self._mask}
        return (
            observation if self._place == "observation" else observation["observations"],
            {"action_mask": self._mask} if self._place == "info" else {},
        )

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not np.array_equal(action, self._legal):
            raise ValueError(f"illegal action {action}")
        return *self.reset()[:1], 0.0, False, False, {}


def config_of(**env_config: Any) -> DQNConfig:
    return DQNConfig().environment(Masked, env_config=env_config)


@pytest.mark.parametrize("form", ["bool", "float32", "int8", "list"])
@pytest.mark.parametrize("place", ["info", "observation"])
@pytest.mark.parametrize("space", SPACES)
def test_the_action_that_a_mask_allows_is_played(space: str, place: str, form: str) -> None:
    if form == "list" and space in ("several", "nested"):
        pytest.skip("a list for each part, which Gymnasium does not have")
    if place == "observation":  # whose module is the user's own
        with pytest.raises(ValueError, match="the observations of .* are a Dict"):
            check_environment(config_of(space=space, place=place, form=form))
    else:
        check_environment(config_of(space=space, place=place, form=form))


@pytest.mark.parametrize("illegible", [np.zeros(20), "0000000100", np.ones(3), {"legal": np.ones(20)}])
def test_an_environment_whose_mask_cannot_be_read_is_reset_only(illegible: Any) -> None:
    check_environment(config_of(space="discrete", place="info", illegible=illegible))


def test_every_action_is_tried_where_there_is_no_mask() -> None:
    for _ in range(10):  # not found by chance
        check_environment(config_of(space="discrete"))
        check_environment(config_of(space="from three"))


class Broken(gym.Env[Any, Any]):
    """Raises at every step; its actions are those of the config."""

    observation_space = NUMBERS

    def __init__(self, config: dict[str, Any]) -> None:
        self.action_space = config["actions"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return NUMBERS.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise RuntimeError(f"no simulator for {action}")


@pytest.mark.parametrize(
    ("algorithm", "actions", "action"), [(DQNConfig, Discrete(3), "2"), (SACConfig, NUMBERS, r"\[.*\]")]
)
def test_an_environment_that_raises_at_every_action_is_refused(algorithm: Any, actions: Any, action: str) -> None:
    config = algorithm().environment(Broken, env_config={"actions": actions})
    config.training(replay_buffer_config=rllib_ext.replay_config("uniform", capacity=1000))
    message = rf"reset and stepped: the action {action} raised RuntimeError\('no simulator for .*_environments=False\)"
    with pytest.raises(ValueError, match=message):
        rllib_ext.configure(config)
    rllib_ext.configure(config, check_environments=False)
