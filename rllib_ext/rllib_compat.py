# SPDX-License-Identifier: Apache-2.0
"""Adapters to RLlib: its type gates for replay buffers, and attributes and values of its objects.

The gates, measured with ray 2.60.0, new API stack. Each row has a test in ``tests/unit/rllib_ext/test_gates.py``.

=============================================  =======================================  ==============================
gate                                           check                                    passed by
=============================================  =======================================  ==============================
``Algorithm._create_local_replay_buffer_...``  ``"EpisodeReplayBuffer" in type``        :meth:`BufferType.__contains__`
``SACConfig.validate``                         ``type in [four literal names]``         :meth:`BufferType.__eq__`
``DQNConfig.validate``                         ``issubclass(type, EpisodeReplayBuffer)``  the base class
``AlgorithmConfig.to_dict``, ``from_dict``     import path of the class and back        a class at module level
``update_priorities_in_episode_...``           ``isinstance(..., PrioritizedEpisode...)``  the base class
``AlgorithmConfig.training``                   ``new["type"] != old["type"]``           equal to no algorithm's default
``Algorithm.setup``                            the buffer gets its own options alone    :func:`algorithm_being_built`
=============================================  =======================================  ==============================

The second and the last row pull in opposite directions. If both types are equal, RLlib merges a new
``replay_buffer_config`` into the algorithm's default, and the default's ``alpha`` and ``beta`` would arrive at our
constructor. So the class equals the one literal name that is no algorithm's default.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.env_context import EnvContext
from ray.rllib.utils.metrics import REPLAY_BUFFER_RESULTS
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer
from ray.tune.registry import ENV_CREATOR, _global_registry

T = TypeVar("T")

DRAWS_PER_REPORT = 10
_PROBE = "rllib_ext_probe"
ACCEPTED_NAME = "MultiAgentPrioritizedEpisodeReplayBuffer"


class BufferType(ABCMeta):
    """Metaclass of a buffer class that passes RLlib's checks of a class name."""

    def __contains__(cls, text: object) -> bool:
        return isinstance(text, str) and text in ACCEPTED_NAME

    def __eq__(cls, other: object) -> bool:
        return other == ACCEPTED_NAME if isinstance(other, str) else cls is other

    def __hash__(cls) -> int:
        return ABCMeta.__hash__(cls)


class RowBuffer(PrioritizedEpisodeReplayBuffer, metaclass=BufferType):
    """Base class of buffers that store rows: what RLlib's have and these have not is refused in words.

    The constructor of RLlib's class, which allocates Python trees, is not called.
    """

    @property
    def sampled_timesteps(self) -> int:
        """Rows drawn so far."""
        return int(self.get_sampled_timesteps())

    def __getattr__(self, name: str) -> Any:
        # Also of RLlib's slots, such as episodes, which are never filled.
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: it stores rows, and RLlib's own buffers store episodes. Count "
            "with get_num_episodes() and get_metrics(), draw with sample(num_items=...), and without num_shards read "
            "the rows with buffer.replay[:]",
            name=name,
            obj=self,
        )


class Hook(functools.partial[None]):
    """A callback of this package, in distinction to the user's callbacks."""


def algorithm_being_built() -> Algorithm | None:
    """Returns the algorithm whose setup called the caller. RLlib builds its buffer first, and tells it nothing else."""
    owners = (frame.frame.f_locals.get("self") for frame in inspect.stack(context=0))
    return next((owner for owner in owners if isinstance(owner, Algorithm)), None)


def prepare_algorithm(kind: type) -> dict[str, Any]:
    """Prepares the algorithm that is building its buffer, of this class, as ``configure`` does if it was not called.

    EnvRunners and Learners are built later, from the prepared config. CPUs and the environment are not checked.

    Returns:
        Options of the buffer that were added.

    Raises:
        ValueError: callbacks that were replaced after ``configure``, an algorithm that must be of another class, or
            what :func:`rllib_ext.configure` refuses.
    """
    import rllib_ext

    algorithm = algorithm_being_built()
    if algorithm is None:
        return {}
    given = algorithm.config
    is_present = [
        any(isinstance(one, Hook) for one in callbacks_on(given, event))
        for event in ("on_algorithm_init", "on_train_result")
    ]
    if all(is_present):
        return {}
    if any(is_present):
        raise ValueError(
            "callbacks of the config were replaced after rllib_ext.configure(config), and the replay buffer needs "
            "those that it added. Call configure last, before build_algo()"
        )
    config = given.copy(copy_frozen=False)
    # The class takes the place of its name.
    options = {**config.replay_buffer_config, "type": kind}
    config.replay_buffer_config = options
    config = rllib_ext.configure(config, require_cpus=False, check_environments=False)
    if config.algo_class is not given.algo_class:
        raise ValueError(
            f"this replay buffer needs an algorithm of the class {algorithm_name(config)}, and {algorithm_name(given)} "
            "is being built. Call config = rllib_ext.configure(config) last, before build_algo()"
        )
    config.freeze()
    algorithm.config = config
    return {name: value for name, value in config.replay_buffer_config.items() if value is not options.get(name)}


def env_steps_in(buffer: Any) -> int:
    """Returns the environment steps in a buffer, however many agents act in each."""
    # However many agents act in each. It is the length of RLlib's own buffers, and that of this library's is rows.
    if isinstance(type(buffer), BufferType):
        return int(buffer.num_env_steps_stored)
    return len(buffer)


class Attached(Generic[T]):
    """An attribute of this library, by its name, on an Algorithm or an EnvRunner in its process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def of(self, owner: object) -> T | None:
        """Returns the value that was attached to an object, or ``None``."""
        value: T | None = vars(owner).get(self._name)
        return value

    def set(self, owner: object, value: T) -> None:
        """Attaches a value to an object of RLlib."""
        setattr(owner, self._name, value)


def num_actors(config: AlgorithmConfig) -> int:
    """Returns the number of environments that act in training."""
    return max(config.num_env_runners, 1) * config.num_envs_per_env_runner


def algorithm_name(config: AlgorithmConfig) -> str:
    """Returns the name of the algorithm's class."""
    return getattr(config.algo_class, "__name__", str(config.algo_class))


def settings_of_buffer(config: AlgorithmConfig) -> dict[str, Any]:
    """Returns ``replay_buffer_config``, or an empty dictionary."""
    return getattr(config, "replay_buffer_config", None) or {}


def callbacks_on(config: AlgorithmConfig, event: str) -> list[Any]:
    """Returns the callbacks of an event as a list."""
    given = getattr(config, f"callbacks_{event}")
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def local_replay_buffer(algorithm: Algorithm) -> Any:
    """Returns the replay buffer of an algorithm, or ``None`` for algorithms without one, such as PPO."""
    # None if there is none, as in PPO.
    return getattr(algorithm, "local_replay_buffer", None)


def complete_results(metrics: Any, buffer: Any) -> None:
    """Lets a buffer compute its metrics at every tenth draw, and the remaining ones before each result."""
    # RLlib empties its statistics with every result and has no callback between the last step and the result.
    buffer.draws_per_report = DRAWS_PER_REPORT
    compile_result = metrics.compile

    def completed() -> dict[str, Any]:
        """Returns the result with the metrics that the buffer has kept back."""
        remaining = buffer.remaining_metrics()
        if remaining:
            metrics.aggregate([remaining], key=REPLAY_BUFFER_RESULTS)
        result: dict[str, Any] = compile_result()
        return result

    metrics.compile = completed


def values(results: Any) -> list[Any]:
    """Returns the values of ``LearnerGroup.foreach_learner``. Raises the error of a Learner."""
    returned = []
    for result in results:
        if not result.ok:
            raise result.get()
        returned.append(result.get())
    return returned


def call_one_learner(learner_group: Any, function: Callable[..., T], **options: Any) -> T:
    """Calls a function of a Learner on one of them, as all have the same weights."""
    if learner_group.is_local:
        return function(learner_group._learner, **options)
    first = learner_group._worker_manager.healthy_actor_ids()[:1]
    if not first:
        raise RuntimeError(
            "no Learner is left to value new steps, and RLlib replaces none: resume with "
            "Algorithm.from_checkpoint(...). The steps were not stored"
        )
    (value,) = values(learner_group.foreach_learner(functools.partial(function, **options), remote_actor_ids=first))
    return value


def learner_connector_of(owner: Any) -> Any:
    """Returns the learner connector of a config (``None`` by default) or of a Learner (a pipeline)."""
    return owner._learner_connector


def has_own_connectors(config: AlgorithmConfig) -> bool:
    """Returns whether the config has connectors between environment and module."""
    return config._env_to_module_connector is not None or config._module_to_env_connector is not None


def observes_by_connector(config: AlgorithmConfig) -> bool:
    """Returns whether a connector of the config changes the observations of the module."""
    return config._env_to_module_connector is not None


def module_spec_of(config: AlgorithmConfig) -> RLModuleSpec | None:
    """Returns the module that the config names, or ``None``."""
    return config._rl_module_spec


def is_first_learner(learner: Any) -> bool:
    """Returns whether a Learner is the only one, or the first of several."""
    return not learner._learner_index


def has_recurrent_module(algorithm: Algorithm) -> bool:
    """Returns whether a module of an algorithm has a state."""
    return bool(algorithm._module_is_stateful)


def leave_runner_states(config: AlgorithmConfig) -> None:
    """Turns off the exchange of the EnvRunners' states in each iteration, which waits for all of them."""
    config._dont_auto_sync_env_runner_states = True


def reset_at_next_sample(env_runner: Any) -> None:
    """Lets an EnvRunner reset its environments when it samples next."""
    env_runner._needs_initial_reset = True


def ongoing_episode(env_runner: Any, env_index: int) -> Any:
    """Returns the fragment that an environment of an EnvRunner is playing."""
    return env_runner._ongoing_episodes[env_index]


def is_registered(name: str) -> bool:
    """Returns whether an environment of this name is registered with Ray."""
    return bool(_global_registry.contains(ENV_CREATOR, name))


def registered_environment(config: AlgorithmConfig) -> Any:
    """Returns a new environment if ``config.env`` is a class or a name registered with Ray, and ``None`` otherwise."""
    creator = config.env
    if isinstance(creator, str):
        if not is_registered(creator):
            return None
        creator = _global_registry.get(ENV_CREATOR, creator)
    return creator(EnvContext(config.env_config, worker_index=1, num_workers=config.num_env_runners))


def force_weights(env_runner: Any, state: dict[str, Any]) -> None:
    """Sets the weights of an EnvRunner, also if they are older than its own, as after a restore."""
    env_runner._weights_seq_no = -1
    env_runner.set_state(state)


def probe_lost(env_runner_group: Any) -> bool:
    """Pings lost EnvRunners and returns whether one has answered, or none is lost. Does not wait."""
    # RLlib's own probe waits for Ray's answer, two seconds in every training step, until a process is up again.
    manager = env_runner_group._worker_manager
    if manager.num_healthy_actors() == manager.num_actors():
        return True
    answers = manager.fetch_ready_async_reqs(tags=_PROBE, timeout_seconds=0.0, mark_healthy=True)
    lost = [number for number in manager.actor_ids() if not manager.is_actor_healthy(number)]
    if lost:
        manager.foreach_actor_async(_ping, tag=_PROBE, healthy_only=False, remote_actor_ids=lost)
    return any(answer.ok for answer in answers)


def _ping(actor: Any) -> Any:
    return actor.ping()
