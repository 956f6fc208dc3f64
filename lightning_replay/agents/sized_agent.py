# SPDX-License-Identifier: Apache-2.0
"""Base class of the agents: sizes read from the environment, networks built once, gradients without overhead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import gymnasium
import lightning as L
import torch
from gymnasium.spaces import Space
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_replay.agents.foreign import scales_gradients, steps_of, training_data
from lightning_replay.agents.hyperparameters import check_hyperparameters, plain_hyperparameters
from lightning_replay.agents.spaces import SizeReader, spaces_of


class SizedAgent(L.LightningModule):
    """A LightningModule with manual optimisation whose networks fit the environment's spaces.

    A subclass defines ``build`` (networks, loss), ``act``, ``training_step`` and ``configure_optimizers``, and names in
    ``size_names`` the arguments that the spaces determine. With those arguments it is built at once, otherwise when a
    trainer attaches a data module that has an environment.

    Attributes:
        loss: created by :meth:`build`; a loss module of TorchRL, which holds the parameters and targets.
    """

    loss: Any

    size_names: ClassVar[tuple[str, ...]] = ()
    read_sizes: ClassVar[SizeReader]  #: Function of :mod:`~lightning_replay.agents.spaces`.

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_built: bool = False
        self._scheduler_steps: dict[int, int | None] = {}

    @classmethod
    def sizes_from(cls, observation_space: Space[Any], action_space: Space[Any]) -> dict[str, Any]:
        """Returns the arguments that the spaces determine; raises ``ValueError`` if the agent cannot act in them."""
        return cls.read_sizes(observation_space, action_space, cls.__name__)

    @classmethod
    def for_env(
        cls,
        env: str
        | gymnasium.Env[Any, Any]
        | gymnasium.vector.VectorEnv[Any, Any, Any]
        | Callable[[], gymnasium.Env[Any, Any]],
        **hyperparameters: Any,
    ) -> Self:
        """Returns an agent for an environment: an id, the environment, a vector of them, or a callable that builds one.

        Raises ``ValueError`` as :meth:`sizes_from`.
        """
        return cls(**(cls.sizes_from(*spaces_of(env)) | hyperparameters))

    def build(self) -> None:
        """Creates networks and loss from ``self.hparams``."""
        raise NotImplementedError

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions for a batch of observations."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Builds the networks once, with the sizes of the attached data module's spaces if none were given."""
        data = None if self._trainer is None else training_data(self.trainer)
        if self.is_built:
            if data is not None and data.steps_environments:
                assert data.observation_space is not None and data.action_space is not None
                self._refuse_other_sizes(self.sizes_from(data.observation_space, data.action_space), type(data))
            return
        missing = [name for name in self.size_names if self.hparams.get(name) is None]
        if missing:
            if data is None or data.observation_space is None or data.action_space is None:
                raise ValueError(
                    f"{type(self).__name__} was built without {', '.join(missing)}; give them, use "
                    f"{type(self).__name__}.for_env(env), or fit it with a data module of lightning_replay.lit."
                )
            sizes = self.sizes_from(data.observation_space, data.action_space)
            self.hparams.update({name: size for name, size in sizes.items() if self.hparams.get(name) is None})
        self.build()
        self.is_built = True

    def _refuse_other_sizes(self, sizes: dict[str, Any], module: type) -> None:
        given = {name: self.hparams.get(name) for name in self.size_names}
        other = [name for name in self.size_names if _size(name, given[name]) != _size(name, sizes[name])]
        if other:
            ours, theirs = (", ".join(f"{name}={found[name]}" for name in other) for found in (given, sizes))
            raise ValueError(
                f"{type(self).__name__} was built with {ours}, and the environment of {module.__name__} has {theirs}. "
                f"Give both the same environment, or leave these out: {type(self).__name__}() reads them."
            )

    def set_up(self, options: Mapping[str, Any]) -> None:
        """Checks and saves hyperparameters and builds the networks if all sizes are given.

        For the end of a subclass's ``__init__``, with its ``locals()``.
        """
        check_hyperparameters(options)
        frame = inspect.currentframe()
        assert frame is not None
        self.save_hyperparameters(frame=frame.f_back)
        # a checkpoint holds no arrays: torch loads none with weights_only
        plain = plain_hyperparameters(options)
        self.hparams.update(plain)
        initial: Any = self.hparams_initial  # a copy of what loggers record
        initial.update(plain)
        self._hparams_initial: Any = initial
        if all(self.hparams.get(name) is not None for name in self.size_names):
            self.configure_model()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the return of one evaluation episode."""
        self.log("eval/return", batch["return"], batch_size=1, on_step=False, on_epoch=True)

    def on_fit_start(self) -> None:
        """Refuses a precision that scales gradients, as updates clip them or take further steps outside the scaler."""
        if scales_gradients(self.trainer):
            raise ValueError(
                f"precision is {self.trainer.precision}, which scales gradients between steps; {type(self).__name__} "
                "clips gradients or takes several steps per training step. Use precision 32-true or bf16-mixed."
            )

    def on_train_start(self) -> None:
        """Records where schedulers stand, so that those which a subclass steps itself are left to it."""
        self._scheduler_steps = {
            id(one.scheduler): steps_of(one.scheduler) for one in self.trainer.lr_scheduler_configs
        }

    def on_train_epoch_end(self) -> None:
        """Steps the schedulers of epochs."""
        self.step_schedulers("epoch")

    def step_schedulers(self, interval: str) -> None:
        """Steps the schedulers that ``configure_optimizers`` of a subclass returned, as automatic optimisation does.

        Those with the interval "epoch", Lightning's default, step at the end of an epoch, those with "step" after each
        update, of PPO each rollout; a ``frequency`` counts these. A scheduler that the subclass steps itself is left
        alone, and so is ``ReduceLROnPlateau``, whose ``monitor`` Lightning drops in manual optimisation.
        """
        for config in self.trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            clock = self.trainer.global_step if interval == "step" else self.trainer.current_epoch + 1
            steps = self._scheduler_steps.setdefault(id(scheduler), steps_of(scheduler))
            is_due = config.interval == interval and clock % config.frequency == 0
            if is_due and steps == steps_of(scheduler) and not isinstance(scheduler, ReduceLROnPlateau):
                self.lr_scheduler_step(scheduler, None)
                self._scheduler_steps[id(scheduler)] = steps_of(scheduler)

    def adam(self, parameters: Iterable[Tensor], rate: str = "learning_rate") -> torch.optim.Optimizer:
        """Returns Adam with the option ``rate`` as learning rate, and ``adam_epsilon`` if the agent has it."""
        epsilon = self.hparams.get("adam_epsilon", 1e-8)
        return torch.optim.Adam(list(parameters), lr=self.hparams[rate], eps=epsilon, fused=True)

    def descend(self, optimizer: torch.optim.Optimizer | LightningOptimizer, loss: Tensor) -> None:
        """Takes one gradient step on a loss."""
        drop_gradients(optimizer)
        self.take_gradients(loss)
        self.take_step(optimizer)

    def take_step(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
        """Steps an optimizer whose parameters have their gradients."""
        optimizer.step()

    def take_gradients(self, loss: Tensor) -> None:
        """Computes gradients as ``manual_backward`` does, without its 20 to 50 µs where plain ones are enough.

        With DDP they are the mean over all processes, also where a loss uses some of the parameters alone.
        """
        if self.takes_plain_gradients:
            loss.backward()
        elif self._averages_gradients:  # DDP does so in manual_backward, where it waits for parameters without gradient
            loss.backward()
            average_gradients(self.parameters())
        else:
            self.manual_backward(loss)

    @property
    def takes_plain_gradients(self) -> bool:
        """Whether the trainer neither scales gradients nor syncs them between devices."""
        trainer = self.trainer
        return type(trainer.precision_plugin) is Precision and isinstance(trainer.strategy, SingleDeviceStrategy)

    @property
    def _averages_gradients(self) -> bool:
        trainer = self._trainer
        is_ddp = trainer is not None and isinstance(trainer.strategy, DDPStrategy)
        return is_ddp and type(self.trainer.precision_plugin) is Precision


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replaces the gradients of these parameters, where they have some, by their mean over all processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(together)  # the mean itself is not offered by every backend
    together /= torch.distributed.get_world_size()
    for gradient, mean in zip(gradients, together.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def drop_gradients(optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
    """Sets gradients to ``None`` as ``optimizer.zero_grad`` does, without 15 µs of its profiling."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _size(name: str, value: Any) -> Any:
    """Returns the part of an option that has to fit the environment: the length of bounds, which may be narrower."""
    if name.endswith(("_low", "_high")):
        return len(value) if isinstance(value, list | tuple) else None
    return list(value) if isinstance(value, list | tuple) else value
