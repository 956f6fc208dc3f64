# SPDX-License-Identifier: Apache-2.0
"""Base classes of the agents: sizes read from the environment, networks built once, one update per batch."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import lightning as L
import torch
from gymnasium.spaces import Space
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_replay.agents.cagrad import ConflictAverseStep
from lightning_replay.agents.encoders import Encoder, checked_observation_size, entries_of
from lightning_replay.agents.interfaces import (
    UpdateBatches,
    UpdatePriorities,
    other_discounts,
    scales_gradients,
    steps_of,
    training_data,
    uses_no_step_hooks,
)
from lightning_replay.agents.spaces import EnvironmentSource, SizeReader, spaces_of
from lightning_replay.options import (
    ABOVE_ZERO,
    BELOW_ONE,
    checked_count,
    checked_counts,
    checked_flag,
    checked_names,
    checked_number,
    checked_numbers,
    checked_share,
)
from lightning_replay.schedules import Schedule, checked_schedule
from lightning_replay.training_replay import TrainingReplay
from lightning_replay.transforms.augmentation import AUGMENTATIONS

_limit = partial(checked_number, lowest=ABOVE_ZERO, accepted="a finite number above 0, or None for none")

_RANGES: tuple[tuple[Callable[[str, Any], Any], str], ...] = (
    (
        partial(checked_number, lowest=0.0),
        "actor_learning_rate actor_regularization augmentation_weight conservative_weight critic_learning_rate "
        "entropy_coefficient entropy_learning_rate exploration_noise inverse_temperature learning_rate "
        "noise_deviation parameter_learning_rate target_noise target_noise_clip value_coefficient value_learning_rate",
    ),
    (
        partial(checked_number, lowest=ABOVE_ZERO),
        "adam_epsilon clip_range gradient_clip initial_entropy_coefficient observation_high",
    ),
    (_limit, "gradient_norm mixup_concentration value_clip"),
    (partial(checked_names, of="augmentation", known=AUGMENTATIONS), "augmentations"),
    (partial(checked_number, lowest=ABOVE_ZERO, highest=BELOW_ONE), "expectile"),
    (checked_number, "target_entropy target_high target_low value_high value_low"),
    (checked_share, "discount exploration_end exploration_start gae_lambda target_update_rate"),
    (partial(checked_schedule, highest=BELOW_ONE), "conflict_aversion"),
    (
        checked_count,
        "epochs hidden_size minibatches num_actions policy_delay sampled_actions state_size target_update_every",
    ),
    (checked_observation_size, "observation_size"),
    (partial(checked_count, lowest=0), "burn_in exploration_steps"),
    (partial(checked_count, lowest=2), "atoms"),
    (checked_counts, "categories channels hidden_sizes kernel_sizes observation_shape strides"),
    (partial(checked_counts, lowest=0), "parameter_sizes"),
    (checked_numbers, "action_high action_low parameter_high parameter_low"),
    (checked_flag, "cross_entropy distributional double dueling evaluation_noise noisy residual samples_by_surprise"),
)
_CHECKS = {name: check for check, names in _RANGES for name in names.split()}
# read from the environment, or optional
_MAY_BE_NONE = {
    *("observation_shape", "observation_size", "observation_high", "num_actions", "action_low", "action_high"),
    *("parameter_sizes", "parameter_low", "parameter_high", "target_low", "target_high", "target_entropy"),
    *("augmentations", "categories", "gradient_norm", "mixup_concentration", "value_clip"),
}


def _checked_hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options among ``given`` as plain numbers and lists; schedules and ``None`` are left out."""
    plain = {
        name: _CHECKS[name](name, value)
        for name, value in given.items()
        if name in _CHECKS and (value is not None or name not in _MAY_BE_NONE)
    }
    for kind, is_allowed in (("target", operator.le), ("value", operator.lt)):  # of the latter the atoms lie between
        low, high = plain.get(f"{kind}_low"), plain.get(f"{kind}_high")
        if low is not None and high is not None and not is_allowed(low, high):
            raise ValueError(f"{kind}_low is {low} and {kind}_high {high}; give the least return, and a larger one.")
    return {name: value for name, value in plain.items() if not isinstance(value, Schedule)}


def _parts_of(name: str, size: Any) -> Iterator[tuple[str, Any]]:
    # What agent and environment must have alike: not the encoders, and of bounds, which may be narrower, the number.
    if name == "observation_size" and isinstance(size, int | Mapping):
        for path, entry in entries_of(size):
            shape = [entry] if isinstance(entry, int) else entry.get("shape", [entry.get("low"), entry.get("high")])
            yield name + "".join(f"[{part!r}]" for part in path), shape[0] if len(shape) == 1 else shape
    elif not name.endswith(("_low", "_high")):
        yield name, list(size) if isinstance(size, list | tuple) else size
    elif isinstance(size, list | tuple):
        yield name, f"{len(size)} number(s)"


class TrainerClipping(L.Callback):
    """Keeps ``gradient_clip_val`` of a trainer over the check by which Lightning refuses it in manual optimisation."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._kept, trainer.gradient_clip_val = trainer.gradient_clip_val, None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str | None = None) -> None:
        if self._kept is not None:
            trainer.gradient_clip_val, self._kept = self._kept, None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.setup(trainer, pl_module)  # where it came before


class SizedAgent(L.LightningModule):
    """A LightningModule with manual optimisation whose networks fit the environment's spaces.

    The norm of the gradient of each optimizer is limited by ``gradient_clip_val`` of the trainer (its elements with
    ``gradient_clip_algorithm="value"``), and by the agent's own option, :attr:`clip_option`, where that is not given.

    A subclass defines ``build`` (networks), ``act``, ``training_step`` and ``configure_optimizers``, and names in
    ``size_names`` the arguments that the spaces determine. With those arguments it is built at once, otherwise when a
    trainer attaches a data module that has an environment.
    """

    is_recurrent: bool = False  #: Whether it acts with a state, and learns from sequences.
    clip_option: ClassVar[str] = "gradient_norm"  #: Option with the largest norm of the gradient of an optimizer.
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
    def for_env(cls, env: EnvironmentSource, **hyperparameters: Any) -> Self:
        """Returns an agent for an environment: an id, the environment, a vector of them, or a callable that builds one.

        Raises ``ValueError`` as :meth:`sizes_from`.
        """
        return cls(**(cls.sizes_from(*spaces_of(env)) | hyperparameters))

    def build(self) -> None:
        """Creates the networks from ``self.hparams``."""
        raise NotImplementedError

    def act(self, observation: Any, explore: bool) -> Any:
        """Returns actions for a batch of observations."""
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[L.Callback]:
        return [TrainerClipping(self.trainer)] if self.trainer.gradient_clip_val else []

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
                    f"{type(self).__name__}.for_env(env), or fit it with a data module that has env."
                )
            sizes = self.sizes_from(data.observation_space, data.action_space)
            self.hparams.update({name: size for name, size in sizes.items() if self.hparams.get(name) is None})
        self.build()
        self.is_built = True

    def _refuse_other_sizes(self, sizes: dict[str, Any], module: type) -> None:
        given, read = (
            {key: part for name in self.size_names for key, part in _parts_of(name, of.get(name))}
            for of in (self.hparams, sizes)
        )
        other = [name for name in given | read if given.get(name) != read.get(name)]
        if other:
            ours, theirs = (
                ", ".join(f"{name}={of[name]}" for name in other if name in of) or "no such entry"
                for of in (given, read)
            )
            raise ValueError(
                f"{type(self).__name__} was built with {ours}, and the environment of {module.__name__} has {theirs}. "
                f"Give both the same environment, or leave these out: {type(self).__name__}() reads them."
            )

    def set_up(self, options: Mapping[str, Any]) -> None:
        """Checks and saves hyperparameters and builds the networks if all sizes are given.

        For the end of a subclass's ``__init__``, with its ``locals()``.
        """
        # Of the arguments, not of hparams, in which Lightning has class paths in place of objects.
        plain = _checked_hyperparameters(options)
        self._conflict_aversion: float | Schedule = options.get("conflict_aversion", 0.0)
        frame = inspect.currentframe()
        assert frame is not None
        self.save_hyperparameters(frame=frame.f_back)
        self.hparams.update(plain)  # a checkpoint holds no arrays: torch loads none with weights_only
        self._hparams_initial: Any = copy.deepcopy(self.hparams)  # what loggers record
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
        # Where schedulers stand, so that those which a subclass steps itself are left to it.
        self._scheduler_steps = {
            id(one.scheduler): steps_of(one.scheduler) for one in self.trainer.lr_scheduler_configs
        }

    def on_train_epoch_end(self) -> None:
        self.step_schedulers("epoch")

    def step_schedulers(self, interval: str) -> None:
        """Steps the schedulers that ``configure_optimizers`` of a subclass returned, as automatic optimisation does.

        The interval "epoch" is Lightning's default, "step" counts updates, of PPO rollouts.
        """
        for config in self.trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            clock = self.trainer.global_step if interval == "step" else self.trainer.current_epoch + 1
            steps = self._scheduler_steps.setdefault(id(scheduler), steps_of(scheduler))
            is_due = config.interval == interval and clock % config.frequency == 0
            # Not one that the subclass steps, nor one whose monitor Lightning drops in manual optimisation.
            if is_due and steps == steps_of(scheduler) and not isinstance(scheduler, ReduceLROnPlateau):
                self.lr_scheduler_step(scheduler, None)
                self._scheduler_steps[id(scheduler)] = steps_of(scheduler)

    def adam(self, parameters: Iterable[Tensor], rate: str = "learning_rate") -> torch.optim.Optimizer:
        """Returns Adam with the option ``rate`` as learning rate, and ``adam_epsilon`` if the agent has it."""
        epsilon = self.hparams.get("adam_epsilon", 1e-8)
        return torch.optim.Adam(list(parameters), lr=self.hparams[rate], eps=epsilon, fused=True)

    def descend(
        self, optimizer: torch.optim.Optimizer | LightningOptimizer, loss: Tensor, backward: Any = None
    ) -> None:
        """Steps an optimizer by the gradient of ``loss``, set by ``backward`` in place of :meth:`take_gradients`."""
        for group in optimizer.param_groups:  # as optimizer.zero_grad, without 15 µs of its profiling
            for parameter in group["params"]:
                parameter.grad = None
        (backward or self.take_gradients)(loss)
        self.take_step(optimizer)

    def take_step(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
        """Limits the gradient of an optimizer and steps it."""
        self.clip(parameter for group in optimizer.param_groups for parameter in group["params"])
        optimizer.step()

    def clip(self, parameters: Iterable[Tensor]) -> None:
        """Limits the gradient of parameters together, as the trainer or else the agent's option has it."""
        trainer, limit = self._trainer, self.hparams.get(self.clip_option)
        clip: Callable[..., Any] = nn.utils.clip_grad_norm_
        if trainer is not None and (trainer.gradient_clip_val or 0) > 0:
            limit = trainer.gradient_clip_val
            clip = nn.utils.clip_grad_value_ if trainer.gradient_clip_algorithm == "value" else clip
        if limit is not None:  # not by Lightning, which in mixed precision refuses fused optimizers
            clip([*parameters], limit, foreach=True)

    def take_gradients(self, loss: Tensor) -> None:
        """Computes gradients as ``manual_backward`` does, without its 20 to 50 µs where plain ones are enough.

        With DDP they are the mean over all processes, also where a loss uses some of the parameters alone.
        """
        if self.takes_plain_gradients:
            loss.backward()
        elif isinstance(self.trainer.strategy, DDPStrategy) and type(self.trainer.precision_plugin) is Precision:
            loss.backward()  # in manual_backward DDP would wait for parameters without gradient
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            together = torch.cat([gradient.flatten() for gradient in gradients])
            torch.distributed.all_reduce(together)  # the mean itself is not offered by every backend
            together /= torch.distributed.get_world_size()
            for gradient, mean in zip(gradients, together.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        else:
            self.manual_backward(loss)

    @property
    def takes_plain_gradients(self) -> bool:
        """Whether the trainer neither scales gradients nor syncs them between devices."""
        strategy = self.trainer.strategy
        return type(strategy.precision_plugin) is Precision and isinstance(strategy, SingleDeviceStrategy)


# The columns of a batch by name, with those under "next" in a dictionary of their own.
Columns = Mapping[str, Any]

Network = TypeVar("Network", bound=nn.Module)


def weighted_mean(rows: Tensor, batch: Columns | TensorDictBase) -> Tensor:
    """Returns the mean over the batch of each row's loss times its ``priority_weight``, where the batch has one.

    The sum is divided by B, not by the sum of the weights, which would undo their normalisation.
    """
    weight = batch.get("priority_weight", None)
    return rows.mean() if weight is None else (rows * weight.reshape(rows.shape)).mean()


def bootstrapped(batch: Columns | TensorDictBase, values: Tensor, discount: float) -> Tensor:
    """Returns the targets ``reward + γ^n values``, or the reward alone where the episode terminated.

    n is the column ``steps_to_next_obs``, 1 without it; a truncated row keeps its bootstrap. The targets are computed
    in the memory of ``values`` ``[B]``, those of the next observations without gradients.
    """
    following = batch["next"]
    steps = batch.get("steps_to_next_obs", None)
    reward, ended = following.get("reward", None), following.get("terminated", None)
    if ended is None:
        ended = following.get("done", None)
    if reward is None or ended is None:
        raise ValueError(
            f"rows have the columns {sorted(following.keys())} under 'next', and learning takes reward and terminated "
            "(or done); store these too, see docs/demonstrations.md"
        )
    factor = discount if steps is None else discount ** steps.view_as(values)
    return values.mul_(factor).masked_fill_(ended.view_as(values).bool(), 0.0).add_(reward.view_as(values))


def double_q_target(batch: Columns | TensorDictBase, values: Tensor, target_values: Tensor, discount: float) -> Tensor:
    """Returns the targets of double Q-learning from the values of the next observations, ``[..., A]``.

    ``values`` choose each next action, and ``target_values`` value it.
    """
    best = values.argmax(dim=-1, keepdim=True)
    return bootstrapped(batch, target_values.gather(-1, best).squeeze(-1), discount)


def plain_columns(batch: TensorDictBase) -> dict[str, Any]:
    """Returns a batch as a dictionary, from which nine columns are read in the time of one from a TensorDict."""
    columns: dict[str, Any] = dict(batch.items())
    columns["next"] = dict(columns["next"].items())
    return columns


def target_of(network: Network) -> Network:
    return copy.deepcopy(network).requires_grad_(False)


class TargetUpdate:
    """Moves the parameters of targets, given beside their networks: ``target += rate * (parameter - target)``."""

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]], rate: float) -> None:
        # the parameters themselves, which stay those of the networks on other devices and with loaded states
        together = [pair for network in pairs for pair in zip(*(one.parameters() for one in network), strict=True)]
        self._sources, self._targets = map(list, zip(*together, strict=True))
        self._rate = rate

    def step(self) -> None:
        with torch.set_grad_enabled(False):  # less than half the time of torch.no_grad()
            torch._foreach_lerp_(self._targets, self._sources, self._rate)


class OffPolicyAgent(SizedAgent):
    """Learns from replayed batches by manual optimisation; ``global_step`` equals the updates.

    A subclass defines ``build`` (networks), ``update`` (one gradient step on one batch), ``act`` and
    ``configure_optimizers`` (critic first); see :class:`~lightning_replay.agents.agent.SizedAgent`.
    """

    counters: ClassVar[dict[str, str]] = {}  #: Attributes that a checkpoint holds, by their keys in it.

    def __init__(self) -> None:
        super().__init__()
        self._steps_directly = False  # until a trainer is known
        self.conflict_averse_step: ConflictAverseStep | None = None
        self.observation_encoder: nn.Module = nn.Identity()
        self.target_observation_encoder: nn.Module = nn.Identity()

    def build_encoder(self) -> int:
        """Creates the encoder of ``observation_size`` and its target; returns the number of features."""
        size = self.hparams["observation_size"]
        if isinstance(size, int):
            return size
        encoder = Encoder(size)
        self.observation_encoder, self.target_observation_encoder = encoder, target_of(encoder)
        return encoder.size

    def features_of(self, observation: Any, target: bool = False) -> Any:
        """Returns what networks get of observations: themselves if they are flat, else the output of an encoder."""
        # Past the attributes of modules and the call of one that does nothing: 2 us of the 37 of an action.
        encoder: Any = self._modules["target_observation_encoder" if target else "observation_encoder"]
        return observation if type(encoder) is nn.Identity else encoder(observation)

    def target_update_of(self, *pairs: tuple[nn.Module, nn.Module]) -> TargetUpdate:
        """Returns the step of targets, given beside their networks, and of the target encoder."""
        encoders = self.observation_encoder, self.target_observation_encoder
        return TargetUpdate([*pairs, encoders], self.hparams["target_update_rate"])

    def avert_conflicts(self, parameters: Iterable[Tensor]) -> None:
        """Lets :meth:`descend_rows` step these parameters as the option ``conflict_aversion`` demands."""
        if self._conflict_aversion != 0:
            self.conflict_averse_step = ConflictAverseStep(parameters, self._conflict_aversion)

    def descend_rows(self, optimizer: LightningOptimizer, rows: Tensor, batch: TensorDictBase) -> Tensor:
        """Steps an optimizer by the losses of the rows, ``[B]``, times their weights; returns their mean.

        With conflict aversion by the gradients of the batch's tables.
        """
        loss = weighted_mean(rows, batch)
        if self.conflict_averse_step is None:
            self.descend(optimizer, loss)
            return loss.detach()
        table, weight = batch.get("table", None), batch.get("priority_weight", None)
        if table is None:
            raise ValueError(
                'the batch has no column "table", which conflict_aversion splits it by; draw from event tables '
                "(recipes.event_tables), or set conflict_aversion=0.0."
            )
        weighted = rows if weight is None else rows * weight.reshape(rows.shape)
        self.descend(optimizer, weighted, partial(self.conflict_averse_step.backward, parts=table))
        return loss.detach()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Takes one gradient step; returns ``loss`` and ``td_error`` ``[B]``, both detached."""
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[L.Callback]:
        return [*super().configure_callbacks(), UpdatePriorities()]

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> dict[str, Tensor]:
        """Updates once, or once per batch where a step has several."""
        if not isinstance(batch, UpdateBatches):
            outputs = self.update(batch)
            self.step_schedulers("step")
            return outputs
        outputs = {}
        for drawn in batch:
            outputs = self.update(drawn)
            self.step_schedulers("step")
            batch.update_priority(drawn, **outputs)
        return outputs

    def on_fit_start(self) -> None:
        """Refuses a precision that scales gradients, and a replay with another discount or burn-in.

        With conflict aversion also gradients that the trainer syncs between devices.
        """
        super().on_fit_start()
        if self.conflict_averse_step is not None and not self.takes_plain_gradients:
            raise ValueError(
                f"conflict_aversion is {self.hparams['conflict_aversion']!r}, which needs one device and 32-bit "
                "precision. Use Trainer(devices=1, precision=32), or conflict_aversion=0.0."
            )
        data, options = training_data(self.trainer), self.hparams
        if data is not None and isinstance(replay := data.replay, TrainingReplay):
            for other in other_discounts(replay, options["discount"]):
                raise ValueError(
                    f"the replay discounts its {other}, the agent by {options['discount']}; give both the same "
                    "discount."
                )
            if options.get("burn_in", replay.burn_in) != replay.burn_in:
                raise ValueError(
                    f"the replay has burn_in {replay.burn_in}, the agent {options['burn_in']}; give both the same."
                )
        self._steps_directly = self.takes_plain_gradients and uses_no_step_hooks(self.trainer)

    def take_step(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
        """Steps an optimizer and counts the step if it is wrapped, without Lightning's hooks where nothing uses them.

        These cost 40 µs and some more for each callback.
        """
        if not self._steps_directly or not isinstance(optimizer, LightningOptimizer):
            super().take_step(optimizer)
            return
        plain = optimizer.optimizer
        self.clip(parameter for group in plain.param_groups for parameter in group["params"])
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        plain.step()
        progress.increment_completed()

    def critic_and_other_optimizers(self) -> tuple[LightningOptimizer, list[torch.optim.Optimizer]]:
        """Returns the critic's optimizer, which Lightning counts as the step, and the others unwrapped."""
        wrapped = self.optimizers()
        if not isinstance(wrapped, list):
            return wrapped, []
        plain: Any = self.optimizers(use_pl_optimizer=False)  # a list, as the wrapped ones
        return wrapped[0], plain[1:]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update({key: vars(self)[name] for key, name in self.counters.items()})
        if self.conflict_averse_step is not None:
            checkpoint["dqn_conflict_aversion"] = self.conflict_averse_step.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        vars(self).update({name: checkpoint.get(key, 0) for key, name in self.counters.items()})
        if self.conflict_averse_step is not None and "dqn_conflict_aversion" in checkpoint:
            self.conflict_averse_step.load_state_dict(checkpoint["dqn_conflict_aversion"])


class ExploringAgent(OffPolicyAgent):
    """Takes random actions with a probability that falls linearly; a checkpoint holds the steps taken so far.

    A subclass has the hyperparameters ``exploration_start``, ``exploration_end`` and ``exploration_steps``, and
    ``_explored_steps`` among its ``counters``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._explored_steps = 0
        self._num_processes = 1  # that act, each of which takes as many steps

    @property
    def exploration_rate(self) -> float:
        """Present probability of a random action."""
        options = self.hparams
        done = min(1.0, self._explored_steps / max(1, options["exploration_steps"]))
        start = options["exploration_start"]
        return start + (options["exploration_end"] - start) * done

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._num_processes = self.trainer.world_size

    def draw_random(self, count: int) -> tuple[Tensor, float]:
        """Draws uniform numbers ``[N]`` for ``count`` actions; those below the rate, also returned, are random."""
        drawn = torch.rand(count, device=self.device)
        rate = self.exploration_rate
        vars(self)["_explored_steps"] += count * self._num_processes  # a third of the time of an attribute of a module
        return drawn, rate

    def with_random(self, greedy: Tensor) -> Tensor:
        """Returns the actions ``[N]``, each replaced by a random one with probability :attr:`exploration_rate`."""
        drawn, rate = self.draw_random(len(greedy))
        if min(drawn.tolist(), default=rate) >= rate:  # faster than torch for a few environments
            return greedy
        return torch.where(drawn < rate, torch.randint_like(greedy, self.hparams["num_actions"]), greedy)
