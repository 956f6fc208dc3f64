# SPDX-License-Identifier: Apache-2.0
"""Adapters for objects of users and other libraries; the only place that probes for attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.agents.interfaces import ActingAgent, RolloutAgent, SurpriseAgent, TrainingData

__all__ = [
    "acting_agent",
    "idle_schedulers",
    "is_compiled",
    "name_of",
    "observes_batches",
    "rollout_agent",
    "scales_gradients",
    "steps_of",
    "surprise_agent",
    "takes_update_batches",
    "training_data",
    "uses_no_step_hooks",
]


class _UsersData(TrainingData):
    """Adapter for a user's data module, with those attributes of :class:`TrainingData` that it has."""

    def __init__(self, module: Any) -> None:
        self._module = module
        for name in ("observation_space", "action_space", "replay"):
            setattr(self, name, getattr(module, name, None))
        self.takes_td_errors = hasattr(module, "update_priority")

    @property
    def discounting_parts(self) -> Mapping[str, Any]:
        score = getattr(getattr(self._module, "levels", None), "score", None)
        return {"return_normalization": getattr(self._module, "return_normalization", None), "levels.score": score}

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **signals: Tensor) -> None:
        self._module.update_priority(batch, td_error, **signals)


def training_data(trainer: L.Trainer) -> TrainingData | None:
    """Returns the trainer's data module, in an adapter if it is a user's own; ``None`` without a data module."""
    module = getattr(trainer, "datamodule", None)
    return module if module is None or isinstance(module, TrainingData) else _UsersData(module)


def acting_agent(agent: L.LightningModule) -> ActingAgent:
    """Returns the agent; raises ``TypeError`` if it has no method ``act``."""
    if not callable(getattr(agent, "act", None)):
        raise TypeError(
            f"{type(agent).__name__} has no method act(observation, explore) -> action, which collection and "
            "evaluation call with a batch of observations; add it, or use an agent of lightning_replay.agents."
        )
    return cast(ActingAgent, agent)


def rollout_agent(agent: L.LightningModule) -> RolloutAgent:
    """Returns the agent; raises ``TypeError`` if it has no method ``act``, ``act_with_value`` or ``value``."""
    if not callable(getattr(agent, "act_with_value", None)) or not callable(getattr(agent, "value", None)):
        raise TypeError(
            f"{type(agent).__name__} lacks act_with_value(observation) or value(observation), which rollouts are "
            "collected with; add both as in lightning_replay.agents.PPO, or use that."
        )
    acting_agent(agent)
    return cast(RolloutAgent, agent)


def surprise_agent(agent: L.LightningModule) -> SurpriseAgent | None:
    """Returns the agent if it has a method ``initial_surprise``, else ``None``."""
    return cast(SurpriseAgent, agent) if callable(getattr(agent, "initial_surprise", None)) else None


def takes_update_batches(agent: L.LightningModule) -> bool:
    """Returns whether ``training_step`` takes :class:`~lightning_replay.agents.feedback.UpdateBatches`.

    Declared by ``takes_update_batches = True`` in the agent's own class. It is not inherited, because a subclass may
    log in each update, or take a single batch. Never of a compiled agent, which would draw in compiled code.
    """
    return bool(vars(type(agent)).get("takes_update_batches")) and not is_compiled(agent)


def is_compiled(agent: L.LightningModule) -> bool:
    """Returns whether the agent came from ``torch.compile``, by which Lightning compiles its ``training_step``."""
    return getattr(agent, "_compiler_ctx", None) is not None


def idle_schedulers(trainer: L.Trainer) -> list[str]:
    """Returns the classes of those learning rate schedulers that neither the agent nor the trainer has stepped."""
    steps_itself = not trainer.lightning_module.automatic_optimization
    due = [config.scheduler for config in trainer.lr_scheduler_configs if config.frequency == 1]
    return [type(one).__name__ for one in due if steps_itself and steps_of(one) == 0]


def steps_of(scheduler: Any) -> int | None:
    """Returns how often a learning rate scheduler was stepped; ``None`` of one that is not of torch."""
    return getattr(scheduler, "last_epoch", None)


def observes_batches(callback: L.Callback) -> bool:
    """Returns whether a callback that is not of this library acts at every batch."""
    if isinstance(callback, ModelCheckpoint):  # every trainer has one; it saves at epochs unless it is given steps
        return bool(callback._every_n_train_steps)
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


def name_of(env: Any) -> str:
    """Returns the id of an environment, or the name of a callable that builds one."""
    return env if isinstance(env, str) else getattr(env, "__name__", repr(env))
