# SPDX-License-Identifier: Apache-2.0
"""The options of Ape-X."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.algorithms.dqn import DQNConfig

from lightning_replay.validation import ABOVE_ZERO, checked_count, checked_number
from rllib_ext.apex.rate_limiter import RateLimiter

_SHARE_OF_FIRST_ROWS = 0.1


class ApexDQNConfig(DQNConfig):
    """Configures :class:`~rllib_ext.apex.algorithm.ApexDQN`; the options are DQN's, and those of :meth:`training`.

    Defaults that differ from DQN's: returns over 3 steps, 512 rows in a batch (both as in the paper), fragments of 50
    steps, two requests for every EnvRunner in flight.

    Example:
        >>> config = ApexDQNConfig().environment("CartPole-v1").env_runners(num_env_runners=2)
        >>> config = config.training(samples_per_insert=8.0, train_batch_size_per_learner=64)
        >>> config.new_rate_limiter().error_buffer  # a batch, and the draws that 2 * 2 requests of 50 steps call for
        1664.0
    """

    def __init__(self, algo_class: type | None = None) -> None:
        from rllib_ext.apex.algorithm import ApexDQN  # which has this class as its default config

        super().__init__(algo_class=algo_class or ApexDQN)
        self.n_step = 3
        self.train_batch_size = 512
        self.rollout_fragment_length = 50
        self.max_requests_in_flight_per_env_runner = 2
        self.epsilon = 0.4
        self.epsilon_exponent = 7.0
        self.samples_per_insert: float | None = None
        self.error_buffer: float | None = None
        self.broadcast_interval = 10
        # RLlib's own would wait for every EnvRunner at the end of an iteration.
        self._dont_auto_sync_env_runner_states = True

    def training(  # type: ignore[override]
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
            epsilon: ε of the environment that explores most, one number; see
                :func:`~rllib_ext.apex.exploration.epsilons`.
            epsilon_exponent: α; the environment that explores least has ``epsilon ** (1 + epsilon_exponent)``.
            samples_per_insert: rows drawn for each environment step, held by a
                :class:`~rllib_ext.apex.rate_limiter.RateLimiter`: the loop draws nothing while too few steps have come,
                and requests none while too many have. ``None`` leaves both sides as fast as they are.
            error_buffer: rows by which draws may be ahead or behind. By default a tenth of the draws that
                ``num_steps_sampled_before_learning_starts`` rows call for, and enough for one batch and all requests in
                flight.
            broadcast_interval: updates after which EnvRunners get new weights.
            options: of DQN. ``num_steps_sampled_before_learning_starts`` are rows in the buffer, and not steps of the
                whole run; ``training_intensity`` is refused.
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
        """Refuses options that cannot work together.

        Raises:
            TypeError: a value of another kind.
            ValueError: a value out of range, the old API stack, a schedule of ``epsilon``, a ``training_intensity``, or
                a buffer too small for ``num_steps_sampled_before_learning_starts``.
        """
        super().validate()
        if self.in_evaluation:
            return
        if not (self.enable_rl_module_and_learner and self.enable_env_runner_and_connector_v2):
            raise ValueError("ApexDQN is on the new API stack alone. Remove .api_stack(...) from the config")
        if isinstance(self.epsilon, Sequence):
            raise ValueError(
                f"epsilon is the schedule {self.epsilon}; every environment of ApexDQN keeps its own epsilon. Give one "
                "number, epsilon=0.4, and epsilon_exponent=7.0"
            )
        checked_number("epsilon", self.epsilon, 0.0, 1.0)
        checked_number("epsilon_exponent", self.epsilon_exponent, 0.0)
        checked_count("broadcast_interval", self.broadcast_interval, of="updates")
        if self.training_intensity is not None:
            raise ValueError(
                f"training_intensity is {self.training_intensity}; ApexDQN holds the ratio by "
                f"samples_per_insert={self.training_intensity}. Give that instead"
            )
        self._check_first_rows()
        self.new_rate_limiter()

    def _check_first_rows(self) -> None:
        capacity, needed = self.replay_buffer_config.get("capacity"), self.num_steps_sampled_before_learning_starts
        if isinstance(capacity, int) and capacity < needed:
            raise ValueError(
                f"num_steps_sampled_before_learning_starts is {needed}, and the buffer's capacity is {capacity}: "
                "training would never start. Lower the one or raise the other"
            )

    def new_rate_limiter(self) -> RateLimiter:
        """Returns the limiter that these options describe."""
        first_rows = max(self.num_steps_sampled_before_learning_starts, 1)
        insert_size = self.rows_per_request
        error_buffer = self.error_buffer
        if error_buffer is None:
            requests = max(self.num_env_runners, 1) * self.max_requests_in_flight_per_env_runner
            ratio = checked_number("samples_per_insert", self.samples_per_insert or ABOVE_ZERO, ABOVE_ZERO)
            in_flight = math.ceil(ratio * insert_size * requests)
            error_buffer = max(_SHARE_OF_FIRST_ROWS * ratio * first_rows, self.total_train_batch_size + in_flight)
        return RateLimiter(
            self.samples_per_insert,
            min_size_to_sample=first_rows,
            error_buffer=error_buffer,
            batch_size=self.total_train_batch_size,
            insert_size=insert_size,
        )

    @property
    def rows_per_request(self) -> int:
        """Steps that an EnvRunner plays for one request, at least; complete episodes have more."""
        steps = 1 if self.batch_mode == "complete_episodes" else self.get_rollout_fragment_length()
        return self.num_envs_per_env_runner * steps
