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
from lightning_replay.lightning_compat import attached_trainer, optimizer_steps
from lightning_replay.options import (
    ABOVE_ZERO,
    BELOW_ONE,
    check_kind,
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


def _checked_column(name: str, value: object) -> str:
    check_kind(name, value, str, "the name of a column, such as 'critic_observation'")
    return str(value)


_RANGES: tuple[tuple[Callable[[str, Any], Any], str], ...] = (
    (
        partial(checked_number, lowest=0.0),
        "actor_learning_rate actor_regularization augmentation_weight conservative_weight critic_learning_rate "
        "entropy_coefficient entropy_learning_rate exploration_noise exploration_noise_high inverse_temperature "
        "learning_rate noise_deviation parameter_learning_rate target_noise target_noise_clip value_coefficient "
        "value_learning_rate",
    ),
    (
        partial(checked_number, lowest=ABOVE_ZERO),
        "adam_epsilon clip_range gradient_clip initial_entropy_coefficient observation_high",
    ),
    (
        partial(checked_number, lowest=ABOVE_ZERO, accepted="a finite number above 0, or None for none"),
        "gradient_norm mixup_concentration value_clip",
    ),
    (partial(checked_names, of="augmentation", known=AUGMENTATIONS), "augmentations"),
    (partial(checked_number, lowest=ABOVE_ZERO, highest=BELOW_ONE), "expectile"),
    (checked_number, "target_entropy target_high target_low value_high value_low"),
    (checked_share, "discount exploration_end exploration_start gae_lambda target_update_rate"),
    (partial(checked_schedule, highest=BELOW_ONE), "conflict_aversion"),
    (
        checked_count,
        "epochs hidden_size minibatches num_actions policy_delay sampled_actions state_size target_update_every",
    ),
    (checked_observation_size, "critic_observation_size observation_size"),
    (_checked_column, "critic_observation"),
    (partial(checked_count, lowest=0), "burn_in exploration_steps"),
    (partial(checked_count, lowest=2), "atoms"),
    (checked_counts, "categories channels hidden_sizes kernel_sizes observation_shape strides"),
    (partial(checked_counts, lowest=0), "parameter_sizes"),
    (checked_numbers, "action_high action_low parameter_high parameter_low"),
    (checked_flag, "cross_entropy distributional double dueling evaluation_noise noisy residual samples_by_surprise"),
    (checked_flag, "layer_norm normalize_observations"),
)
_CHECKS = {name: check for check, names in _RANGES for name in names.split()}
# These are read from the environment, or optional.
_MAY_BE_NONE = {
    *("observation_shape", "observation_size", "observation_high", "num_actions", "action_low", "action_high"),
    *("parameter_sizes", "parameter_low", "parameter_high", "target_low", "target_high", "target_entropy"),
    *("augmentations", "categories", "gradient_norm", "mixup_concentration", "value_clip"),
    *("critic_observation", "critic_observation_size", "exploration_noise_high"),
}


def _checked_hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options among ``given`` as plain numbers and lists, without schedules and ``None``."""
    plain = {
        name: _CHECKS[name](name, value)
        for name, value in given.items()
        if name in _CHECKS and (value is not None or name not in _MAY_BE_NONE)
    }
    # Atoms lie between different values. The targets of MP-DQN may all be one value.
    for low, high, is_allowed, quantity in (
        ("target_low", "target_high", operator.le, "return"),
        ("value_low", "value_high", operator.lt, "return"),
        ("exploration_noise", "exploration_noise_high", operator.le, "deviation"),
    ):
        if low in plain and high in plain and not is_allowed(plain[low], plain[high]):
            raise ValueError(
                f"{low} is {plain[low]} and {high} {plain[high]}; give the least {quantity}, and a larger one."
            )
    if ("critic_observation" in plain) < ("critic_observation_size" in plain):
        raise ValueError(
            f"critic_observation_size is {plain['critic_observation_size']} without critic_observation; give also the "
            "name of the column that the critics read, such as critic_observation='critic_observation'."
        )
    return {name: value for name, value in plain.items() if not isinstance(value, Schedule)}


def _parts_of(name: str, size: Any) -> Iterator[tuple[str, Any]]:
    # Yields the sizes that the agent and the environment must share. Encoders may differ. Bounds may be narrower, so
    # only their number counts.
    if name == "observation_size" and isinstance(size, int | Mapping):
        for path, entry in entries_of(size):
            shape = [entry] if isinstance(entry, int) else entry.get("shape", [entry.get("low"), entry.get("high")])
            yield name + "".join(f"[{part!r}]" for part in path), shape[0] if len(shape) == 1 else shape
    elif not name.endswith(("_low", "_high")):
        yield name, list(size) if isinstance(size, list | tuple) else size
    elif isinstance(size, list | tuple):
        yield name, f"{len(size)} number(s)"


class TrainerClipping(L.Callback):
    """Hides ``gradient_clip_val`` of a trainer while Lightning checks it, which refuses it in manual optimization."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._hidden = {"gradient_clip_val": trainer.gradient_clip_val}
        trainer.gradient_clip_val = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str | None = None) -> None:
        """Gives the trainer its option back."""
        vars(trainer).update(self._hidden)
        self._hidden = {}

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Gives the option back if an error came before the setup."""
        self.setup(trainer, pl_module)


class SizedAgent(L.LightningModule):
    """A LightningModule with manual optimization whose networks fit the environment's spaces.

    The trainer's ``gradient_clip_val`` limits the norm of each optimizer's gradient, or with
    ``gradient_clip_algorithm="value"`` each element. If the trainer has none, the agent's option :attr:`clip_option`
    limits the norm.

    A subclass defines ``build`` (networks), ``act``, ``training_step``, and ``configure_optimizers``. Its
    ``size_names`` are the arguments that the spaces determine. If they are given, the agent is built at once. Otherwise
    it is built when a trainer attaches a data module that has an environment.
    """

    is_recurrent: bool = False  #: Whether it acts with a state and learns from sequences.
    watches_steps: bool = False  #: Whether collection calls ``observe`` and ``end_episodes``.
    clip_option: ClassVar[str] = "gradient_norm"  #: Option with the largest norm of an optimizer's gradient.
    size_names: ClassVar[tuple[str, ...]] = ()
    read_sizes: ClassVar[SizeReader]  #: Function of :mod:`~lightning_replay.agents.spaces`.

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_built: bool = False
        self._scheduler_steps: dict[int, int | None] = {}

    @classmethod
    def sizes_from(cls, observation_space: Space[Any], action_space: Space[Any]) -> dict[str, Any]:
        """Returns the arguments that the spaces determine. Raises ``ValueError`` if the agent cannot act in them."""
        return cls.read_sizes(observation_space, action_space, cls.__name__)

    @classmethod
    def for_env(cls, env: EnvironmentSource, **hyperparameters: Any) -> Self:
        """Returns an agent for an environment.

        The environment is an id, an environment, a vector environment, or a callable that builds an environment.
        Raises ``ValueError`` if the agent cannot act in it.
        """
        return cls(**(cls.sizes_from(*spaces_of(env)) | hyperparameters))

    def build(self) -> None:
        """Creates the networks from ``self.hparams``."""
        raise NotImplementedError

    def act(self, observation: Any, explore: bool) -> Any:
        """Returns actions for a batch of observations."""
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[L.Callback]:
        """Returns the callback that hides the trainer's ``gradient_clip_val``, if it has one."""
        return [TrainerClipping(self.trainer)] if self.trainer.gradient_clip_val else []

    def configure_model(self) -> None:
        """Builds the networks once. Sizes that were not given come from the attached data module's spaces."""
        data = training_data(attached_trainer(self))
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
        """Checks and saves hyperparameters, and builds the networks if all sizes are given.

        Call it at the end of a subclass's ``__init__`` with its ``locals()``. Lightning reads the arguments of that
        call from its frame.
        """
        # The arguments are checked, because Lightning replaces objects in hparams with class paths.
        plain = _checked_hyperparameters(options)
        self._conflict_aversion: float | Schedule = options.get("conflict_aversion", 0.0)
        frame = inspect.currentframe()
        assert frame is not None
        self.save_hyperparameters(frame=frame.f_back)
        self.hparams.update(plain)  # Torch loads no arrays from a checkpoint with weights_only.
        self._hparams_initial: Any = copy.deepcopy(self.hparams)  # Loggers record these.
        if all(self.hparams.get(name) is not None for name in self.size_names):
            self.configure_model()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the return of one evaluation episode."""
        self.log("eval/return", batch["return"], batch_size=1, on_step=False, on_epoch=True)

    def on_fit_start(self) -> None:
        """Refuses a precision that scales gradients, because updates clip gradients and step outside of the scaler."""
        if scales_gradients(self.trainer):
            raise ValueError(
                f"precision is {self.trainer.precision}, which scales gradients between steps; {type(self).__name__} "
                "clips gradients or takes several steps per training step. Use precision 32-true or bf16-mixed."
            )

    def on_train_start(self) -> None:
        """Counts the steps of schedulers so far. A scheduler that a subclass steps itself is left to it."""
        self._scheduler_steps = {
            id(config.scheduler): steps_of(config.scheduler) for config in self.trainer.lr_scheduler_configs
        }

    def on_train_epoch_end(self) -> None:
        """Steps the schedulers whose interval is "epoch"."""
        self.step_schedulers("epoch")

    def step_schedulers(self, interval: str) -> None:
        """Steps the schedulers that ``configure_optimizers`` of a subclass returned, as automatic optimization does.

        The interval "epoch" is Lightning's default. The interval "step" counts updates, or rollouts of PPO.
        """
        for config in self.trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            clock = self.trainer.global_step if interval == "step" else self.trainer.current_epoch + 1
            steps = self._scheduler_steps.setdefault(id(scheduler), steps_of(scheduler))
            is_due = config.interval == interval and clock % config.frequency == 0
            # The subclass steps the other ones. Lightning drops the monitor of a plateau in manual optimization.
            if is_due and steps == steps_of(scheduler) and not isinstance(scheduler, ReduceLROnPlateau):
                self.lr_scheduler_step(scheduler, None)
                self._scheduler_steps[id(scheduler)] = steps_of(scheduler)

    def adam(self, parameters: Iterable[Tensor], rate: str = "learning_rate") -> torch.optim.Optimizer:
        """Returns Adam with the option ``rate`` as learning rate, and with ``adam_epsilon`` if the agent has it."""
        epsilon = self.hparams.get("adam_epsilon", 1e-8)
        return torch.optim.Adam(list(parameters), lr=self.hparams[rate], eps=epsilon, fused=True)

    def descend(
        self, optimizer: torch.optim.Optimizer | LightningOptimizer, loss: Tensor, backward: Any = None
    ) -> None:
        """Steps an optimizer by the gradient of ``loss``. ``backward`` sets it, or else :meth:`take_gradients`."""
        for group in optimizer.param_groups:  # The profiling of optimizer.zero_grad takes 15 µs.
            for parameter in group["params"]:
                parameter.grad = None
        (backward or self.take_gradients)(loss)
        self.take_step(optimizer)

    def take_step(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> None:
        """Limits the gradient of an optimizer and steps it."""
        self.clip(parameter for group in optimizer.param_groups for parameter in group["params"])
        optimizer.step()

    def clip(self, parameters: Iterable[Tensor]) -> None:
        """Limits the gradient of parameters together by the trainer's option, or else by the agent's option."""
        trainer = attached_trainer(self)
        limit = self.hparams.get(self.clip_option)
        clip: Callable[..., Any] = nn.utils.clip_grad_norm_
        if trainer is not None and (trainer.gradient_clip_val or 0) > 0:
            limit = trainer.gradient_clip_val
            clip = nn.utils.clip_grad_value_ if trainer.gradient_clip_algorithm == "value" else clip
        if limit is not None:  # Lightning's clipping refuses fused optimizers in mixed precision.
            clip([*parameters], limit, foreach=True)

    def take_gradients(self, loss: Tensor) -> None:
        """Computes gradients as ``manual_backward`` does, which takes 20 to 50 µs more.

        With DDP, they are the mean over all processes. A loss may use only some of the parameters.
        """
        if self.takes_plain_gradients:
            loss.backward()
        elif isinstance(self.trainer.strategy, DDPStrategy) and type(self.trainer.precision_plugin) is Precision:
            loss.backward()  # DDP would wait in manual_backward for parameters without a gradient.
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            together = torch.cat([gradient.flatten() for gradient in gradients])
            torch.distributed.all_reduce(together)  # Some backends have no mean.
            together /= torch.distributed.get_world_size()
            for gradient, mean in zip(
                gradients, together.split([gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(mean.view_as(gradient))
        else:
            self.manual_backward(loss)

    @property
    def takes_plain_gradients(self) -> bool:
        """Whether the trainer neither scales gradients nor syncs them between devices."""
        strategy = self.trainer.strategy
        return type(strategy.precision_plugin) is Precision and isinstance(strategy, SingleDeviceStrategy)


# The columns of a batch by name. Those under "next" are in a nested dictionary.
Columns = Mapping[str, Any]

Network = TypeVar("Network", bound=nn.Module)


def weighted(rows: Tensor, batch: Columns | TensorDictBase) -> Tensor:
    """Returns each row's loss times its ``priority_weight``, if the batch has this column."""
    weight = batch.get("priority_weight", None)
    return rows if weight is None else rows * weight.reshape(rows.shape)


def weighted_mean(rows: Tensor, batch: Columns | TensorDictBase) -> Tensor:
    """Returns the mean of :func:`weighted` losses over the batch.

    The sum is divided by B. The sum of the weights as divisor would undo their normalization.
    """
    return weighted(rows, batch).mean()


def bootstrapped(batch: Columns | TensorDictBase, values: Tensor, discount: float) -> Tensor:
    """Returns the targets ``reward + γ^n values``, or only the reward of a terminated episode.

    n is the column ``steps_to_next_obs``, or 1 without this column. A truncated row keeps its bootstrap. The targets
    overwrite ``values`` ``[B]``, the values of the next observations, which have no gradients.
    """
    reward, factor, ended = reward_and_factor(batch, values, discount)
    return values.mul_(factor).masked_fill_(ended, 0.0).add_(reward)


def reward_and_factor(
    batch: Columns | TensorDictBase, values: Tensor, discount: float
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Returns rewards, factors ``γ^n``, and flags of terminated episodes, in the shape of ``values``."""
    following = batch["next"]
    steps = batch.get("steps_to_next_obs", None)
    reward = following.get("reward", None)
    ended = following.get("terminated", following.get("done", None))
    if reward is None or ended is None:
        raise ValueError(
            f"rows have the columns {sorted(following.keys())} under 'next', and learning takes reward and terminated "
            "(or done); store these too, see docs/demonstrations.md"
        )
    factor = discount if steps is None else discount ** steps.view_as(values)
    return reward.view_as(values), factor, ended.view_as(values).bool()


def double_q_target(batch: Columns | TensorDictBase, values: Tensor, target_values: Tensor, discount: float) -> Tensor:
    """Returns the targets of double Q-learning from the values of the next observations, ``[..., A]``.

    ``values`` choose each next action, and ``target_values`` value it.
    """
    best = values.argmax(dim=-1, keepdim=True)
    return bootstrapped(batch, target_values.gather(-1, best).squeeze(-1), discount)


def target_of(network: Network) -> Network:
    """Returns a copy without gradients."""
    return copy.deepcopy(network).requires_grad_(False)


class TargetUpdate:
    """Moves the parameters of target networks: ``target += rate * (parameter - target)``.

    Args:
        pairs: Networks, each with its target network.
        rate: Rate τ in [0, 1].
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]], rate: float) -> None:
        # A network keeps its parameters when it moves to another device or loads a state.
        together = [pair for two in pairs for pair in zip(*(network.parameters() for network in two), strict=True)]
        self._sources, self._targets = map(list, zip(*together, strict=True))
        self._rate = rate

    def step(self) -> None:
        """Moves all targets once."""
        with torch.set_grad_enabled(False):  # torch.no_grad() takes twice as long.
            torch._foreach_lerp_(self._targets, self._sources, self._rate)


class OffPolicyAgent(SizedAgent):
    """Learns from replayed batches by manual optimization. ``global_step`` equals the number of updates.

    A subclass defines ``build`` (networks), ``update`` (one gradient step on one batch), ``act``, and
    ``configure_optimizers`` (critic first). See :class:`~lightning_replay.agents.agent.SizedAgent`.
    """

    counters: ClassVar[dict[str, str]] = {}  #: Attributes that a checkpoint holds, by their keys in it.

    def __init__(self) -> None:
        super().__init__()
        self._steps_directly = False  # on_fit_start decides.
        self.conflict_averse_step: ConflictAverseStep | None = None
        self.observation_encoder: nn.Module = nn.Identity()
        self.target_observation_encoder: nn.Module = nn.Identity()

    def build_encoder(self) -> int:
        """Creates the encoder of ``observation_size`` and its target. Returns the number of features. :meta private:"""
        size = self.hparams["observation_size"]
        normalizes = self.hparams.get("normalize_observations", False)
        if isinstance(size, int) and not normalizes:
            return size
        encoder = self.observation_encoder = Encoder(size, normalizes)
        self.target_observation_encoder = encoder.target()
        return encoder.size

    def features_of(self, observation: Any, target: bool = False) -> Any:
        """Returns the inputs of the networks: flat observations as they are, others encoded. :meta private:"""
        # The lookup of a module and the call of an identity take 2 us of the 37 us of an action.
        encoder: Any = self._modules["target_observation_encoder" if target else "observation_encoder"]
        return observation if type(encoder) is nn.Identity else encoder(observation)

    def target_update_of(self, *pairs: tuple[nn.Module, nn.Module]) -> TargetUpdate:
        """Returns the update of target networks and of the target encoder, with pairs as in :class:`TargetUpdate`.

        :meta private:
        """
        pairs = (*pairs, (self.observation_encoder, self.target_observation_encoder))
        return TargetUpdate(pairs, self.hparams["target_update_rate"])

    def avert_conflicts(self, parameters: Iterable[Tensor]) -> None:
        """Lets :meth:`descend_rows` step these parameters by the option ``conflict_aversion``. :meta private:"""
        if self._conflict_aversion != 0:
            self.conflict_averse_step = ConflictAverseStep(parameters, self._conflict_aversion)

    def descend_rows(self, optimizer: LightningOptimizer, rows: Tensor, batch: TensorDictBase) -> Tensor:
        """Steps an optimizer by the weighted losses of the rows, ``[B]``, and returns their mean.

        With conflict aversion, the gradients of the batch's tables are combined.

        :meta private:
        """
        losses = weighted(rows, batch)
        loss = losses.mean()
        if self.conflict_averse_step is None:
            self.descend(optimizer, loss)
            return loss.detach()
        table = batch.get("table", None)
        if table is None:
            raise ValueError(
                'the batch has no column "table", which conflict_aversion splits it by; draw from event tables '
                "(recipes.event_tables), or set conflict_aversion=0.0."
            )
        self.descend(optimizer, losses, partial(self.conflict_averse_step.backward, parts=table))
        return loss.detach()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Takes one gradient step. Returns ``loss`` and ``td_error`` ``[B]``, both detached."""
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[L.Callback]:
        """Returns also the callback that passes TD errors to the replay."""
        return [*super().configure_callbacks(), UpdatePriorities()]

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> dict[str, Tensor]:
        """Updates once for each batch of the step."""
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

        With conflict aversion, it also refuses a trainer that syncs gradients between devices.

        :meta private:
        """
        super().on_fit_start()
        if self.conflict_averse_step is not None and not self.takes_plain_gradients:
            raise ValueError(
                f"conflict_aversion is {self.hparams['conflict_aversion']!r}, which needs one device and 32-bit "
                "precision. Use Trainer(devices=1, precision=32), or conflict_aversion=0.0."
            )
        options = self.hparams
        data = training_data(self.trainer)
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
        """Steps an optimizer. Lightning counts the step if it wraps the optimizer.

        If nothing uses Lightning's hooks, they are left out. They take 40 µs, and more for each callback.

        :meta private:
        """
        if not self._steps_directly or not isinstance(optimizer, LightningOptimizer):
            super().take_step(optimizer)
            return
        plain = optimizer.optimizer
        self.clip(parameter for group in plain.param_groups for parameter in group["params"])
        progress = optimizer_steps(self.trainer)
        progress.increment_ready()
        plain.step()
        progress.increment_completed()

    def critic_and_other_optimizers(self) -> tuple[LightningOptimizer, list[torch.optim.Optimizer]]:
        """Returns the critic's optimizer, whose steps Lightning counts, and the other ones unwrapped. :meta private:"""
        wrapped = self.optimizers()
        if not isinstance(wrapped, list):
            return wrapped, []
        plain: Any = self.optimizers(use_pl_optimizer=False)
        return wrapped[0], plain[1:]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the counters and the schedule of the conflict aversion."""
        checkpoint.update({key: vars(self)[name] for key, name in self.counters.items()})
        if self.conflict_averse_step is not None:
            checkpoint["dqn_conflict_aversion"] = self.conflict_averse_step.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what :meth:`on_save_checkpoint` saved. A counter that is missing becomes 0."""
        vars(self).update({name: checkpoint.get(key, 0) for key, name in self.counters.items()})
        if self.conflict_averse_step is not None and "dqn_conflict_aversion" in checkpoint:
            self.conflict_averse_step.load_state_dict(checkpoint["dqn_conflict_aversion"])


class ExploringAgent(OffPolicyAgent):
    """Takes random actions with a probability that falls linearly. A checkpoint holds the number of steps taken.

    A subclass has the hyperparameters ``exploration_start``, ``exploration_end``, and ``exploration_steps``. Its
    ``counters`` include ``_explored_steps``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._explored_steps = 0
        self._num_processes = 1  # Each process of the trainer takes as many steps.

    @property
    def exploration_rate(self) -> float:
        """Probability of a random action now."""
        options = self.hparams
        start = options["exploration_start"]
        done = min(1.0, self._explored_steps / max(1, options["exploration_steps"]))
        return start + (options["exploration_end"] - start) * done

    def on_fit_start(self) -> None:
        """Reads the number of processes, which all explore."""
        super().on_fit_start()
        self._num_processes = self.trainer.world_size

    def draw_random(self, count: int) -> tuple[Tensor, float]:
        """Returns a uniform number for each of ``count`` actions, and the rate. Actions below the rate are random."""
        drawn = torch.rand(count, device=self.device)
        rate = self.exploration_rate
        vars(self)["_explored_steps"] += count * self._num_processes  # nn.Module.__setattr__ takes three times as long.
        return drawn, rate

    def with_random(self, greedy: Tensor) -> Tensor:
        """Returns the actions ``[N]``, each replaced by a random one with probability :attr:`exploration_rate`."""
        drawn, rate = self.draw_random(len(greedy))
        # For a few environments, torch takes longer. Numbers on a device are not read, because that waits for it.
        if drawn.is_cpu and min(drawn.tolist(), default=rate) >= rate:
            return greedy
        return torch.where(drawn < rate, torch.randint_like(greedy, self.hparams["num_actions"]), greedy)
