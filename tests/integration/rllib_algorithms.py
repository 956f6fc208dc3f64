# SPDX-License-Identifier: Apache-2.0
"""Small real algorithms and a numbered environment for the tests of the RLlib integration."""

from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
import tree
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.algorithms.sac.torch.sac_torch_learner import SACTorchLearner
from ray.rllib.utils.metrics import TD_ERROR_KEY

import rllib_ext
from lightning_replay.envs.building import TaskChoice
from rllib_ext.learner.blocks import TransitionBlock

SMALL = {"fcnet_hiddens": [8], "head_fcnet_hiddens": [8]}


class Counting(gym.Env):
    """Observes the number of its step over all episodes; every second step ends one, by turns in either way."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.count = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.count += 1
        return np.array([self.count], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.array([self.count], np.float32), 1.0, *self.ends(), {}

    def ends(self) -> tuple[bool, bool]:
        """Whether the step that was just counted is terminated, and whether it is truncated."""
        return self.count % 3 == 2 and self.count % 2 == 0, self.count % 3 == 2 and self.count % 2 == 1


class Levels(TaskChoice, gym.Env):
    """Observes the index of its task, the number of its EnvRunner, its process and its step."""

    TASKS = ("target", "far", "near")
    RETURNS = (0.0, 0.5, 1.0)
    LENGTH = 7
    observation_space = gym.spaces.Box(0, 2.0**24, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self._worker = getattr(config, "worker_index", 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._begin_task(options)
        self._playing, self._count = self.TASKS.index(self.task), 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        ended = self._count == self.LENGTH
        return self._observation(), self.RETURNS[self._playing] * ended, ended, False, {}

    def _observation(self) -> Any:
        return np.array([self._playing, self._worker, os.getpid(), self._count], np.float32)


class EchoLearner(DQNTorchLearner):
    """Returns the first number of each row's observation as its TD error."""

    def compute_loss_for_module(self, *, module_id: Any, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        self.metrics.log_value((module_id, TD_ERROR_KEY), batch["obs"][:, 0], reduce="item_series")
        return (fwd_out["qf_preds"] ** 2).mean()


class EchoSACLearner(SACTorchLearner):
    """Learns as SAC's, and returns the first number of each row's observation as its TD error."""

    def compute_loss_for_module(self, *, module_id: Any, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        self.metrics.stats[module_id][TD_ERROR_KEY].items[-1] = batch["obs"][:, 0]
        return loss


class CountingMoves(Counting):
    """With actions that can be mixed."""

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def small(algorithm: type[AlgorithmConfig], env: Any, recipe: str, **options: Any) -> AlgorithmConfig:
    """An algorithm of tiny networks and short iterations."""
    capacity = {} if "capacity_per_task" in options else {"capacity": 1000}
    return (
        algorithm()
        .environment(env)
        .training(
            replay_buffer_config=rllib_ext.replay_config(recipe, **{**capacity, **options}),
            train_batch_size_per_learner=16,
            num_steps_sampled_before_learning_starts=40,
        )
        .rl_module(model_config=SMALL)
        .reporting(min_sample_timesteps_per_iteration=40, min_time_s_per_iteration=0)
        .debugging(log_sys_usage=False)  # its thread sleeps, and stop() waits for it
    )


def built(config: AlgorithmConfig, **options: Any) -> Any:
    return rllib_ext.configure(config, **options).build_algo()


def trained(algorithm: Algorithm) -> dict[str, Any]:
    """Results of two iterations."""
    algorithm.train()
    return algorithm.train()


def watch_td_errors(replay: Any) -> list[bool]:
    """Whether each TD error of an :class:`EchoLearner` comes to the row it was computed on, filled in training."""
    home: list[bool] = []
    update = replay.update_priority

    def compared(index: torch.Tensor, td_error: torch.Tensor, **rest: Any) -> None:
        home.extend((replay.storage.get(index)["observation"][:, 0] == td_error).tolist())
        update(index, td_error, **rest)

    replay.update_priority = compared
    return home


def watch_columns(learner: Any) -> None:
    """Notes in a Learner of each batch whether columns are read-only, and whether the train batch shares memory."""
    make_batch, learner.columns_seen = learner._make_batch_if_necessary, []

    def watched(training_data: Any) -> Any:
        batch = make_batch(training_data)
        blocks = [block for block in training_data.episodes if isinstance(block, TransitionBlock)]
        received = [array for block in blocks for array in tree.flatten((block._columns, block.extra_model_outputs))]
        trained = [column.numpy() for column in batch.policy_batches["default_policy"].values()]
        shared = any(np.shares_memory(array, column) for array in received for column in trained)
        learner.columns_seen += [(array.flags.writeable, shared) for array in received]
        return batch

    learner._make_batch_if_necessary = watched
