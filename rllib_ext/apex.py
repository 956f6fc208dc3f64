# SPDX-License-Identifier: Apache-2.0
"""Ape-X on RLlib's DQN: asynchronous collection with an epsilon for each environment, and its updates."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.algorithms.dqn import DQN, DQNConfig
from ray.rllib.algorithms.dqn.default_dqn_rl_module import DefaultDQNRLModule
from ray.rllib.core import ALL_MODULES, COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.utils import metrics as keys
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.replay_buffers.utils import update_priorities_in_episode_replay_buffer
from ray.rllib.utils.schedules.scheduler import Scheduler

from lightning_replay.options import ABOVE_ZERO, checked_count, checked_number
from lightning_replay.sharded.rate_limiter import RateLimiter
from rllib_ext.rllib_compat import (
    Attached,
    env_steps_in,
    force_weights,
    has_recurrent_module,
    leave_runner_states,
    probe_lost,
)

__all__ = ["ApexDQN", "ApexDQNConfig", "RateLimiter"]
RATE_LIMITER = "rate_limiter"
_SHARE_OF_FIRST_ROWS = 0.1
TAG = "apex_collect"
_PAUSE_S = 0.01  # while nothing may be drawn
_VERSION: Attached[int] = Attached("_apex_state_version")
_HAS_EPSILONS: Attached[bool] = Attached("_apex_has_epsilons")


class ApexDQN(DQN):
    """DQN with distributed, asynchronous collection: Ape-X, Horgan et al. 2018, https://arxiv.org/abs/1803.00933.

    EnvRunners play without a pause, each environment with its own epsilon. Their steps are added to the replay buffer
    as they arrive. Meanwhile the loop draws batches and updates the Learners, and every ``broadcast_interval`` updates
    new weights go out with the next requests. Any replay buffer of DQN serves. If it draws ahead of the Learners, it
    does so within its ``sample``. Without remote EnvRunners the loop plays the steps itself.

    Results have the counts of the :class:`~lightning_replay.sharded.rate_limiter.RateLimiter` under ``rate_limiter``,
    and checkpoints hold them. Unlike the paper's, new rows get the largest priority instead of one that the EnvRunner
    computes, and the target network is updated by environment steps, as in RLlib's DQN.
    """

    config: ApexDQNConfig

    @classmethod
    def get_default_config(cls) -> ApexDQNConfig:
        """Returns a new :class:`ApexDQNConfig`.

        :meta private:
        """
        return ApexDQNConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Builds the algorithm and sets the exploration of its EnvRunners. Refuses a module without an epsilon."""
        super().setup(config)
        self.rate_limiter: RateLimiter = self.config.new_rate_limiter()
        self._updates_until_broadcast = self.config.broadcast_interval
        self._learned: set[str] = set()
        timeout_s = math.inf if self.config.sample_timeout_s is None else self.config.sample_timeout_s
        exploration = {"epsilon": self.config.epsilon, "exponent": self.config.epsilon_exponent}
        self.collection: Collection = Collection(
            self.env_runner_group, self.config.rows_per_request, timeout_s, exploration
        )
        found = self.env_runner_group.foreach_env_runner(lambda runner: set_epsilons(runner, **exploration))
        others = [name for names in found for name in names]
        if others and not self.config.is_multi_agent:
            raise ValueError(
                f"the module is of class {others[0]}, which has no epsilon that could be set. Derive it from RLlib's "
                "DefaultDQNTorchRLModule, or train with DQNConfig"
            )

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """Restores lost EnvRunners once they answer again, and returns their numbers.

        :meta private:
        """
        is_ours = env_runner_group is self.env_runner_group
        if is_ours and not probe_lost(env_runner_group):
            return []
        restored: list[int] = super().restore_env_runners(env_runner_group)
        for number in restored if is_ours else ():  # what they were to play is lost
            self.collection.requested.pop(number, None)
        return restored

    def training_step(self) -> None:
        """Adds the steps that have arrived, requests further ones, and updates the Learners once if it may draw."""
        limiter = self.rate_limiter
        buffer = self.local_replay_buffer
        with self.metrics.log_time((keys.TIMERS, keys.ENV_RUNNER_SAMPLING_TIMER)):
            collected = self._collect(may_sample=limiter.may_sample(env_steps_in(buffer)))
        if collected:
            self.metrics.aggregate([metrics for _, metrics in collected], key=keys.ENV_RUNNER_RESULTS)
            with self.metrics.log_time((keys.TIMERS, keys.REPLAY_BUFFER_ADD_DATA_TIMER)):
                for episodes, metrics in collected:
                    size = env_steps_in(buffer)
                    buffer.add(episodes)
                    limiter.insert(int(metrics.get(keys.NUM_ENV_STEPS_SAMPLED, 0)), size)
        size = env_steps_in(buffer)  # once, because a buffer in several actors waits for their answers
        if self.env_runner_group.num_remote_env_runners():
            self.collection.request(lambda pending: limiter.may_insert(size, pending))
        if limiter.may_sample(size):
            self._update_learners()
            limiter.sample()
            self._updates_until_broadcast -= 1
        if self._updates_until_broadcast <= 0:
            self._updates_until_broadcast = self.config.broadcast_interval
            with self.metrics.log_time((keys.TIMERS, keys.SYNCH_WORKER_WEIGHTS_TIMER)):
                self._broadcast()

    def _collect(self, *, may_sample: bool) -> list[tuple[list[Any], Any]]:
        if self.env_runner_group.num_remote_env_runners():
            return self.collection.fetch(wait=not may_sample)
        if may_sample and self.rate_limiter.balance > 0:
            # In one process, steps and draws take turns.
            return []
        return [(self.env_runner.sample(), self.env_runner.get_metrics())]

    def _update_learners(self) -> None:
        """Draws a batch, updates the Learners and the priorities, as the synchronous step of RLlib's DQN does."""
        config = self.config
        metrics = self.metrics
        buffer = self.local_replay_buffer
        # A recurrent module learns from sequences.
        is_stateful = has_recurrent_module(self)
        with metrics.log_time((keys.TIMERS, keys.REPLAY_BUFFER_SAMPLE_TIMER)):
            episodes = buffer.sample(
                num_items=config.total_train_batch_size,
                n_step=config.n_step,
                batch_length_T=is_stateful * config.model_config.get("max_seq_len", 0),
                lookback=int(is_stateful),
                min_batch_length_T=config.burn_in_len,
                gamma=config.gamma,
                beta=config.replay_buffer_config.get("beta"),
                sample_episodes=True,
            )
            metrics.aggregate([buffer.get_metrics()], key=keys.REPLAY_BUFFER_RESULTS)
        with metrics.log_time((keys.TIMERS, keys.LEARNER_UPDATE_TIMER)):
            clocks = (keys.NUM_ENV_STEPS_SAMPLED_LIFETIME, keys.NUM_AGENT_STEPS_SAMPLED_LIFETIME)
            timesteps = {one: metrics.peek((keys.ENV_RUNNER_RESULTS, one), default=0) for one in clocks}
            results = self.learner_group.update(episodes=episodes, timesteps=timesteps)
            self._learned |= {name for result in results for name in result} - {ALL_MODULES}
            found: dict[str, list[Any]] = defaultdict(list)  # TD errors, in the order of the Learners
            for name, one in (pair for result in results for pair in result.items()):
                if keys.TD_ERROR_KEY in one:
                    found[name].extend(convert_to_numpy(one.pop(keys.TD_ERROR_KEY).peek()))  # the others are logged
            metrics.aggregate(results, key=keys.LEARNER_RESULTS)
        with metrics.log_time((keys.TIMERS, keys.REPLAY_BUFFER_UPDATE_PRIOS_TIMER)):
            td_errors = {name: {keys.TD_ERROR_KEY: np.concatenate(parts, axis=0)} for name, parts in found.items()}
            update_priorities_in_episode_replay_buffer(replay_buffer=buffer, td_errors=td_errors)

    def _broadcast(self) -> None:
        """Hands out the weights of modules that have learned, and the merged states of connectors."""
        group = self.env_runner_group
        connector_states = self.collection.connector_states
        self.collection.connector_states = {}
        modules = [f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}/{name}" for name in sorted(self._learned)]
        modules = modules or [f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}"]
        learner_state = self.learner_group.get_state(components=modules, inference_only=True)[COMPONENT_LEARNER]
        state = group.get_merged_env_runner_state(
            config=self.config,
            rl_module_state={name: learner_state[name] for name in (COMPONENT_RL_MODULE, keys.WEIGHTS_SEQ_NO)},
            connector_states=list(connector_states.values()),
            env_steps_sampled=self.metrics.peek(
                (keys.ENV_RUNNER_RESULTS, keys.NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0
            ),
            env_to_module=self.env_to_module_connector,
            module_to_env=self.module_to_env_connector,
        )
        self._learned = set()
        if group.local_env_runner is not None:
            force_weights(group.local_env_runner, state)
        if not self.config.broadcast_env_runner_states:
            state = {name: value for name, value in state.items() if not name.endswith("_connector")}
        if group.num_remote_env_runners():
            self.collection.publish(state)

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
        """Restores :meth:`get_state`, or the state of a DQN, with the ratio at its start."""
        super().set_state(state)
        if RATE_LIMITER in state:
            self.rate_limiter.load_state_dict(state[RATE_LIMITER])
        self._updates_until_broadcast = 0  # the EnvRunners have other weights


class ApexDQNConfig(DQNConfig):
    """Configures :class:`ApexDQN`. The options are DQN's, and the options of :meth:`training`.

    Defaults that differ from DQN's: returns over 3 steps, 512 rows in a batch (both as in the paper), fragments of 50
    steps, two requests for every EnvRunner in flight.

    Example:
        >>> config = ApexDQNConfig().environment("CartPole-v1").env_runners(num_env_runners=2)
        >>> config = config.training(samples_per_insert=8.0, train_batch_size_per_learner=64)
        >>> config.new_rate_limiter().error_buffer  # a batch, and the draws that 2 * 2 requests of 50 steps call for
        1664.0
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ApexDQN)
        self.n_step = 3
        self.train_batch_size = 512
        self.rollout_fragment_length: int = 50
        self.max_requests_in_flight_per_env_runner = 2
        self.epsilon: float = 0.4
        self.epsilon_exponent: float = 7.0
        self.samples_per_insert: float | None = None
        self.error_buffer: float | None = None
        self.broadcast_interval = 10
        # RLlib's own would wait for every EnvRunner at the end of an iteration.
        leave_runner_states(self)

    def training(
        self,
        *,
        epsilon: float = NotProvided,
        epsilon_exponent: float = NotProvided,
        samples_per_insert: float | None = NotProvided,
        error_buffer: float | None = NotProvided,
        broadcast_interval: int = NotProvided,
        **options: Any,
    ) -> ApexDQNConfig:
        """Sets the options of training.

        Args:
            epsilon: ε of the environment that explores most, one number. See :func:`~rllib_ext.apex.epsilons`.
            epsilon_exponent: α. The environment that explores least has ``epsilon ** (1 + epsilon_exponent)``.
            samples_per_insert: rows drawn for each environment step, with several agents of each module. A
                :class:`~lightning_replay.sharded.rate_limiter.RateLimiter` that counts environment steps keeps the
                ratio. The loop draws nothing while too few steps have come, and requests no steps while too many have
                come. ``None`` leaves both sides as fast as they are.
            error_buffer: rows by which draws may be ahead or behind. By default, it is a tenth of the draws that
                ``num_steps_sampled_before_learning_starts`` steps call for, and enough for one batch and all requests
                in flight.
            broadcast_interval: updates after which EnvRunners get new weights.
            options: of DQN. ``num_steps_sampled_before_learning_starts`` counts environment steps in the buffer, and
                not the steps of the whole run. ``training_intensity`` is refused.
        """
        super().training(**options)
        given = {
            "epsilon": epsilon,
            "epsilon_exponent": epsilon_exponent,
            "samples_per_insert": samples_per_insert,
            "error_buffer": error_buffer,
            "broadcast_interval": broadcast_interval,
        }
        for name, value in given.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    def validate(self) -> None:
        """Refuses options that cannot work together."""
        super().validate()
        if self.in_evaluation:
            return
        if not (self.enable_rl_module_and_learner and self.enable_env_runner_and_connector_v2):
            raise ValueError("ApexDQN is on the new API stack alone. Remove .api_stack(...) from the config")
        one_number = "one number in [0, 1] and no schedule: every environment of ApexDQN keeps its own epsilon"
        checked_number("epsilon", self.epsilon, 0.0, 1.0, accepted=one_number)
        checked_number("epsilon_exponent", self.epsilon_exponent, 0.0)
        checked_count("broadcast_interval", self.broadcast_interval, of="updates")
        if self.training_intensity is not None:
            raise ValueError(
                f"training_intensity is {self.training_intensity}; ApexDQN holds the ratio by "
                f"samples_per_insert={self.training_intensity}. Give that instead"
            )
        capacity = self.replay_buffer_config.get("capacity")
        needed = self.num_steps_sampled_before_learning_starts
        if isinstance(capacity, int) and capacity < needed:
            raise ValueError(
                f"num_steps_sampled_before_learning_starts is {needed}, and the buffer's capacity is {capacity}: "
                "training would never start. Lower the one or raise the other"
            )
        self.new_rate_limiter()

    def new_rate_limiter(self) -> RateLimiter:
        """Returns the limiter that these options describe.

        :meta private:
        """
        first_rows = max(self.num_steps_sampled_before_learning_starts, 1)
        ratio = self.samples_per_insert
        error_buffer = 0.0 if self.error_buffer is None else self.error_buffer
        if self.error_buffer is None and ratio is not None:
            checked_number("samples_per_insert", ratio, ABOVE_ZERO)
            requests = max(self.num_env_runners, 1) * self.max_requests_in_flight_per_env_runner
            in_flight = math.ceil(ratio * self.rows_per_request * requests)
            error_buffer = max(_SHARE_OF_FIRST_ROWS * ratio * first_rows, self.total_train_batch_size + in_flight)
        return RateLimiter(
            ratio,
            min_size_to_sample=first_rows,
            error_buffer=error_buffer,
            batch_size=self.total_train_batch_size,
            insert_size=self.rows_per_request,
        )

    @property
    def rows_per_request(self) -> int:
        """The least number of steps that an EnvRunner plays for one request. Complete episodes have more.

        :meta private:
        """
        steps = 1 if self.batch_mode == "complete_episodes" else self.get_rollout_fragment_length()
        return self.num_envs_per_env_runner * steps


class Collection:
    """Requests fragments from remote EnvRunners, and has the answers that have arrived.

    Weights and epsilons travel with the requests: an EnvRunner that was restarted has the newest too, and a slow one
    has no queue of old ones. An answer is no longer expected after ``timeout_s``, as the EnvRunner may be stuck.
    """

    def __init__(
        self, env_runner_group: Any, rows_per_request: int, timeout_s: float, exploration: Mapping[str, float]
    ) -> None:
        self._group = env_runner_group
        self._rows_per_request = rows_per_request
        self.timeout_s: float = timeout_s
        self._exploration = exploration
        self.requested: dict[int, list[float]] = defaultdict(list)  # times of unanswered requests by EnvRunner
        self._newest: dict[int, int] = defaultdict(int)  # number of the last request by EnvRunner
        self._num_requests = self._version = 0
        self._state: list[Any] = []
        self.connector_states: dict[int, Any] = {}  # the newest, of EnvRunners that have answered since the last call

    def publish(self, state: Any) -> None:
        """Puts the weights of the modules into the object store, for the EnvRunners that answer next."""
        self._version += 1
        self._state = [ray.put(state)]

    def fetch(self, *, wait: bool) -> list[tuple[list[Any], Any]]:
        """Returns the answers that have arrived, and may ``wait`` a moment for further ones."""
        if wait and not any(self.requested.values()):
            time.sleep(_PAUSE_S)  # every EnvRunner was lost, and is being restarted
        answers = self._group.fetch_ready_async_reqs(tags=TAG, timeout_seconds=_PAUSE_S if wait else 0.0)
        collected = []
        for number, (episodes, states, metrics) in answers:
            if self.requested[number]:
                self.requested[number].pop(0)
            self.connector_states[number] = states
            collected.append((episodes, metrics))
        return collected

    def request(self, is_permitted: Callable[[int], bool]) -> None:
        """Requests fragments, first from EnvRunners with fewest to play, as long as the rows on their way permit it."""
        healthy = self._group.healthy_env_runner_ids()
        self.requested = defaultdict(list, {one: self.requested[one] for one in healthy})
        while healthy and is_permitted(self._pending()):
            number = min(healthy, key=lambda one: (len(self.requested[one]), self._newest[one]))
            sent = self._group.foreach_env_runner_async(
                collect,
                tag=TAG,
                kwargs={"version": self._version, "state": self._state, "exploration": self._exploration},
                remote_worker_ids=[number],
            )
            if sent:
                self._num_requests += 1
                self._newest[number] = self._num_requests
                self.requested[number].append(time.monotonic())
            else:
                healthy.remove(number)  # it has as many as it may have

    def _pending(self) -> int:
        oldest = time.monotonic() - self.timeout_s
        expected = sum(len(times) for times in self.requested.values() if times and times[0] > oldest)
        return expected * self._rows_per_request


def collect(
    env_runner: Any, version: int, state: list[Any], exploration: Mapping[str, float]
) -> tuple[list[Any], Any, Any]:
    """Plays one fragment on an EnvRunner with the newest weights. Returns episodes, connectors' states, and metrics."""
    # RLlib does not notice every restart of a process, because the answer to a second request makes it healthy.
    if not _HAS_EPSILONS.of(env_runner):
        set_epsilons(env_runner, **exploration)
        _HAS_EPSILONS.set(env_runner, True)
    if state and _VERSION.of(env_runner) != version:
        force_weights(env_runner, ray.get(state[0]))
        _VERSION.set(env_runner, version)
    episodes = env_runner.sample()
    return episodes, env_runner.get_state(not_components=COMPONENT_RL_MODULE), env_runner.get_metrics()


def set_epsilons(env_runner: Any, *, epsilon: float, exponent: float) -> list[str]:
    """Gives each environment its epsilon in place of the module's schedule. Returns modules that have none."""
    config = env_runner.config
    module = env_runner.module
    if env_runner.env is None or module is None:
        return []
    runners = max(config.num_env_runners, 1)
    place = max(env_runner.worker_index - 1, 0)  # 0 is the EnvRunner in the algorithm's process
    if config.is_multi_agent:  # one for the EnvRunner: the rows of a module's batches are agents, not environments
        value: Any = float(epsilons(runners, epsilon, exponent)[place])
        modules = [one.unwrapped() for _, one in module.items()]
    else:
        own = epsilons(runners * env_runner.num_envs, epsilon, exponent).reshape(runners, -1)[place]
        device = next(module.parameters()).device
        value = torch.as_tensor(own, dtype=torch.float32, device=device)
        modules = [module.unwrapped()]
    others = [one for one in modules if not isinstance(one, DefaultDQNRLModule)]
    for one in modules:
        if isinstance(one, DefaultDQNRLModule):
            one.epsilon_schedule = Scheduler(value, framework=one.framework)
    return [type(one).__name__ for one in others]


def epsilons(num_environments: int, epsilon: float, exponent: float) -> np.ndarray:
    """Returns the probability of a random action in each environment, ``epsilon ** (1 + exponent * i / (N - 1))``.

    Section 4 of Horgan et al. 2018, https://arxiv.org/abs/1803.00933, with ε = 0.4 and α = 7.

    Args:
        num_environments: N. A single environment gets ``epsilon``.
        epsilon: ε, of the first environment.
        exponent: α. The last environment gets ``epsilon ** (1 + exponent)``.

    Example:
        >>> epsilons(3, epsilon=0.5, exponent=2.0).tolist()
        [0.5, 0.25, 0.125]
    """
    place = np.arange(num_environments) / max(num_environments - 1, 1)
    result: np.ndarray = epsilon ** (1 + exponent * place)
    return result
