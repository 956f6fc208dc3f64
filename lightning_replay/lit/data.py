# SPDX-License-Identifier: Apache-2.0
"""Data modules that follow environment steps: the source of updates, the clock, and joined updates."""

from __future__ import annotations

import signal
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import FrameType
from typing import Any, ClassVar, NoReturn

import gymnasium
import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.agents.interfaces import TrainingData, UpdateBatches, idle_schedulers
from lightning_replay.envs.building import MAX_EPISODE_STEPS, build, check_env
from lightning_replay.lightning_compat import NO_VALIDATION, replace_options, requeue_signal
from lightning_replay.lit.checkpoint_files import CheckedCheckpointIO, ReplayCheckpointIO
from lightning_replay.lit.collection import Collector, OfflineSchedule, RolloutSchedule, UpdateSchedule, check_tasks
from lightning_replay.lit.rollouts import Successes, episode_returns, make_environment, usable_environment
from lightning_replay.lit.simulators import Simulator, is_simulator
from lightning_replay.options import check_kind, checked_flag
from lightning_replay.state import Stateful

#: Precisions with float32 weights.
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class EnvStepDataModule(L.LightningDataModule, TrainingData):
    """A data module with two clocks, ``env_steps_done`` and ``updates_done``, which stops the trainer at its end."""

    pace: UpdateSchedule | RolloutSchedule | OfflineSchedule
    collection: Collector
    observation_space: gymnasium.Space[Any] | None
    action_space: gymnasium.Space[Any] | None
    evaluation_episodes: int
    takes_simulators: ClassVar[bool] = False  # whether ``env`` may step many environments in one tensor
    updates_per_checkpoint = 10_000  # default of ReplayCheckpoint

    def __init__(
        self,
        env: str | Callable[..., Any] | Simulator | None,
        asynchronous: bool,
        env_kwargs: dict[str, Any] | None,
        evaluation_env_kwargs: dict[str, Any] | None,
    ) -> None:
        super().__init__()
        if env is not None and not (self.takes_simulators and is_simulator(env)):
            check_env(env)
        self.steps_environments: bool = env is not None
        for name, given in (("env_kwargs", env_kwargs), ("evaluation_env_kwargs", evaluation_env_kwargs)):
            check_kind(name, given, Mapping | None, "arguments of the environment by name, or None")
        self.env: Any = env
        self.env_kwargs: dict[str, Any] = dict(env_kwargs or {})
        self.evaluation_env_kwargs: dict[str, Any] = self.env_kwargs | dict(evaluation_env_kwargs or {})
        self.updates_done: int = 0  # batches or rollouts handed to the agent
        self.is_update_open: bool = False  # whether the agent may not have learned from the newest of them yet
        self.is_evaluated: bool = False  # whether a callback Evaluate ends the epochs
        # Called with True between training steps, and with False while many steps are collected.
        self.pause_hooks: list[Callable[[bool], None]] = [self._requeue]
        # Called at every step of an evaluation, to raise the exception of a signal that ends the run.
        self.stop_checks: list[Callable[[], None]] = []
        self._requeue_handler: Any = None  # Lightning's, of SLURM's signal before the end of the time limit
        self._requeue_signal: int | None = None  # received, and not handled yet
        self._asynchronous = checked_flag("asynchronous", asynchronous)
        self._validation: dict[str, Any] = {}  # options of the trainer to restore
        self._own_loggers = ExitStack()  # restores them

    def _describe(self, source: str) -> str:
        env = self.env if isinstance(self.env, str) else getattr(self.env, "__name__", repr(self.env))
        updates = self.updates_done + self.remaining_updates
        steps = f"{self.env_steps_done:,} of {self.pace.env_steps:,} env steps, " if self.pace.env_steps else ""
        return f"{type(self).__name__}({env}, {steps}{self.updates_done:,} of {updates:,} updates, {source})"

    def __str__(self) -> str:
        return repr(self)  # Lightning's builds the dataloaders, which need a trainer

    def make_environment(self) -> gymnasium.Env[Any, Any]:
        """Builds an environment for an evaluation."""
        return make_environment(self.required_environment("an evaluation"), self.evaluation_env_kwargs)

    def played_returns(
        self,
        agent: L.LightningModule,
        episodes: int,
        seed: int,
        max_episode_steps: int = MAX_EPISODE_STEPS,
        successes: Successes | None = None,
    ) -> Generator[float, None, None]:
        """Plays whole episodes without exploration and yields their returns.

        :meta private:
        """
        with closing(self.make_environment()) as environment:
            yield from episode_returns(
                agent, environment, episodes, seed, max_episode_steps, self.check_stopped, successes
            )

    def required_environment(self, purpose: str) -> str | Callable[..., gymnasium.Env[Any, Any]]:
        """Returns ``env``, or raises ``ValueError`` if the module has none.

        :meta private:
        """
        if self.env is None:
            raise ValueError(
                f"{type(self).__name__} has no environment, and {purpose} plays episodes in one. Give it env beside "
                "updates, which is then for evaluation alone, or leave the evaluation out."
            )
        return self.env

    @abstractmethod
    def draw(self) -> TensorDictBase:
        """Collects the steps due before the next update, then returns its batch or rollout on the agent's device."""

    @abstractmethod
    def evaluation_returns(self) -> Iterable[float]:
        """Plays the episodes of ``trainer.validate`` and returns their returns."""

    def val_dataloader(self) -> EvaluationStream:
        """Returns episodes for ``trainer.validate``. During ``fit``, a callback such as ``Evaluate`` plays them."""
        return EvaluationStream(self)

    def check_stopped(self) -> None:
        """Raises the exception of a signal that ends the run. Evaluations call this method at every step."""
        for check in self.stop_checks:
            check()
        if self.trainer is not None and self.trainer.received_sigterm:
            raise SIGTERMException

    def _defer_requeue(self) -> None:
        """Lets SLURM's signal wait for the end of the training step in progress.

        Lightning saves its checkpoint and requeues the job within the signal's handler. That may interrupt an update
        or a write to the replay, which no checkpoint can hold.
        """
        # Several processes would save after different updates, and wait for each other without end.
        if self.trainer is None or self.trainer.world_size > 1:
            return
        number = requeue_signal(self.trainer)
        if number is not None and threading.current_thread() is threading.main_thread():
            self._requeue_signal = None
            # Lightning restores the handler from before the run at its end.
            self._requeue_handler = signal.signal(number, self._receive_requeue)

    def _receive_requeue(self, number: int, frame: FrameType | None) -> None:
        self._requeue_signal = number

    def _requeue(self, is_between_steps: bool) -> None:
        number = self._requeue_signal
        if number is not None:
            self._requeue_signal = None
            self._requeue_handler(number, None)

    def drop_open_update(self) -> None:
        """Takes back the newest update if it was not completed.

        :meta private:
        """
        if self.is_update_open:  # the update failed, and is due again
            self.updates_done -= 1
            self.is_update_open = False

    @property
    @abstractmethod
    def remaining_updates(self) -> int: ...
    @property
    def env_steps_done(self) -> int:
        """Environment steps collected so far."""
        return self.collection.env_steps

    @property
    def clocks(self) -> tuple[int, int]:
        """Environment steps and updates so far."""
        return self.env_steps_done, self.updates_done

    @property
    def steps_done(self) -> int:
        """Environment steps, or updates if none are collected: the axis of loggers, evaluations and pictures."""
        return self.env_steps_done if self.pace.env_steps else self.updates_done

    @property
    def total_steps(self) -> int:
        """What :attr:`steps_done` is at the end of the run."""
        return self.pace.env_steps or self.updates_done + self.remaining_updates

    @property
    def is_finished(self) -> bool:
        """Whether all updates are done and all steps collected."""
        return self.remaining_updates == 0 and self.env_steps_done >= self.pace.env_steps

    def setup(self, stage: str) -> None:
        """Reads the spaces and installs the checkpoint plug-in and the loggers' axis.

        Raises:
            ValueError: several processes, a precision that changes the dtype of weights, or an environment that cannot
                be used.
        """
        self.is_evaluated = False
        if self.trainer is not None:
            self.check_processes(self.trainer.world_size)
            precision = str(self.trainer.precision)
            if precision not in _PRECISIONS:
                raise ValueError(
                    f"precision is {precision}, in which weights are not float32; observations and replayed rows are. "
                    "Use Trainer(precision='32-true'), or 'bf16-mixed' for faster layers on float32 weights."
                )
        if self.observation_space is None and self.env is not None:
            self._read_spaces(self.env if is_simulator(self.env) else build(self.env, self.env_kwargs))
        if self.trainer is not None:
            self._agent.configure_model()  # Callbacks such as StochasticWeightAveraging copy the agent later.
            # The trainer is changed last, because Lightning does not undo changes if setup raises.
            plugin = self.trainer.strategy.checkpoint_io
            while isinstance(plugin, CheckedCheckpointIO):  # An earlier fit wrapped it.
                plugin = plugin.wrapped
            checked = CheckedCheckpointIO(plugin) if self.replay is None else ReplayCheckpointIO(plugin, self)
            self.trainer.strategy.checkpoint_io = checked
            self._log_by_env_steps(self.trainer.loggers)
            self._limit_validation(stage == TrainerFn.FITTING)
            # Lightning advises to save the weights from before the step. A run resumes from the weights after it.
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")

    def _read_spaces(self, built: Any) -> None:
        with closing(usable_environment(built, self.env)) as probe:
            if self.replay is not None and self.replay.tasks:
                check_tasks(probe, self.replay.tasks)
            self.observation_space, self.action_space = probe.observation_space, probe.action_space

    def _log_by_env_steps(self, loggers: Sequence[Logger]) -> None:
        # Lightning logs against the number of batches: losses and returns would be in two units on one axis.
        self._own_loggers.close()
        for logger in loggers:
            # The loggers themselves stay: callbacks test their types, and trainer.log_dir is their folder.
            attributes = vars(logger)
            before = logger.log_metrics
            if "log_metrics" in attributes:
                self._own_loggers.callback(attributes.__setitem__, "log_metrics", before)
            else:
                self._own_loggers.callback(attributes.pop, "log_metrics")
            attributes["log_metrics"] = partial(self._log_metrics, before)

    def _log_metrics(
        self, log_metrics: Callable[..., None], metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        log_metrics({**metrics, "updates": self.updates_done}, step=self.steps_done)

    def check_processes(self, world_size: int) -> None:
        """Raises ``ValueError`` for several processes without a shared replay.

        :meta private:
        """
        if world_size > 1 and not (self.replay is not None and self.replay.is_shared):
            raise ValueError(
                f"the trainer runs {world_size} processes; {type(self).__name__} supports one, because each would have "
                "a replay or levels of its own. Use devices=1, num_nodes=1 (and num_envs for more environments)."
            )

    def _limit_validation(self, is_fitting: bool) -> None:
        assert self.trainer is not None
        replace_options(self.trainer, self._validation)
        # In fit Lightning's own validation would count epochs.
        self._validation = replace_options(self.trainer, NO_VALIDATION) if is_fitting else {}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Returns the batch, which :meth:`draw` has moved.

        :meta private:
        """
        return batch  # draw has moved it; moving a TensorDict to where it is costs 50 µs

    def _updates_of_epoch(self, option: str, given: int | None, default: int) -> int:
        if not self.is_evaluated:
            return default if given is None else given
        if given is not None:
            rank_zero_info(f"{option}={given} has no effect: the evaluations of the callback Evaluate end the epochs.")
        return max(1, self.updates_done + self.remaining_updates)  # all of the run

    def start_epoch(self) -> None:
        """Warns if schedulers never step, or if nothing is left to train.

        :meta private:
        """
        self._defer_requeue()
        if self.trainer is not None and self.trainer.current_epoch == 1:
            idle = idle_schedulers(self.trainer)
            if idle:
                rank_zero_warn(
                    f"{', '.join(idle)} of {type(self._agent).__name__}.configure_optimizers did not step in the first "
                    "epoch: Lightning steps no schedulers in manual optimization. Call step() of self.lr_schedulers() "
                    "in training_step or on_train_epoch_end, of a ReduceLROnPlateau with a metric such as "
                    "self.trainer.callback_metrics['eval/return']."
                )
        if self.is_finished:
            clock, ended = ("env_steps", "collected and updated on") if self.pace.env_steps else ("updates", "done")
            rank_zero_warn(
                f"all {self.total_steps} {clock} are {ended}; nothing is left to train. Give a larger {clock} to "
                f"continue, or a new {type(self).__name__} to start again."
            )

    @property
    def _agent(self) -> L.LightningModule:
        assert self.trainer is not None
        return self.trainer.lightning_module

    @property
    def _is_fitting(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    def state_dict(self) -> dict[str, Any]:
        """Returns the clocks and all generators.

        :meta private:
        """
        state: dict[str, Any] = {
            "version": 1,
            "updates": self.updates_done,
            "collection": self.collection.state_dict(),
            "torch_generator": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda_generators"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        :meta private:
        """
        self.updates_done = state["updates"]
        self.collection.load_state_dict(state["collection"])
        torch.set_rng_state(state["torch_generator"].cpu())
        if "cuda_generators" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda_generators"]])

    def on_exception(self, exception: BaseException) -> None:
        """Restores the loggers, because Lightning calls no teardown after an error.

        :meta private:
        """
        self._own_loggers.close()  # Lightning calls no teardown after an error

    def teardown(self, stage: str) -> None:
        """Restores loggers and options of the trainer, and closes the environments.

        :meta private:
        """
        self._own_loggers.close()
        self.collection.close()
        if self.trainer is not None:
            self._limit_validation(False)


class EvaluationStream:
    """Validation data for ``trainer.validate``: one item ``{"return": ...}`` per episode that the data module plays."""

    def __init__(self, source: EnvStepDataModule) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.evaluation_episodes

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for one in self._source.evaluation_returns():
            yield {"return": torch.tensor(one, dtype=torch.float32, device=self._source._agent.device)}


class ActsAtUpdates:
    """A callback that must run after certain updates. A joined training step is cut there."""

    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback acts after the newest update.

        :meta private:
        """
        return False


class UpdateStream(Stateful):
    """One epoch of batches or rollouts. It has a length, so that Lightning draws one only after the last is learned.

    Lightning recognizes by ``state_dict``, here without entries, that an epoch can be resumed.

    Args:
        source: Data module that collects and draws.
        length: Number of training steps per epoch. The last epoch may be shorter.
        updates_per_step: batches per training step. More than one come as :class:`UpdateBatches`.
        ends_early: Whether a training step ends when a callback acts, so that it acts after the same update as with
            single batches. ``length`` is then the number of updates.
    """

    def __init__(
        self, source: EnvStepDataModule, length: int, updates_per_step: int = 1, ends_early: bool = False
    ) -> None:
        self._source = source
        self._length = length
        self._updates_per_step = updates_per_step
        self._ends_early = ends_early
        self._updates = length if ends_early else length * updates_per_step

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDictBase | UpdateBatches]:
        source = self._source
        several = self._updates_per_step
        source.start_epoch()
        # A resumed epoch ends at the update at which it would have ended without a break.
        end = (source.updates_done // self._updates + 1) * self._updates
        while source.updates_done < end:
            for hook in source.pause_hooks:  # the last update is learned from: checkpoints are written here
                hook(True)
            before = source.updates_done
            remaining = source.remaining_updates
            if source.trainer is not None and (remaining == 0 or (remaining <= several and not self._ends_early)):
                source.trainer.should_stop = True  # Lightning does not ask again after the last step.
            if remaining == 0:
                return
            if several == 1:
                yield source.draw()
                continue
            yield UpdateBatches(source, min(several, remaining, end - before), self._is_over)
            if source.updates_done == before:
                raise RuntimeError(
                    f"training_step drew none of its {several} batches. With updates_per_training_step above 1 it gets "
                    "an iterable: `for drawn in batch: ...`."
                )

    def _is_over(self) -> bool:
        source = self._source
        trainer = source.trainer
        if not self._ends_early or trainer is None:
            return False
        if source.remaining_updates == 0:
            trainer.should_stop = True
        is_last = trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps
        if trainer.should_stop or is_last:
            return True
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by its connectors
        return any(callback.is_due(source) for callback in callbacks if isinstance(callback, ActsAtUpdates))

    def __getitem__(self, index: int) -> NoReturn:
        raise RuntimeError(
            "an UpdateStream cannot be wrapped in a DataLoader: its workers would draw from a copy of the replay and "
            "of the policy made at the start. Hand the data module (or the stream itself) to the trainer."
        )

    def __reduce__(self) -> NoReturn:
        self.__getitem__(0)  # a DataLoader is about to send the stream to a worker


def source_of(trainer: L.Trainer, callback: L.Callback) -> EnvStepDataModule:
    """Returns the trainer's data module, or raises ``TypeError`` if it counts no environment steps."""
    source = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(source, EnvStepDataModule):
        raise TypeError(
            f"{type(callback).__name__} counts environment steps, and the trainer's data module is {source!r}, which "
            "does not; fit with datamodule=ReplayDataModule(...) or LevelDataModule(...)."
        )
    return source
