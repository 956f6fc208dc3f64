# SPDX-License-Identifier: Apache-2.0
"""Surprise and action values of Learners in shards, whose rows are kept by them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig

from lightning_replay.retention.surprise import on_policyness

from .rllib_algorithms import EchoLearner, built, small, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray", "algorithms_end")]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def priorities(shard: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Observation, action and retention priority of each row."""
    replay = shard.held.replay
    index = torch.arange(len(replay))
    rows = replay.storage.get(index)
    return rows["observation"], rows["action"], replay.writer.retention_priority(index)


def test_learners_report_surprise_and_action_values_to_the_shards() -> None:
    """Rows of an :class:`EchoLearner`, whose TD error is the first number of the observation; it learns nothing."""
    config = small(DQNConfig, "CartPole-v1", "surprise_retention", num_shards=2, capacity=400, priority_exponent=0.0)
    config.env_runners(num_env_runners=0).learners(num_learners=0, learner_class=EchoLearner).training(lr=0.0)
    config.debugging(seed=0)
    algorithm = built(config)
    result = trained(algorithm)
    module = algorithm.get_module()
    found = ray.get([shard.__ray_call__.remote(priorities) for shard in algorithm.local_replay_buffer.shards.handles])
    for observation, action, priority in found:
        with torch.no_grad():
            values = module.compute_q_values({"obs": observation})["qf_preds"]
        weight = on_policyness(values, action)
        updated = torch.isclose(priority, observation[:, 0] ** 2 * weight)
        assert updated.sum() > 15 and weight[updated].max() < 0.999
    retention = result["replay_buffer"]["retention"]
    assert retention["admitted"] == result["replay_buffer"]["num_env_steps_stored"] >= 70 and retention["evicted"] == 0
