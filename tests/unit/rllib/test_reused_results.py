# SPDX-License-Identifier: Apache-2.0
"""Environments that return the same arrays and dictionaries at each step, in real EnvRunners."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import rllib_ext
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer

SPACE = gym.spaces.Box(-1e9, 1e9, (2,), np.float32)
LENGTH = 5


class Alone(gym.Env):
    """Observation ``[episode, step]``, reward and info the step; one array and one dictionary for all steps."""

    observation_space, action_space = SPACE, gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.seen, self.info, self.episode, self.count = np.zeros(2, np.float32), {}, 0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.count = self.episode + 1, 0
        return self._shown()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        observation, info = self._shown()
        return observation, float(self.count), False, self.count == LENGTH, info

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        self.seen[:] = self.episode, self.count
        self.info["count"] = self.count
        return self.seen, self.info


class Several(MultiAgentEnv):
    """Two agents of :class:`Alone`, whose results by agent are the same dictionaries for all steps."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys("ab", SPACE)
        self.action_spaces = dict.fromkeys("ab", gym.spaces.Discrete(2))
        self.games: dict[str, Alone] = {agent: Alone() for agent in "ab"}
        self.results: list[dict[str, Any]] = [{}, {}, {"__all__": False}, {"__all__": False}, {}]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        for agent, game in self.games.items():
            self.results[0][agent], self.results[4][agent] = game.reset()
        return self.results[0], self.results[4]

    def step(self, actions: Any) -> Any:
        for agent, game in self.games.items():
            for result, value in zip(self.results, game.step(actions[agent]), strict=True):
                result[agent] = value
        self.results[3]["__all__"] = self.results[3]["a"]
        return tuple(self.results)


class Together(VectorEnv):
    """A vector that exists as such only, resets in the next step, and has one array for all observations."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space, single_action_space = SPACE, gym.spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.num_envs = config["num_envs"]
        self.observation_space = gym.vector.utils.batch_space(SPACE, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self.seen, self.episode, self.count = np.zeros((self.num_envs, 2), np.float32), 0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.count = self.episode + 1, 0
        self.seen[:] = self.episode, self.count
        return self.seen, {}

    def step(self, actions: Any) -> Any:
        is_reset = self.count == LENGTH
        self.episode, self.count = self.episode + is_reset, 0 if is_reset else self.count + 1
        self.seen[:] = self.episode, self.count
        ends = np.full(self.num_envs, self.count == LENGTH)
        infos = {"count": np.full(self.num_envs, self.count), "_count": np.ones(self.num_envs, dtype=bool)}
        return self.seen, np.full(self.num_envs, float(self.count)), np.zeros_like(ends), ends, infos


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("kind", ["sync", "vector_entry_point", "agents"])
def test_each_row_is_a_step_that_was_played(kind: str, num_envs: int) -> None:
    runner_class: Any = MultiAgentEnvRunner if kind == "agents" else SingleAgentEnvRunner
    config = DQNConfig().environment({"sync": Alone, "vector_entry_point": Together, "agents": Several}[kind])
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    config.training(replay_buffer_config=rllib_ext.replay_config("uniform", capacity=1_000, info_keys=["count"]))
    if kind == "agents":
        config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent, *ignored, **also: agent)
    else:
        config.env_runners(gym_env_vectorize_mode=kind)
    rllib_ext.configure(config, require_cpus=False)
    runner = runner_class(config=config)
    buffer = RecipeEpisodeReplayBuffer("uniform", capacity=1_000, info_keys=["count"])
    for _ in range(3):
        buffer.add(runner.sample(num_timesteps=7 * num_envs, random_actions=True))
    for module in buffer.modules.values():
        rows = module.replay[:]
        before, after = rows["observation"], rows["next", "observation"]
        assert len(rows) >= 21
        assert (before[:, 0] == after[:, 0]).all() and (after[:, 1] == before[:, 1] + 1).all()
        for key in ("reward", "count"):
            assert (rows["next", key].flatten() == after[:, 1]).all(), key
        assert (rows["next", "done"].flatten() == (after[:, 1] == LENGTH)).all()
