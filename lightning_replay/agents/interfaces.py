# SPDX-License-Identifier: Apache-2.0
"""What agents and data modules offer each other, and adapters for modules of users: the only place that probes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, NoReturn, Protocol, cast

import lightning as L
import torch
from gymnasium.spaces import Space
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.fast_path import has_fast_path
from lightning_replay.lightning_compat import saves_at_steps
from lightning_replay.replay import SIGNALS
from lightning_replay.training_replay import TrainingReplay


class ActingAgent(Protocol):
    """A LightningModule that collects transitions and is evaluated."""

    device: torch.device

    def act(self, observation: Any, explore: bool) -> Any:
        """Returns actions for observations, see :class:`~lightning_replay.lit.rollouts.ActionReader`.

        These are a tensor ``[N, ...]``, or of Dict and Tuple spaces a TensorDict ``[N]`` of the entries.
        """


class RecurrentAgent(Protocol):
    """A LightningModule that acts with a state of each environment, the initial one at the start of every episode.

    The data module stores that before each step, also a random one, as the column ``recurrent_state``, float32.
    """

    device: torch.device
    is_recurrent: bool  #: True, as an attribute of the class.

    def initial_state(self, num_envs: int) -> Tensor:
        """Returns the states at the start of episodes, float ``[N, ...]``, in one tensor."""

    def act_with_state(self, observation: Any, state: Tensor, explore: bool) -> tuple[Any, Tensor]:
        """Returns actions as :meth:`ActingAgent.act`, and the states after ``observation``, float ``[N, ...]``."""


class WatchingAgent(ActingAgent, Protocol):
    """A LightningModule that learns of steps whose actions are random, and of the ends of episodes."""

    watches_steps: bool  #: True.

    def observe(self, observation: Any) -> None:
        """Gets observations ``[N, ...]`` on the agent's device that random actions of the warm-up answer."""

    def end_episodes(self, done: Tensor) -> None:
        """Gets after each step whether each environment's episode ended, bool ``[N]``."""


class RolloutAgent(ActingAgent, Protocol):
    """A LightningModule that learns from rollouts of its policy, such as :class:`~lightning_replay.agents.PPO`."""

    def act_with_value(self, observation: Any) -> TensorDictBase | dict[str, Any]:
        """Returns columns ``[N, ...]`` to record: ``action``, ``state_value`` and others that the loss needs."""

    def value(self, observation: Any) -> Tensor:
        """Returns values of observations, float ``[N, 1]``."""


class TrainingData:
    """Source of the batches of an agent's training steps.

    The data modules of :mod:`lightning_replay.lit` subclass it. :func:`training_data` adapts a user's own.

    Attributes:
        observation_space: Space of one environment, or ``None`` before ``setup``.
        action_space: Space of one environment, or ``None`` before ``setup``.
        replay: Buffer that batches are drawn from, or ``None``.
        rollout_rows: Rows of one rollout, 0 if batches are drawn from a replay, or ``None`` if unknown.
        steps_environments: Whether it steps environments with the agent, whose networks must fit the spaces.
        takes_td_errors: Whether :meth:`update_priority` is called after each training step.
        discounting_parts: Parts that have their own ``discount`` or ``gae_lambda``, by the name of their option.
        column_spaces: Spaces of one environment's further columns, such as ``critic_observation``, by name.
    """

    observation_space: Space[Any] | None = None
    action_space: Space[Any] | None = None
    replay: TrainingReplay | None = None
    rollout_rows: int | None = None
    steps_environments: bool = False
    takes_td_errors: bool = False
    discounting_parts: Mapping[str, Any] = {}
    column_spaces: Mapping[str, Space[Any]] = {}

    def draw(self) -> TensorDictBase:
        """Collects the steps due before the next update, and returns its batch on the agent's device."""
        raise NotImplementedError

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **signals: Tensor) -> None:
        """Passes TD errors and other signals of a batch to the replay, which ignores those it does not use."""
        raise NotImplementedError


class _UsersData(TrainingData):
    """Adapter for a user's data module, with those attributes of :class:`TrainingData` that it has."""

    def __init__(self, module: Any) -> None:
        self._module = module
        for name in ("observation_space", "action_space", "replay"):
            setattr(self, name, getattr(module, name, None))
        self.discounting_parts = {
            "return_normalization": getattr(module, "return_normalization", None),
            "levels.score": getattr(getattr(module, "levels", None), "score", None),
        }
        self.takes_td_errors = hasattr(module, "update_priority")

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **signals: Tensor) -> None:
        """Passes TD errors and signals to the user's data module."""
        self._module.update_priority(batch, td_error, **signals)


def training_data(trainer: L.Trainer | None) -> TrainingData | None:
    """Returns the trainer's data module, in an adapter if it is a user's class. Returns ``None`` if there is none."""
    module = getattr(trainer, "datamodule", None)
    return module if module is None or isinstance(module, TrainingData) else _UsersData(module)


def acting_agent(agent: L.LightningModule) -> ActingAgent:
    """Returns the agent, or raises ``TypeError`` if it has no method ``act``."""
    if not callable(getattr(agent, "act", None)):
        raise TypeError(
            f"{type(agent).__name__} has no method act(observation, explore) -> action, which collection and "
            "evaluation call with a batch of observations; add it, or use an agent of lightning_replay.agents."
        )
    return cast(ActingAgent, agent)


def recurrent_agent(agent: L.LightningModule) -> RecurrentAgent | None:
    """Returns an agent that declares ``is_recurrent``, or ``None`` for others. ``TypeError`` if it lacks a method."""
    if not getattr(agent, "is_recurrent", False):
        return None
    if not all(callable(getattr(agent, method, None)) for method in ("initial_state", "act_with_state")):
        raise TypeError(
            f"{type(agent).__name__} is recurrent and lacks initial_state(num_envs) or act_with_state(observation, "
            "state, explore); add both as in lightning_replay.agents.RecurrentDQN, or set is_recurrent = False."
        )
    return cast(RecurrentAgent, agent)


def watching_agent(agent: L.LightningModule) -> WatchingAgent | None:
    """Returns an agent that declares ``watches_steps``, and ``None`` for others."""
    return cast(WatchingAgent, agent) if getattr(agent, "watches_steps", False) else None


def check_sequences(agent: L.LightningModule, replay: TrainingReplay) -> None:
    """Refuses a recurrent agent with a replay of single rows, and one that declares to have no state with sequences.

    A module of a user's own without ``is_recurrent`` may learn from either.
    """
    draws_sequences = replay.sequence_length is not None
    is_recurrent = bool(getattr(agent, "is_recurrent", draws_sequences))
    if is_recurrent != draws_sequences:
        learns = "is recurrent and learns from sequences" if is_recurrent else "learns from single rows"
        draws = f"{'sequences' if draws_sequences else 'single rows'} with {replay.sampler_name}"
        use = "recipes.sequences, or DQN" if is_recurrent else "another recipe, or RecurrentDQN"
        raise ValueError(f"{type(agent).__name__} {learns}, and the replay draws {draws}; use {use}.")


def other_discounts(replay: TrainingReplay, discount: float) -> list[str]:
    """Describes the returns and potentials of a replay whose discount is not this one."""
    return [
        f"{f'{n_steps}-step returns' if n_steps > 1 else 'potentials'} by {other}"
        for n_steps, other in replay.returns
        if not math.isclose(other, discount, rel_tol=1e-6)  # a tensor of float32 may hold the discount
    ]


def warn_of_discounts(agent: L.LightningModule, replay: TrainingReplay) -> None:
    """Warns if a module discounts by another number than the replay's returns.

    The discount is the module's attribute or hyperparameter ``discount`` or ``gamma``. It may also be the buffer
    ``gamma`` of a part of the module, such as a value estimator of TorchRL.
    """
    named = {
        **{name: getattr(agent, name, agent.hparams.get(name)) for name in ("discount", "gamma")},
        **{name: value for name, value in agent.named_buffers() if name.split(".")[-1] == "gamma"},
    }
    for name, value in named.items():
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
            for other in other_discounts(replay, float(value)):
                rank_zero_warn(
                    f"the replay discounts its {other}, and {name} of {type(agent).__name__} is {float(value):g}. Give "
                    f"both the same discount, or rename {name} if it is no discount."
                )


def rollout_agent(agent: L.LightningModule) -> RolloutAgent:
    """Returns the agent. ``TypeError`` if it lacks ``act``, ``act_with_value`` or ``value``, or is recurrent."""
    if not callable(getattr(agent, "act_with_value", None)) or not callable(getattr(agent, "value", None)):
        raise TypeError(
            f"{type(agent).__name__} lacks act_with_value(observation) or value(observation), which rollouts are "
            "collected with; add both as in lightning_replay.agents.PPO, or use that."
        )
    if getattr(agent, "is_recurrent", False):
        raise TypeError(f"{type(agent).__name__} is recurrent, and rollouts of levels carry no states; use PPO.")
    acting_agent(agent)
    return cast(RolloutAgent, agent)


def takes_update_batches(agent: L.LightningModule) -> bool:
    """Returns whether the agent's own class declares ``takes_update_batches = True``, and is not compiled."""
    # Not inherited: a subclass may log in each update, or take a single batch. Compiled code cannot draw.
    return has_fast_path(agent, "takes_update_batches") and not is_compiled(agent)


def is_compiled(agent: L.LightningModule) -> bool:
    """Returns whether the agent came from ``torch.compile``, by which Lightning compiles its ``training_step``."""
    return getattr(agent, "_compiler_ctx", None) is not None


def idle_schedulers(trainer: L.Trainer) -> list[str]:
    """Returns the classes of the learning rate schedulers that neither the agent nor the trainer has stepped."""
    steps_itself = not trainer.lightning_module.automatic_optimization
    due = [config.scheduler for config in trainer.lr_scheduler_configs if config.frequency == 1]
    return [type(scheduler).__name__ for scheduler in due if steps_itself and steps_of(scheduler) == 0]


def steps_of(scheduler: object) -> int | None:
    """Returns how often a learning rate scheduler of torch was stepped. Returns ``None`` for other schedulers."""
    return getattr(scheduler, "last_epoch", None)


def observes_batches(callback: L.Callback) -> bool:
    """Returns whether a callback that is not of this library acts at every batch."""
    if isinstance(callback, ModelCheckpoint):  # Every trainer has one. It saves at epochs unless it is given steps.
        return saves_at_steps(callback)
    is_called = any(is_overridden(hook, callback) for hook in ("on_train_batch_start", "on_train_batch_end"))
    return is_called and not isinstance(callback, ProgressBar | Timer)


def scales_gradients(trainer: L.Trainer) -> bool:
    """Returns whether the trainer's precision scales gradients between steps."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def uses_no_step_hooks(trainer: L.Trainer) -> bool:
    """Returns whether neither a callback, the agent nor a profiler is called around the steps of optimizers."""
    called = [*trainer.callbacks, trainer.lightning_module]  # type: ignore[attr-defined]  # set by its connectors
    is_hooked = any(is_overridden("on_before_optimizer_step", instance) for instance in called)
    return type(trainer.profiler) is PassThroughProfiler and not is_hooked  # type: ignore[attr-defined]


_SEVERAL = (
    "a training step has several batches, and {} is of one; with updates_per_training_step above 1 iterate over them "
    "(for batch in batches: ...), or leave the option at None, which gives such code single batches"
)


class UpdateBatches:
    """Several batches for one ``training_step``. Each is drawn, after due collection, when the loop reaches it.

    Update the priorities inside the loop, because :class:`UpdatePriorities` runs only after the step.

    Example::

        for batch in batches:
            outputs = self.update(batch)
            batches.update_priority(batch, **outputs)
    """

    def __init__(self, source: TrainingData, count: int, is_over: Callable[[], bool] | None = None) -> None:
        self._source = source
        self._count = count
        self._is_over = is_over  # Returns whether the step ends with the last update.
        self._is_drawn = False

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TensorDictBase]:
        if self._is_drawn:
            raise RuntimeError(
                "the batches of a training step are drawn as they are iterated over, once. If Lightning iterates over "
                "them for the batch size, give it: self.log(name, value, batch_size=len(batch))"
            )
        self._is_drawn = True
        for _ in range(self._count):
            yield self._source.draw()
            if self._is_over is not None and self._is_over():
                return

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(_SEVERAL.format(f"[{key!r}]"))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_SEVERAL.format(f".{name}"), name=name, obj=self)

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **outputs: Any) -> None:
        """Passes the TD errors of one batch to the replay, with the signals among the other outputs."""
        self._source.update_priority(batch, td_error, **_signals_of(outputs))


class UpdatePriorities(L.Callback):
    """After each training step calls ``replay.update_priority`` with the step's ``td_error`` and other signals.

    Return it from ``configure_callbacks`` of a LightningModule whose ``training_step`` returns ``{"td_error": ...}``,
    detached, ``[B]``. For a replay that keeps transitions by their priority, it may also return ``surprise`` ``[B]``,
    ``action_values`` ``[B, A]``, and ``action`` ``[B]``. Others ignore these, and need no TD errors. It acts after
    single batches. A ``training_step`` that gets several calls ``batches.update_priority(batch, td_error)`` in its
    loop.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Passes the TD errors of a training step with one batch to the replay."""
        source = training_data(trainer)
        if not isinstance(batch, TensorDictBase) or source is None or not source.takes_td_errors:
            return
        if not isinstance(outputs, dict) or "td_error" not in outputs:
            if isinstance(source.replay, TrainingReplay) and not source.replay.awaits_priorities:
                return
            raise KeyError(
                f"training_step of {type(pl_module).__name__} returned no 'td_error'; return "
                "{'loss': ..., 'td_error': detached TD errors [B]} so that the priorities can be updated."
            )
        source.update_priority(batch, outputs["td_error"], **_signals_of(outputs))


def _signals_of(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: outputs[name] for name in SIGNALS if name in outputs}
