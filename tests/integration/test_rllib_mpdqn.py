# SPDX-License-Identifier: Apache-2.0
"""MP-DQN of the example in RLlib: exploration over all EnvRunners, and the Learner's updates beside the agent's own."""

from __future__ import annotations

import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import TD_ERROR_KEY
from tensordict import TensorDict

from lightning_replay.agents import MPDQN

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXPLORATION_STEPS = 240


def built(runners: int) -> Algorithm:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "rllib_mpdqn.py"))
    return example["config_of"](total=4 * EXPLORATION_STEPS, warmup=48, runners=runners).build_algo()


def explored(env_runner: Any) -> float:
    """The share of random actions in an EnvRunner after its next action."""
    env_runner.sample(num_timesteps=1)
    return env_runner.module.agent.exploration_rate


def check_exploration(algorithm: Algorithm, num_runners: int) -> int:
    """Asserts that every EnvRunner explores as all their steps demand; returns that number."""
    steps = algorithm.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"))
    rates = algorithm.env_runner_group.foreach_env_runner(explored, local_env_runner=not num_runners)
    one_step = 0.9 / EXPLORATION_STEPS
    assert len(rates) == max(num_runners, 1)
    # ε may be late by the actions that its environments took since
    assert rates == pytest.approx([1 - one_step * steps] * len(rates), abs=4.5 * one_step)
    return int(steps)


def wait_for(actor: Any) -> None:
    for _ in range(600):
        with suppress(ray.exceptions.RayError):
            ray.get(actor.ping.remote())
            break
        time.sleep(0.1)


def test_exploration_falls_over_the_steps_of_all_env_runners(tmp_path: Path) -> None:
    algorithm = built(runners=2)
    algorithm.train()
    saved = check_exploration(algorithm, 2)
    path = algorithm.save_to_path(tmp_path / "saved")
    for _ in range(3):
        algorithm.train()
    assert check_exploration(algorithm, 2) >= 4 * 24
    first, _ = algorithm.env_runner_group._worker_manager.actors().values()
    ray.kill(first, no_restart=False)
    algorithm.train()  # without the first, which is missed
    wait_for(first)
    assert algorithm.train()["fault_tolerance"]["num_healthy_workers"] == 2
    assert check_exploration(algorithm, 2) >= 5 * 24
    algorithm.restore_from_path(path)
    assert check_exploration(algorithm, 2) == saved < 2 * 24


def test_a_new_algorithm_explores_as_the_one_that_was_saved(tmp_path: Path) -> None:
    algorithm = built(runners=0)
    for _ in range(4):
        algorithm.train()
    saved = check_exploration(algorithm, 0)
    path = algorithm.save_to_path(tmp_path / "saved")
    algorithm.stop()
    assert check_exploration(Algorithm.from_checkpoint(path), 0) == saved >= 4 * 24


def rows_of(episode: SingleAgentEpisode) -> dict[bytes, TensorDict]:
    """Returns over three steps, as the agent learns from them, by their observations."""
    observations, rewards, (discrete, *boxes) = episode.observations, episode.rewards, episode.get_actions()
    rows = {}
    for step in range(len(episode)):
        steps = min(3, len(episode) - step)
        following = {
            "observation": torch.from_numpy(observations[step + steps]),
            "reward": torch.tensor([sum(0.97**ahead * rewards[step + ahead] for ahead in range(steps))]),
            "terminated": torch.tensor([episode.is_terminated and step + steps == len(episode)]),
        }
        action = {
            "discrete": torch.tensor(discrete[step]),
            "parameters": torch.from_numpy(np.concatenate([box[step] for box in boxes])),
        }
        row = {"observation": torch.from_numpy(observations[step]), "action": action, "next": following}
        rows[observations[step].tobytes()] = TensorDict(row | {"steps_to_next_obs": torch.tensor([steps])})
    return rows


def test_the_learner_makes_the_updates_of_the_agent() -> None:
    algorithm = built(runners=0)
    buffer, episodes = algorithm.local_replay_buffer, algorithm.env_runner.sample(num_episodes=8)
    generator = np.random.default_rng(0)
    for episode in episodes:
        episode.rewards.data = generator.uniform(-1, 3, len(episode))
    rows = {observation: row for episode in episodes for observation, row in rows_of(episode).items()}
    buffer.add(episodes)

    module = algorithm.learner_group._learner.module["default_policy"].unwrapped()
    with torch.no_grad():  # as an agent that has learned: values to both sides of the bounds, large gradients
        for network, factor in ((module.agent.value_network, 100.0), (module.agent.target_value_network, 200.0)):
            network[-1].weight.mul_(factor)
    options = {"discount": 0.97, "target_low": 0.0, "target_high": 5.0, "target_update_rate": 0.005}
    own = MPDQN(**{**module.agent.hparams, **options, "gradient_clip": 1.0})
    own.load_state_dict(module.agent.state_dict())
    networks = [(module.agent.value_network, own.value_network)]
    networks += [(module.agent.parameter_network, own.parameter_network)]
    optimizers = own.configure_optimizers()
    for _ in range(3):
        (block,) = buffer.sample(num_items=64, n_step=algorithm.config.n_step, gamma=algorithm.config.gamma)
        drawn = slice(0, 64)
        batch = torch.stack([rows[one.tobytes()] for one in block.get_observations(drawn)])
        targets = own.targets(batch)
        assert 0 < ((targets > 0) & (targets < 5)).float().mean() < 1  # some are clipped
        *losses, td_error = own.losses(batch)
        own.zero_grad()
        sum(losses).backward()
        assert all(norm_of(network) > 1.5 for _, network in networks)
        own.clip_gradients_of_networks()
        for optimizer in optimizers:
            optimizer.step()
        own.update_targets()

        (result,) = algorithm.learner_group.update(
            episodes=[block], timesteps={"num_env_steps_sampled_lifetime": len(rows)}
        )
        learned = torch.cat([torch.as_tensor(one) for one in result["default_policy"][TD_ERROR_KEY].peek()])
        torch.testing.assert_close(learned, td_error)
        assert [norm_of(network) for network, _ in networks] == pytest.approx([1.0, 1.0], abs=1e-4)
        torch.testing.assert_close(module.agent.state_dict(), own.state_dict())


def norm_of(network: torch.nn.Module) -> float:
    """The norm of a network's gradient."""
    return torch.nn.utils.get_total_norm([one.grad for one in network.parameters()]).item()
