# SPDX-License-Identifier: Apache-2.0
"""Several agents in real algorithms: rows compared with what the environments wrote down, TD errors, checkpoints."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

from lightning_replay.replay import Replay
from tests.stored import stored_rows

from .rllib_algorithms import EchoLearner, built, small, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

CHANCES = {"early": 0.9, "late": 0.7, "rare": 0.3}  # to be answered in a step
_instances = itertools.count()


class Uneven(MultiAgentEnv):
    """Agents that appear late, act in some steps only and end at different times; every observation is a number.

    ``record`` holds the transitions as they are completed: agent, observation, action, reward, next observation,
    terminated, truncated. Nobody ends without a last observation.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = list(CHANCES)
        self.observation_spaces = {agent: gym.spaces.Box(-np.inf, np.inf, (1,), np.float32) for agent in CHANCES}
        self.action_spaces = {agent: gym.spaces.Discrete(2) for agent in CHANCES}
        self.record: list[tuple[Any, ...]] = []
        self._count = 200_000 * getattr(config, "worker_index", 0) + 10_000 * (next(_instances) % 20)
        self._random = np.random.default_rng(self._count)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._step = 0
        self._waiting: dict[str, list[float]] = {}  # observation, action and reward without an answer
        self._seen = {"early": self._number()}
        self._gone: set[str] = set()
        return dict(self._seen), {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._step += 1
        is_last = self._step == 12
        for agent, action in actions.items():
            self._waiting[agent] = [float(self._seen[agent][0]), float(action), 0.0]
        rewards = {agent: float(self._random.integers(8)) for agent in self._waiting}
        observations, terminated, truncated = {}, {}, {}
        for agent, reward in rewards.items():
            self._waiting[agent][2] += reward
            if is_last or self._random.random() < CHANCES[agent]:
                observations[agent] = self._number()
                # RLlib's flags of agents that die in the last step of all are those of the ones alive
                terminated[agent], truncated[agent] = self._random.random() < (0.5 if is_last else 0.08), is_last
                row = (*self._waiting[agent], float(self._count), terminated[agent], truncated[agent])
                self.record.append((agent, *row))
        for agent in set(CHANCES) - set(self._seen):
            if self._step >= 4 and not is_last and self._random.random() < CHANCES[agent]:
                observations[agent] = self._number()
        for agent in observations:
            self._waiting.pop(agent, None)
        self._seen |= observations
        self._gone |= {agent for agent, ends in terminated.items() if ends}
        terminated["__all__"], truncated["__all__"] = self._gone >= set(self._seen), is_last
        return observations, rewards, terminated, truncated, {}

    def _number(self) -> np.ndarray:
        self._count += 1
        return np.array([self._count], np.float32)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def each_its_own(agent: Any, *args: Any, **rest: Any) -> str:
    return f"of_{agent}"


def two_share(agent: Any, *args: Any, **rest: Any) -> str:
    return "default_policy" if agent == "rare" else "shared"


def uneven(module_of: Any, recipe: str = "prioritized", **options: Any) -> AlgorithmConfig:
    """DQN on two environments in fragments of five steps."""
    config = small(DQNConfig, Uneven, recipe, **options)
    config.environment(disable_env_checking=True)  # RLlib's check takes a step that nobody samples
    config.multi_agent(policies={module_of(agent) for agent in CHANCES}, policy_mapping_fn=module_of)
    return config.env_runners(rollout_fragment_length=5, num_envs_per_env_runner=2)


def recorded(algorithm: Algorithm, module_of: Any) -> dict[str, Counter[tuple[Any, ...]]]:
    """What the environments wrote down, by module."""
    rows: dict[str, Counter[tuple[Any, ...]]] = {}
    records = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: [env.unwrapped.record for env in runner.env.envs] if runner.env else []
    )
    for agent, *row in itertools.chain.from_iterable(itertools.chain.from_iterable(records)):
        rows.setdefault(module_of(agent), Counter())[tuple(row)] += 1
    return rows


def stored(algorithm: Algorithm) -> dict[str, Counter[tuple[Any, ...]]]:
    """What the replays hold, by module, in the same form."""
    counted = {}
    for name, module in algorithm.local_replay_buffer.modules.items():
        rows = stored_rows(module.replay)
        following = rows["next"]
        columns = [rows["observation"], rows["action"].float(), following["reward"], following["observation"]]
        columns += [following["terminated"], following["truncated"]]
        counted[name] = Counter(zip(*(column.flatten().tolist() for column in columns), strict=True))
    return counted


def watch_td_errors(monkeypatch: pytest.MonkeyPatch) -> dict[Replay, list[bool]]:
    """Whether each TD error of an :class:`EchoLearner` comes to the row it was computed on, by replay."""
    home: dict[Replay, list[bool]] = {}
    update = Replay.update_priority

    def compared(self: Replay, index: torch.Tensor, td_error: torch.Tensor, **rest: Any) -> None:
        home.setdefault(self, []).extend((self.storage.get(index)["observation"][:, 0] == td_error).tolist())
        update(self, index, td_error, **rest)

    monkeypatch.setattr(Replay, "update_priority", compared)
    return home


def assert_learners_agree(algorithm: Algorithm) -> None:
    """Their weights drift apart where one of them lacks a module's rows."""
    results = algorithm.learner_group.foreach_learner(lambda learner: learner.get_state(components="rl_module"))
    first, *others = [result.get()["rl_module"] for result in results]
    for other in others:
        for module_id, weights in first.items():
            for name, array in weights.items():
                np.testing.assert_array_equal(array, other[module_id][name])


@pytest.mark.parametrize(("num_learners", "module_of"), [(0, each_its_own), (2, two_share)])
def test_rows_are_true_and_every_td_error_reaches_its_row(num_learners: int, module_of: Any, monkeypatch: Any) -> None:
    config = uneven(module_of).learners(num_learners=num_learners, learner_class=EchoLearner)
    config.training(train_batch_size_per_learner=25)
    home = watch_td_errors(monkeypatch)
    algorithm = built(config)
    buffer = algorithm.local_replay_buffer
    known = Counter()
    for layout in ("flagged", "blocks", "rows"):
        buffer.options.layout = layout
        result = trained(algorithm)
        assert stored(algorithm) == recorded(algorithm, module_of)
        assert_learners_agree(algorithm)
        assert set(home) == {module.replay for module in buffer.modules.values()}
        assert all(all(flags) for flags in home.values()), layout
        drawn = result["replay_buffer"]["num_module_steps_sampled_lifetime"]
        assert {name: len(home[module.replay]) for name, module in buffer.modules.items()} == drawn
        assert min((Counter(drawn) - known)[name] for name in drawn) >= 25
        known = Counter(drawn)
    assert result["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"] > 0


def test_modules_that_do_not_learn() -> None:
    config = uneven(each_its_own, modules={"of_early": {"capacity": 25}, "of_rare": None})
    config.multi_agent(policies_to_train=["of_early"]).env_runners(num_env_runners=1)
    algorithm = built(config)
    before = algorithm.get_module("of_late").state_dict()
    result = trained(algorithm)
    after = algorithm.get_module("of_late").state_dict()
    buffer, rows, record = algorithm.local_replay_buffer, stored(algorithm), recorded(algorithm, each_its_own)
    assert set(buffer.modules) == {"of_early", "of_late"}
    assert rows["of_early"] <= record["of_early"] and rows["of_early"].total() == 25
    assert rows["of_late"] == record["of_late"]
    assert buffer.modules["of_early"].replay.stats()["priorities_updated"] > 0
    assert buffer.modules["of_late"].replay.stats()["priorities_updated"] == 0
    assert all(torch.equal(torch.as_tensor(before[name]), torch.as_tensor(after[name])) for name in before)
    metrics = result["replay_buffer"]
    assert set(metrics["num_agent_steps_added_lifetime"]) == {"early", "late"}
    assert metrics["num_module_steps_stored"] == {"of_early": 25, "of_late": record["of_late"].total()}


def test_steps_counted_by_agent(tmp_path: Path) -> None:
    config = small(DQNConfig, MultiAgentCartPole, "uniform").environment(env_config={"num_agents": 2})
    config.multi_agent(
        policies={"of_0", "of_1"}, policy_mapping_fn=each_its_own, count_steps_by="agent_steps"
    ).training(num_steps_sampled_before_learning_starts=60)
    algorithm = built(config, restore=False)
    rows, results = [], []
    while not results or "learners" not in results[-1]:
        results.append(algorithm.train())
        rows.append(len(algorithm.local_replay_buffer))
    assert rows[-1] == sum(results[-1]["env_runners"]["num_agent_steps_sampled_lifetime"].values()) >= 60
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    again = Algorithm.from_checkpoint(path)  # without the buffer: a warm-up of 60 agent steps is due again
    assert len(again.local_replay_buffer) == 0
    while not again.local_replay_buffer.get_sampled_timesteps():
        assert len(again.local_replay_buffer) < 60
        again.train()
    assert len(again.local_replay_buffer) >= 60


def test_a_checkpoint_holds_the_replay_of_each_module(tmp_path: Path) -> None:
    config = uneven(two_share, modules={"shared": {"capacity": 50}}).training(n_step=3)
    algorithm = built(config)
    trained(algorithm)
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    rows, drawn = stored(algorithm), algorithm.local_replay_buffer.sample(num_items=30, n_step=3)
    again = Algorithm.from_checkpoint(path)
    assert stored(again) == rows and rows["shared"].total() == 50 and set(rows) == {"shared", "default_policy"}
    for expected, block in zip(drawn, again.local_replay_buffer.sample(num_items=30, n_step=3), strict=True):
        assert block.module_id == expected.module_id and len(block) == 30
        np.testing.assert_array_equal(block.get_observations(slice(0, 30)), expected.get_observations(slice(0, 30)))
        np.testing.assert_array_equal(block.get_rewards(slice(0, 30)), expected.get_rewards(slice(0, 30)))
    result = again.train()
    now, record = stored(again), recorded(again, two_share)
    assert record["default_policy"] <= now["default_policy"] and record["default_policy"]
    assert result["replay_buffer"]["num_env_steps_added_lifetime"] > rows["default_policy"].total()


def test_the_example_runs(run_example: Any) -> None:
    assert run_example("rllib_two_agents.py")[-1].split()[0] == "200"
