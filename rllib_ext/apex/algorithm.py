# SPDX-License-Identifier: Apache-2.0
"""Ape-X on RLlib's DQN: its Learners and modules, with a training loop that waits for no EnvRunner."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQN
from ray.rllib.core import (
    ALL_MODULES,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_LEARNER,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
    COMPONENT_RL_MODULE,
)
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    REPLAY_BUFFER_ADD_DATA_TIMER,
    REPLAY_BUFFER_RESULTS,
    REPLAY_BUFFER_SAMPLE_TIMER,
    REPLAY_BUFFER_UPDATE_PRIOS_TIMER,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TD_ERROR_KEY,
    TIMERS,
    WEIGHTS_SEQ_NO,
)
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.replay_buffers.utils import update_priorities_in_episode_replay_buffer

from rllib_ext.apex.collection import Collected, Collection
from rllib_ext.apex.config import ApexDQNConfig
from rllib_ext.apex.exploration import set_epsilons
from rllib_ext.rllib_compat import force_weights, probe_lost

RATE_LIMITER = "rate_limiter"
_CONNECTORS = (COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR)


class ApexDQN(DQN):
    """DQN with distributed, asynchronous collection: Ape-X, Horgan et al. 2018, https://arxiv.org/abs/1803.00933.

    EnvRunners play without a pause, each environment with an epsilon of its own; their steps are added to the replay
    buffer as they arrive. Meanwhile the loop draws batches and updates the Learners, and every ``broadcast_interval``
    updates new weights go out with the next requests. Any replay buffer of DQN serves; one that draws ahead of the
    Learners does so within its ``sample``. Without remote EnvRunners the loop plays the steps itself.

    Results have the counts of the :class:`~rllib_ext.apex.rate_limiter.RateLimiter` under ``rate_limiter``, and
    checkpoints hold them. Unlike the paper's, new rows get the largest priority instead of one that the EnvRunner
    computes, and the target network is updated by environment steps, as in RLlib's DQN.
    """

    config: ApexDQNConfig

    @classmethod
    def get_default_config(cls) -> ApexDQNConfig:
        """Returns the default config."""
        return ApexDQNConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds the algorithm and sets the exploration of its EnvRunners.

        Raises:
            ValueError: a module without an epsilon of its own.
        """
        super().setup(config)
        self.rate_limiter = self.config.new_rate_limiter()
        self._updates_until_broadcast = self.config.broadcast_interval
        self._learned: set[str] = set()
        self._collection = Collection(
            self.env_runner_group, self.config.rows_per_request, self.config.sample_timeout_s or math.inf
        )
        others = self._set_epsilons()
        if others and not self.config.is_multi_agent:
            raise ValueError(
                f"the module is of class {others[0]}, which has no epsilon that could be set. Derive it from RLlib's "
                "DefaultDQNTorchRLModule, or train with DQNConfig"
            )

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """Restores lost EnvRunners, with their own epsilon, once they answer again; returns their numbers."""
        is_ours = env_runner_group is self.env_runner_group
        if is_ours and not probe_lost(env_runner_group):
            return []
        restored: list[int] = super().restore_env_runners(env_runner_group)
        if restored and is_ours:
            self._collection.forget(restored)
            self._set_epsilons(remote_worker_ids=restored, local_env_runner=False)
        return restored

    def _set_epsilons(self, **which: Any) -> list[str]:
        options = {"epsilon": self.config.epsilon, "exponent": self.config.epsilon_exponent}
        found = self.env_runner_group.foreach_env_runner(lambda runner: set_epsilons(runner, **options), **which)
        return [name for names in found for name in names]

    def training_step(self) -> None:
        """Adds the steps that have arrived, requests further ones, and updates the Learners once if it may draw."""
        limiter, buffer = self.rate_limiter, self.local_replay_buffer
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            collected = self._collect(may_sample=limiter.may_sample(len(buffer)))
        if collected:
            self.metrics.aggregate([one.metrics for one in collected], key=ENV_RUNNER_RESULTS)
            with self.metrics.log_time((TIMERS, REPLAY_BUFFER_ADD_DATA_TIMER)):
                for one in collected:
                    limiter.insert(one.num_env_steps, len(buffer))
                    buffer.add(one.episodes)
        if self.env_runner_group.num_remote_env_runners():
            self._collection.request(lambda pending: limiter.may_insert(len(buffer), pending))
        if limiter.may_sample(len(buffer)):
            limiter.sample()
            self._update(buffer)
            self._updates_until_broadcast -= 1
        if self._updates_until_broadcast <= 0:
            self._updates_until_broadcast = self.config.broadcast_interval
            with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
                self._broadcast()

    def _collect(self, *, may_sample: bool) -> list[Collected]:
        if self.env_runner_group.num_remote_env_runners():
            return self._collection.fetch(wait=not may_sample)
        if may_sample and self.rate_limiter.balance > 0:
            return []  # in one process steps and draws take turns
        episodes, metrics = self.env_runner.sample(), self.env_runner.get_metrics()
        return [Collected(episodes, metrics, int(metrics.get(NUM_ENV_STEPS_SAMPLED, 0)))]

    def _update(self, buffer: Any) -> None:
        """Draws a batch, updates the Learners and the priorities, as DQN's synchronous step does."""
        config = self.config
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_SAMPLE_TIMER)):
            episodes = buffer.sample(
                num_items=config.total_train_batch_size,
                n_step=config.n_step,
                batch_length_T=self._module_is_stateful * config.model_config.get("max_seq_len", 0),
                lookback=int(self._module_is_stateful),
                min_batch_length_T=config.burn_in_len,
                gamma=config.gamma,
                beta=config.replay_buffer_config.get("beta"),
                sample_episodes=True,
            )
            self.metrics.aggregate([buffer.get_metrics()], key=REPLAY_BUFFER_RESULTS)
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            clocks = (NUM_ENV_STEPS_SAMPLED_LIFETIME, NUM_AGENT_STEPS_SAMPLED_LIFETIME)
            timesteps = {one: self.metrics.peek((ENV_RUNNER_RESULTS, one), default=0) for one in clocks}
            results = self.learner_group.update(episodes=episodes, timesteps=timesteps)
            self._learned |= {name for result in results for name in result} - {ALL_MODULES}
            td_errors = _pop_td_errors(results)
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
        with self.metrics.log_time((TIMERS, REPLAY_BUFFER_UPDATE_PRIOS_TIMER)):
            update_priorities_in_episode_replay_buffer(replay_buffer=buffer, td_errors=td_errors)

    def _broadcast(self) -> None:
        """Hands out the weights of modules that have learned, and the merged states of connectors."""
        group = self.env_runner_group
        modules = [f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}/{name}" for name in sorted(self._learned)]
        modules = modules or [f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}"]
        learner_state = self.learner_group.get_state(components=modules, inference_only=True)[COMPONENT_LEARNER]
        state = group.get_merged_env_runner_state(
            config=self.config,
            rl_module_state={name: learner_state[name] for name in (COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO)},
            connector_states=self._collection.take_connector_states(),
            env_steps_sampled=self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0),
            env_to_module=self.env_to_module_connector,
            module_to_env=self.module_to_env_connector,
        )
        self._learned = set()
        if group.local_env_runner is not None:
            force_weights(group.local_env_runner, state)
        if not self.config.broadcast_env_runner_states:
            state = {name: value for name, value in state.items() if name not in _CONNECTORS}
        self._collection.publish(state)

    def step(self) -> dict[str, Any]:
        """Returns the results of an iteration, with the counts of the rate limiter."""
        results: dict[str, Any] = super().step()
        results[RATE_LIMITER] = self.rate_limiter.stats()
        return results

    def get_state(self, components: Any = None, *, not_components: Any = None, **options: Any) -> dict[str, Any]:
        """Returns the state, with the counts of the rate limiter."""
        state: dict[str, Any] = super().get_state(components, not_components=not_components, **options)
        return {**state, RATE_LIMITER: self.rate_limiter.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`get_state`, or the state of a DQN, of which the ratio starts anew."""
        super().set_state(state)
        if RATE_LIMITER in state:
            self.rate_limiter.load_state_dict(state[RATE_LIMITER])
        self._updates_until_broadcast = 0  # the EnvRunners have other weights


def _pop_td_errors(results: list[Any]) -> dict[str, Any]:
    """Takes the TD errors, by module and in the order of the Learners, out of results, which are logged."""
    found: dict[str, list[Any]] = defaultdict(list)
    for result in results:
        for name, one in result.items():
            if TD_ERROR_KEY in one:
                found[name].extend(convert_to_numpy(one.pop(TD_ERROR_KEY).peek()))
    return {name: {TD_ERROR_KEY: np.concatenate(parts, axis=0)} for name, parts in found.items()}
