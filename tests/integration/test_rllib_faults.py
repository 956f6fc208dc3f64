# SPDX-License-Identifier: Apache-2.0
"""What is lost around the buffer: EnvRunners, Learners, fragments, room in Ray's object store."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Iterator
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

from rllib_ext.buffer.buffer import RecipeEpisodeReplayBuffer
from tests.stored import stored_rows

from .rllib_algorithms import built, small, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("algorithms_end")]

STORE_BYTES = 80 * 1024**2  # nearly the least that Ray accepts


class Stamped(gym.Env):
    """Observes process, episode and step, so that a row shows whether it is one step of one episode."""

    observation_space = gym.spaces.Box(0, 2.0**24, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    episode_length = 37
    episodes = 0  # in this process

    def __init__(self, config: Any = None) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        Stamped.episodes += 1
        self.episode, self.count = Stamped.episodes, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observation(), float(self.count), self.count == self.episode_length, False, {}

    def _observation(self) -> Any:
        return np.array([os.getpid(), self.episode, self.count], np.float32)


class Images(Stamped):
    """The same as pictures of 75 KiB."""

    observation_space = gym.spaces.Box(0, 255, (80, 80, 3), np.float32)

    def _observation(self) -> Any:
        return np.full((80, 80, 3), self.count, np.float32)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def _cluster(small_ray: None) -> Iterator[None]:
    ray.shutdown()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES)
    yield
    ray.shutdown()


def stamped(**options: Any) -> AlgorithmConfig:
    """DQN on two EnvRunners, whose episodes take many fragments."""
    return small(DQNConfig, Stamped, "prioritized", **options).env_runners(num_env_runners=2).training(n_step=3)


def check_rows(buffer: RecipeEpisodeReplayBuffer) -> set[tuple[int, ...]]:
    """Asserts that every row is one step, none twice, each trajectory one episode without a hole; returns the steps."""
    rows = stored_rows(buffer.replay)
    before, after = rows["observation"].int(), rows["next", "observation"].int()
    assert torch.equal(before[:, :2], after[:, :2])
    assert torch.equal(before[:, 2] + 1, after[:, 2])
    assert torch.equal(rows["next", "reward"][:, 0].int(), after[:, 2])
    assert torch.equal(rows["next", "terminated"][:, 0], after[:, 2] == Stamped.episode_length)
    steps = [tuple(step) for step in before.tolist()]
    assert len(set(steps)) == len(steps)
    newest: dict[int, tuple[int, ...]] = {}
    for trajectory, (process, episode, step) in zip(rows["trajectory"].tolist(), steps, strict=True):
        assert newest.get(trajectory, (process, episode, step - 1)) == (process, episode, step - 1)
        newest[trajectory] = (process, episode, step)
    return set(steps)


def check_draws(buffer: RecipeEpisodeReplayBuffer) -> None:
    """Asserts that returns over 3 steps add up the rewards of consecutive steps of one episode."""
    (block,) = buffer.sample(num_items=200, n_step=3, gamma=1.0)
    before, after = block.get_observations(slice(0, 200)), block.get_observations(slice(1, 201))
    steps = block.get_extra_model_outputs("n_step", slice(0, 200))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    np.testing.assert_array_equal(before[:, 2] + steps, after[:, 2])
    summed = steps * before[:, 2] + steps * (steps + 1) / 2  # the reward of the step from t is t + 1
    np.testing.assert_allclose(block.get_rewards(slice(0, 200)), summed)


def remote_runners(algorithm: Algorithm) -> list[Any]:
    return list(algorithm.env_runner_group._worker_manager.actors().values())


def test_a_lost_env_runner_is_replaced_and_no_episode_is_mixed_up() -> None:
    config = stamped().fault_tolerance(restart_failed_env_runners=True).env_runners(num_envs_per_env_runner=2)
    algorithm = built(config)
    buffer = algorithm.local_replay_buffer
    module = buffer.modules["default_policy"]
    module.converter.fragments.remembered = 5  # of 4 at a time, and of the 2 that are lost
    trained(algorithm)
    before = {process for process, *_ in check_rows(buffer)}
    ray.kill(remote_runners(algorithm)[1], no_restart=False)
    for _ in range(20):
        result = algorithm.train()
        if {process for process, *_ in check_rows(buffer)} - before:
            break
    else:
        raise AssertionError("nothing came from a new EnvRunner")
    assert result["fault_tolerance"]["num_healthy_workers"] == 2
    weights = algorithm.learner_group.get_state()["learner"]["rl_module"]["default_policy"]
    played_with = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: runner.get_state(components="rl_module")["rl_module"], local_env_runner=False
    )
    assert len(played_with) == 2 and all(played_with)
    for name, array in ((name, array) for runner in played_with for name, array in runner.items()):
        np.testing.assert_array_equal(array, weights[name])
    check_draws(buffer)
    assert len(module.converter.fragments.state()["known"]) <= 5
    assert result["replay_buffer"]["num_fragment_gaps_lifetime"] == 0
    assert result["replay_buffer"]["num_duplicate_env_steps_lifetime"] == 0


def test_after_a_lost_learner_the_buffer_goes_into_a_new_algorithm(tmp_path: Path) -> None:
    algorithm = built(stamped().env_runners(num_env_runners=1).learners(num_learners=2))
    trained(algorithm)
    path = algorithm.save_to_path(tmp_path / "last")
    saved = len(algorithm.local_replay_buffer)
    algorithm.train()
    buffer = algorithm.local_replay_buffer
    before = check_rows(buffer)
    ray.kill(list(algorithm.learner_group._worker_manager.actors().values())[1], no_restart=False)
    with pytest.raises((ray.exceptions.RayError, IndexError)):  # the other Learner's, or RLlib's that none is left
        algorithm.train()
    assert before <= check_rows(buffer)  # what the EnvRunners sent before the update is there
    check_draws(buffer)
    with pytest.raises(IndexError):  # RLlib 2.60 fetches the state of the first healthy Learner; there is none
        algorithm.save_to_path(tmp_path / "without a learner")
    buffer.replay.save(tmp_path / "rows")
    state = buffer.get_state()
    algorithm.stop()
    again = algorithm.config.copy(copy_frozen=False).learners(num_learners=0).build_algo()  # with what is left
    again.restore_from_path(path)
    assert len(again.local_replay_buffer) == saved < len(buffer)
    again.local_replay_buffer.set_state(state)  # newer than the checkpoint's
    assert check_rows(again.local_replay_buffer) == check_rows(buffer)
    result = again.train()
    check_rows(again.local_replay_buffer)
    check_draws(again.local_replay_buffer)
    assert np.isfinite(result["learners"]["default_policy"]["qf_loss"])
    assert len(again.local_replay_buffer) > len(buffer)


def test_a_buffer_larger_than_the_object_store_pins_nothing_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(DQNConfig, Images, "prioritized", capacity=1500).learners(num_learners=1)
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=2, rollout_fragment_length=50)
    config.rl_module(model_config={"conv_filters": [[4, 8, 8], [8, 10, 10]], "head_fcnet_hiddens": [8]})
    config.training(num_steps_sampled_before_learning_starts=200)
    algorithm = built(config)
    buffer = algorithm.local_replay_buffer
    add, in_store = buffer.add, []

    def watched(episodes: list[Any]) -> None:
        for episode in episodes:
            array = episode.observations.data
            assert not array.flags.writeable  # Ray maps its store
            in_store.extend(weakref.ref(part) for part in (array, array.base) if isinstance(part, np.ndarray))
        add(episodes)

    monkeypatch.setattr(buffer, "add", watched)
    for _ in range(12):
        result = algorithm.train()
    gc.collect()
    assert len(in_store) >= 24 and not any(reference() is not None for reference in in_store)
    rows = stored_rows(buffer.replay)
    assert len(rows) == 1200 and rows.bytes() > 2 * STORE_BYTES
    assert (rows["next", "observation"][:, 7, 7, 1] == rows["observation"][:, 7, 7, 1] + 1).all()
    assert np.isfinite(result["learners"]["default_policy"]["qf_loss"])
    assert result["replay_buffer"]["num_fragment_gaps_lifetime"] == 0
