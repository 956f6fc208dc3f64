# SPDX-License-Identifier: Apache-2.0
"""Episodes from EnvRunners without waiting for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ray
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED

from rllib_ext.apex.exploration import set_epsilons
from rllib_ext.rllib_compat import Attached, force_weights

TAG = "apex_collect"
_PAUSE_S = 0.01  # while nothing may be drawn
_VERSION: Attached[int] = Attached("_apex_state_version")
_HAS_EPSILONS: Attached[bool] = Attached("_apex_has_epsilons")


class Collected(NamedTuple):
    """The answer of an EnvRunner to one request."""

    episodes: list[Any]
    metrics: Any
    num_env_steps: int


def collect(
    env_runner: Any, version: int, state: list[Any], exploration: Mapping[str, float]
) -> tuple[list[Any], Any, Any]:
    """Plays one fragment on an EnvRunner; returns the episodes, states of the connectors and metrics.

    The reference to the ``state`` is in a list, so that Ray does not resolve it: it is fetched if the EnvRunner has
    another ``version``.
    """
    # RLlib does not notice every restart of a process, because the answer to a second request makes it healthy.
    if not _HAS_EPSILONS.of(env_runner):
        set_epsilons(env_runner, **exploration)
        _HAS_EPSILONS.set(env_runner, True)
    if state and _VERSION.of(env_runner) != version:
        force_weights(env_runner, ray.get(state[0]))
        _VERSION.set(env_runner, version)
    episodes = env_runner.sample()
    return episodes, env_runner.get_state(not_components=COMPONENT_RL_MODULE), env_runner.get_metrics()


class Collection:
    """Requests fragments from remote EnvRunners, and has the answers that have arrived.

    Weights and epsilons travel with the requests: an EnvRunner plays each fragment with the newest weights at the time
    it was requested, one that was restarted too, and a slow one has no queue of old weights.

    Args:
        env_runner_group: with remote EnvRunners.
        rows_per_request: steps that an EnvRunner plays for one request.
        timeout_s: after which a request is no longer expected to be answered; the EnvRunner may be stuck.
        exploration: options of :func:`~rllib_ext.apex.exploration.set_epsilons`.
    """

    def __init__(
        self, env_runner_group: Any, rows_per_request: int, timeout_s: float, exploration: Mapping[str, float]
    ) -> None:
        self._group = env_runner_group
        self._rows_per_request = rows_per_request
        self.timeout_s: float = timeout_s
        self._exploration = exploration
        self._requested: dict[int, list[float]] = defaultdict(list)  # times of unanswered requests by EnvRunner
        self._newest: dict[int, int] = defaultdict(int)  # number of the last request by EnvRunner
        self._num_requests = self._version = 0
        self._state: list[Any] = []
        self._connector_states: dict[int, Any] = {}

    def publish(self, state: Any) -> None:
        """Puts a state, with weights, into the object store; EnvRunners get it with their next requests."""
        self._version += 1
        self._state = [ray.put(state)]

    def take_connector_states(self) -> list[Any]:
        """Returns the newest states of connectors, of EnvRunners that have answered since the last call."""
        states, self._connector_states = list(self._connector_states.values()), {}
        return states

    def fetch(self, *, wait: bool) -> list[Collected]:
        """Returns the answers that have arrived; may ``wait`` a moment for further ones."""
        if wait and not any(self._requested.values()):
            time.sleep(_PAUSE_S)  # every EnvRunner was lost, and is being restarted
        answers = self._group.fetch_ready_async_reqs(tags=TAG, timeout_seconds=_PAUSE_S if wait else 0.0)
        collected = []
        for number, (episodes, states, metrics) in answers:
            if self._requested[number]:
                self._requested[number].pop(0)
            self._connector_states[number] = states
            collected.append(Collected(episodes, metrics, int(metrics.get(NUM_ENV_STEPS_SAMPLED, 0))))
        return collected

    def request(self, is_permitted: Callable[[int], bool]) -> None:
        """Requests fragments, first from EnvRunners with fewest to play, as long as the rows on their way permit it."""
        healthy = self._group.healthy_env_runner_ids()
        self._requested = defaultdict(list, {one: self._requested[one] for one in healthy})
        while healthy and is_permitted(self._pending()):
            number = min(healthy, key=lambda one: (len(self._requested[one]), self._newest[one]))
            sent = self._group.foreach_env_runner_async(
                collect,
                tag=TAG,
                kwargs={"version": self._version, "state": self._state, "exploration": self._exploration},
                remote_worker_ids=[number],
            )
            if sent:
                self._num_requests += 1
                self._newest[number] = self._num_requests
                self._requested[number].append(time.monotonic())
            else:
                healthy.remove(number)  # it has as many as it may have

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._requested.pop(number, None)

    def _pending(self) -> int:
        oldest = time.monotonic() - self.timeout_s
        expected = sum(len(times) for times in self._requested.values() if times and times[0] > oldest)
        return expected * self._rows_per_request
