# SPDX-License-Identifier: Apache-2.0
"""Hindsight in RLlib: real EnvRunners, flattened observations, DQN and SAC, and a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.connectors.env_to_module import FlattenObservations

import rllib_ext

from .rllib_algorithms import built, small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]
BITS = "lightning_replay.envs:BitFlipping-v0"


def replay_of(algorithm: Any) -> Any:
    return algorithm.local_replay_buffer.modules["default_policy"].replay


def test_dqn_from_a_file_flips_bits_learns_from_relabelled_rows_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "bits.yaml"
    path.write_text(
        f"""
        algorithm: DQN
        environment: {{env: "{BITS}"}}
        env_runners:
          num_env_runners: 1
          env_to_module_connector: {{class_path: ray.rllib.connectors.env_to_module.FlattenObservations}}
        training: {{train_batch_size_per_learner: 16, num_steps_sampled_before_learning_starts: 40, n_step: 2}}
        rl_module: {{model_config: {{fcnet_hiddens: [8], head_fcnet_hiddens: [8]}}}}
        replay:
          recipe: hindsight
          capacity: 500
          env: {BITS}
          share: 1.0
          terminated: tests.goal_steps.reached
          seed: 0
        reporting: {{min_sample_timesteps_per_iteration: 60, min_time_s_per_iteration: 0}}
        stop: {{env_steps: 100}}
        """
    )
    config, _ = rllib_ext.load_config(path)
    algorithm = config.build_algo()
    algorithm.train()
    replay = replay_of(algorithm)
    stored, batch = replay[:], replay.sample(200)
    # achieved goal, desired goal and bits, side by side; a step flips one bit
    size = 20
    changed = (stored["observation"] != stored["next", "observation"]).view(-1, 3, size).sum(2)
    assert (changed == torch.tensor([1, 0, 1])).all()
    reached = (batch["next", "observation"][:, :size] == batch["next", "observation"][:, size : 2 * size]).all(1)
    assert reached.any() and torch.equal(reached, batch["next", "terminated"].flatten())
    assert (batch["next", "reward"].flatten()[reached] > -2).all() and batch["steps_to_next_obs"].max() == 2
    path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    again = config.build_algo()
    again.restore_from_path(path)
    drawn = [one.local_replay_buffer.sample(num_items=64, n_step=2, gamma=0.99) for one in (algorithm, again)]
    seen = [torch.as_tensor(block.get_observations(slice(0, 64))) for (block,) in drawn]
    assert torch.equal(*seen), "what a Learner gets next is what it would have got"


def test_sac_in_a_maze_of_gymnasium_robotics() -> None:
    pytest.importorskip("gymnasium_robotics")
    env = "gymnasium_robotics:PointMaze_UMaze-v3"
    config = small(SACConfig, env, "uniform")
    replay = rllib_ext.replay_config("hindsight", capacity=1_000, env=env, share=1.0, strategy="final")
    config.training(replay_buffer_config=replay)
    config.env_runners(num_env_runners=0, env_to_module_connector=lambda env, spaces, device: FlattenObservations())
    algorithm = built(config)
    algorithm.train()
    batch = replay_of(algorithm).sample(100)
    goal, running = batch["observation"][:, 2:4], replay_of(algorithm)[:]["next", "observation"][-1, :2]
    assert (goal == running).all(), "one episode runs, and its newest achieved goal is that of all rows"
