# SPDX-License-Identifier: Apache-2.0
"""Ape-X on a real cluster: nobody waits, the ratio holds, every environment keeps its epsilon."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

from rllib_ext.apex import TAG, ApexDQN, ApexDQNConfig, collect
from tests.stored import stored_rows

from .rllib_algorithms import Counting, EchoLearner, built, small, trained, watch_td_errors

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]


class Gated(gym.Env):
    """Observes EnvRunner, process and step; the first EnvRunner stands still while there is a file."""

    observation_space = gym.spaces.Box(0, 2.0**24, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.worker, self.gate = config.worker_index, Path(config["gate"])
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        import time

        while self.worker == 1 and self.gate.exists():
            time.sleep(0.01)
        self.count += 1
        return self._observation(), 1.0, self.count == 20, False, {}

    def _observation(self) -> Any:
        return np.array([self.worker, os.getpid(), self.count], np.float32)


class NoEpsilon(TorchRLModule):
    def setup(self) -> None:
        self.layer = torch.nn.Linear(1, 2)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def apex(env: Any, recipe: str = "prioritized", **training: Any) -> ApexDQNConfig:
    # Room for every row: one EnvRunner plays alone for as long as the other stands still.
    config = small(ApexDQNConfig, env, recipe, capacity=50_000).env_runners(rollout_fragment_length=10)
    return config.training(n_step=1, samples_per_insert=4.0, broadcast_interval=1, **training)


def epsilons(runner: Any) -> Any:
    return None if runner.env is None else runner.module.epsilon_schedule.get_current_value()


def weights_of(runner: Any) -> Any:
    return runner.get_state(components="rl_module")["rl_module"]


def processes(algorithm: Algorithm, worker: int) -> list[int]:
    rows = stored_rows(algorithm.local_replay_buffer.replay)
    seen = rows["observation"][:, :2].int()
    return seen[seen[:, 0] == worker, 1].tolist()


def until(done: Callable[[], bool], algorithm: ApexDQN, steps: int = 20_000) -> None:
    for _ in range(steps):
        if done():
            return
        algorithm.restore_env_runners(algorithm.env_runner_group)
        algorithm.training_step()
    raise AssertionError("it does not happen")


def check_weights_arrive(algorithm: ApexDQN) -> None:
    """Asserts that both EnvRunners get the Learner's present weights, while nothing is learned."""
    limiter = algorithm.rate_limiter
    first, limiter.min_size_to_sample = limiter.min_size_to_sample, 10**6
    learned = algorithm.learner_group.get_state()["learner"]["rl_module"]["default_policy"]

    def arrived() -> bool:
        played = algorithm.env_runner_group.foreach_env_runner(weights_of, local_env_runner=False)
        return len(played) == 2 and all(
            np.array_equal(array, learned[name]) for one in played for name, array in one.items()
        )

    until(arrived, algorithm, 200)
    limiter.min_size_to_sample = first


def test_on_two_env_runners(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = apex(Gated).environment(env_config={"gate": str(gate)}).fault_tolerance(restart_failed_env_runners=True)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    algorithm = built(config)
    group, limiter = algorithm.env_runner_group, algorithm.rate_limiter
    own = [torch.tensor([0.4 ** (1 + 7 * place / 3) for place in pair]) for pair in ((0, 1), (2, 3))]

    def check_epsilons() -> None:
        first, second = group.foreach_env_runner(epsilons, local_env_runner=False)
        torch.testing.assert_close([first, second], own)

    check_epsilons()
    algorithm.train()
    until(lambda: bool(processes(algorithm, 1) and processes(algorithm, 2)), algorithm)

    # One EnvRunner stands still: the other goes on.
    gate.touch()
    until(lambda: group.num_in_flight_async_reqs(TAG) == 4, algorithm)  # two each
    algorithm.train()  # fetches what was complete before
    before = len(processes(algorithm, 1)), len(processes(algorithm, 2))
    for _ in range(4):
        result = algorithm.train()
        assert abs(result["rate_limiter"]["balance"]) <= limiter.error_buffer
    after = len(processes(algorithm, 1)), len(processes(algorithm, 2))
    assert after[0] - before[0] <= 20 and after[1] - before[1] >= 140  # one fragment that was complete

    # Even where its requests take all the room that the ratio leaves: after a while they are not expected any more.
    error_buffer, limiter.error_buffer = limiter.error_buffer, 80.0  # one request of 20 rows
    collection = algorithm.collection
    timeout_s, collection.timeout_s = collection.timeout_s, 0.0
    until(lambda: len(processes(algorithm, 2)) >= after[1] + 60, algorithm, 3000)
    limiter.error_buffer, collection.timeout_s = error_buffer, timeout_s
    gate.unlink()
    until(lambda: len(processes(algorithm, 1)) >= after[0] + 60, algorithm)  # it goes on with the others

    # A checkpoint of older weights and counts.
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    saved, rows = limiter.stats(), len(algorithm.local_replay_buffer)
    trained(algorithm)
    assert limiter.stats()["num_rows_sampled_lifetime"] > saved["num_rows_sampled_lifetime"]
    algorithm.restore_from_path(path)
    assert limiter.stats() == saved and len(algorithm.local_replay_buffer) == rows
    check_weights_arrive(algorithm)
    check_epsilons()

    # An EnvRunner is killed and restarted.
    old = set(processes(algorithm, 2))
    ray.kill(group._worker_manager.actors()[2], no_restart=False)
    until(lambda: bool(set(processes(algorithm, 2)) - old), algorithm)
    check_epsilons()
    trained(algorithm)
    check_weights_arrive(algorithm)
    assert abs(limiter.balance) <= limiter.error_buffer


def test_a_process_has_its_epsilons_from_its_first_fragment_on() -> None:
    """That of an EnvRunner whose restart was not noticed, because a later request was answered."""
    config = apex(Counting).env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    runner = SingleAgentEnvRunner(config=config, worker_index=2)
    collect(runner, 0, [], {"epsilon": 0.4, "exponent": 7.0})
    torch.testing.assert_close(epsilons(runner), torch.tensor([0.4 ** (1 + 14 / 3), 0.4**8]))
    runner.stop()


def test_in_one_process(tmp_path: Path) -> None:
    config = apex(Counting).learners(learner_class=EchoLearner)
    algorithm = built(config)
    torch.testing.assert_close(algorithm.env_runner_group.foreach_env_runner(epsilons), [torch.tensor([0.4])])
    home = watch_td_errors(algorithm.local_replay_buffer.replay)
    result = trained(algorithm)
    counts = result["rate_limiter"]
    assert len(home) == counts["num_rows_sampled_lifetime"] and all(home)
    # Steps and draws take turns: no more than one request ahead of the draws, or one draw behind.
    assert -16 <= counts["balance"] <= 40
    assert counts["num_rows_sampled_lifetime"] == 4 * (counts["num_rows_inserted_lifetime"] - 40) - counts["balance"]
    assert counts["num_rows_inserted_lifetime"] == result["env_runners"]["num_env_steps_sampled_lifetime"]
    path = algorithm.save_to_path(tmp_path / "checkpoint")
    state = algorithm.rate_limiter.state_dict()

    again = ApexDQN.from_checkpoint(path)
    assert again.rate_limiter.state_dict() == state
    torch.testing.assert_close(again.env_runner_group.foreach_env_runner(epsilons), [torch.tensor([0.4])])

    again = ApexDQN.from_checkpoint(path, restore_replay=False)
    first = again.local_replay_buffer
    again.training_step()
    assert len(first) == 10 and again.rate_limiter.state_dict()["sampled"] == state["sampled"]  # a new warm-up
    for _ in range(8):
        again.training_step()
    assert again.rate_limiter.state_dict()["sampled"] > state["sampled"]
    assert abs(again.rate_limiter.balance) <= 40  # the new first rows call for no draws


def test_several_agents_and_rllibs_own_buffer() -> None:
    config = apex(MultiAgentCartPole, "uniform").environment(env_config={"num_agents": 2})
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, episode, **kwargs: f"p{agent}")
    algorithm = built(config)
    modules = algorithm.env_runner.module
    assert [one.epsilon_schedule.get_current_value() for _, one in modules.items()] == [0.4, 0.4]
    result = trained(algorithm)
    assert all(np.isfinite(result["learners"][name]["qf_loss"]) for name in ("p0", "p1"))
    counts, buffer = result["rate_limiter"], algorithm.local_replay_buffer
    # Both sides count environment steps, in most of which both agents act.
    inserted, rows = counts["num_rows_inserted_lifetime"], len(buffer)
    assert inserted == result["env_runners"]["num_env_steps_sampled_lifetime"] == buffer.num_env_steps_stored
    assert 1.2 * inserted < rows <= 2 * inserted
    assert counts["num_rows_sampled_lifetime"] == 4 * (inserted - 40) - counts["balance"] > 0

    plain = ApexDQNConfig().environment("CartPole-v1").training(samples_per_insert=2.0, train_batch_size_per_learner=16)
    plain.training(num_steps_sampled_before_learning_starts=100).reporting(min_sample_timesteps_per_iteration=100)
    algorithm = plain.debugging(log_sys_usage=False).build_algo()
    assert trained(algorithm)["rate_limiter"]["num_rows_sampled_lifetime"] > 0


def test_a_module_without_epsilon_is_refused() -> None:
    config = apex(Counting).rl_module(rl_module_spec=RLModuleSpec(module_class=NoEpsilon))
    with pytest.raises(ValueError, match="NoEpsilon, which has no epsilon that could be set"):
        built(config)
