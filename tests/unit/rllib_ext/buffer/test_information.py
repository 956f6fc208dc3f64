# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

import rllib_ext
from lightning_replay.events import info_key
from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from tests.stored import stored_rows
from tests.unit.rllib_ext.episodes import numbered


def telling(infos: list[dict[str, Any]], fragment: int = 100, **ends: bool) -> list[SingleAgentEpisode]:
    """Fragments of an episode with these infos, the first that of the reset; reward t in step t."""
    sent, episode = [], SingleAgentEpisode(id_="told")
    episode.add_env_reset(np.zeros(2, np.float32), infos=infos[0])
    for step, info in enumerate(infos[1:]):
        last = ends if step == len(infos) - 2 else {}
        episode.add_env_step(np.full(2, step, np.float32), np.int64(0), float(step), infos=info, **last)
        if (step + 1) % fragment == 0 or step == len(infos) - 2:
            following = None if episode.is_done else episode.cut(len_lookback_buffer=1)
            sent.append(episode.to_numpy())
            if following is None:
                break
            episode = following
    return sent


def buffer(recipe: str = "uniform", **options: Any) -> RecipeEpisodeReplayBuffer:
    options = options if "capacity_per_task" in options else {"capacity": 100, **options}
    return RecipeEpisodeReplayBuffer(recipe, seed=0, **options)


def stored(buffer: RecipeEpisodeReplayBuffer, *key: str) -> list[float]:
    return stored_rows(buffer.replay)[key].flatten().tolist()


INFOS = [{"goal": 9}, {"goal": True}, {}, {"goal": np.float64(2.5)}, {"goal": np.array([3])}, {"goal": np.bool_(True)}]


@pytest.mark.parametrize("fragment", [1, 2, 100])
def test_each_row_has_the_info_of_its_own_step(fragment: int) -> None:
    informed = buffer(info_keys=["goal", "other"])
    for part in telling(INFOS, fragment, terminated=True):
        informed.add(part)
    assert stored(informed, "next", "reward") == [0, 1, 2, 3, 4]
    assert stored(informed, "next", "goal") == [1, 0, 2.5, 3, 1] and stored(informed, "next", "other") == [0] * 5
    assert informed.replay.storage.get(0)["next", "goal"].shape == (1,)


def test_infos_are_events_and_are_saved() -> None:
    table = {"name": "goal", "condition": info_key("goal", at_least=2.0), "history_length": 2, "capacity": 10}
    first, again = (buffer("event_tables", info_keys=["goal"], tables=[table]) for _ in range(2))
    first.add(telling(INFOS))
    again.set_state(first.get_state())
    for one in (first, again):
        assert one.replay.table("goal")["next", "goal"].flatten().tolist() == [0, 2.5, 3]
    again.add(numbered("without", 2))
    assert again.replay.table("default")["next", "goal"].flatten().tolist()[-2:] == [0, 0]


def test_each_agents_infos_go_to_its_module() -> None:
    informed = buffer(info_keys=["goal"], modules={"b": {"info_keys": None}})
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent, *_: agent)
    zeros = {agent: np.zeros(1, np.float32) for agent in "ab"}
    episode.add_env_reset(observations=zeros, infos={"a": {"goal": 5}})
    actions, rewards = dict.fromkeys("ab", np.int64(0)), dict.fromkeys("ab", 0.0)
    for infos in ({"a": {"goal": 1}, "b": {"goal": 7}}, {}, {"a": {"goal": 3}}):
        episode.add_env_step(zeros, actions, rewards, infos)
    informed.add(episode.to_numpy())
    rows = {name: module.replay.storage.get(slice(0, 3)) for name, module in informed.modules.items()}
    assert rows["a"]["next", "goal"].flatten().tolist() == [1, 0, 3]
    assert rows["b"].get(("next", "goal"), None) is None


@pytest.mark.parametrize("value", ["near", None, [1, 2], np.zeros(2), {"x": 1}, 1j])
def test_an_info_that_is_no_number_is_refused_and_nothing_stored(value: Any) -> None:
    informed = buffer(info_keys=["goal"])
    with pytest.raises(ValueError, match=re.escape("info 'goal' of episode told holds")):
        informed.add([numbered("fine", 2), *telling([{}, {"goal": 1}, {"goal": value}])])
    assert len(informed) == 0


def test_a_key_that_never_comes_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    informed = buffer(info_keys=["gaol"], capacity=2000)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            informed.add(numbered(str(number), 600, infos=[{"goal": 1}] * 601))
    said = [record.getMessage() for record in caplog.records if "gaol" in record.getMessage()]
    assert len(said) == 1 and "['gaol']" in said[0] and "first 1200 steps" in said[0] and "['goal']" in said[0]


CURRICULUM = {"tasks": ["target", "near"], "capacity_per_task": 50}


@pytest.mark.parametrize("value", [1, np.int64(1), np.array([1]), "near"])
def test_the_task_is_an_index_or_a_name(value: Any) -> None:
    taught = buffer("parallel_curriculum", **CURRICULUM)
    taught.add(telling([{}, {"task": value}, {"task": 0}]))
    assert taught.replay.table("near")["next", "reward"].tolist() == [[0.0]]
    assert taught.replay.table("target")["task"].tolist() == [0]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "have no task, and the replay has the tasks ['target', 'near']"),
        ({"task": 2}, "is of task 2; the replay has the tasks ['target', 'near'], by name or numbered 0 to 1"),
        ({"task": -1}, "is of task -1"),
        ({"task": "far"}, "is of task 'far'"),
        ({"task": 0.5}, "is of task 0.5"),
        ({"task": True}, "is of task True"),
    ],
)
def test_steps_of_no_known_task_are_refused(info: dict[str, Any], message: str) -> None:
    taught = buffer("parallel_curriculum", **CURRICULUM)
    with pytest.raises(ValueError, match=re.escape(message)):
        taught.add(telling([{}, {"task": 1}, info]))
    assert len(taught) == 0


def test_more_rows_of_one_task_than_its_table_holds_are_refused() -> None:
    taught = buffer("parallel_curriculum", **CURRICULUM)
    parts = [numbered(str(number), 40) for number in range(2)]
    for part, name in zip(parts, ("target", "near"), strict=True):
        part.custom_data["task"] = name
    taught.add(parts)  # 40 for each
    parts = [numbered(f"again {number}", 40) for number in range(2)]
    for part in parts:
        part.custom_data["task"] = "near"
    with pytest.raises(ValueError, match="capacity is 50, and 80 steps came"):
        taught.add(parts)


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
