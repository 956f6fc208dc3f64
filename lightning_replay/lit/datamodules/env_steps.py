# SPDX-License-Identifier: Apache-2.0
"""Base class of the data modules that step environments, with transitions or with levels."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium
import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDictBase

from lightning_replay.lit.collectors.vector import Episode
from lightning_replay.lit.env_step_axis import EnvStepAxis

__all__ = ["EnvStepDataModule", "source_of"]


class _Pace(Protocol):
    env_steps: int


class _Collection(Protocol):
    @property
    def env_steps(self) -> int: ...

    @property
    def episodes(self) -> Sequence[Episode]: ...

    @property
    def recent_return(self) -> float: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class EnvStepDataModule(L.LightningDataModule):
    """A data module with two clocks, ``env_steps_done`` and ``updates_done``, which stops the trainer at its end.

    From ``setup`` to ``teardown`` the trainer's loggers record both, see
    :class:`~lightning_replay.lit.env_step_axis.EnvStepAxis`.

    Subclasses set ``env``, ``pace``, whose ``env_steps`` are those of the whole run, and ``collection``, which plays.

    Attributes:
        updates_per_checkpoint: updates after which :class:`~lightning_replay.lit.ReplayCheckpoint` saves by default.
        updates_done: batches or rollouts handed to the agent.
        is_update_open: whether the agent may not have learned from the newest of them yet.
        pause_hooks: called by :meth:`pause`.
    """

    env: str | Callable[..., gymnasium.Env]
    pace: _Pace
    collection: _Collection
    updates_per_checkpoint = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.updates_done = 0
        self.is_update_open = False
        self.pause_hooks: list[Callable[[bool], None]] = []
        self._limit_val_batches: int | float | None = None
        self._logging_axis = EnvStepAxis(self)

    @property
    @abstractmethod
    def _source(self) -> str:
        """Description of the replay or the levels, for :meth:`__repr__`."""

    def __repr__(self) -> str:
        env = self.env if isinstance(self.env, str) else getattr(self.env, "__name__", repr(self.env))
        updates = self.updates_done + self.remaining_updates
        return (
            f"{type(self).__name__}({env}, {self.env_steps_done:,} of {self.pace.env_steps:,} env steps, "
            f"{self.updates_done:,} of {updates:,} updates, {self._source})"
        )

    __str__ = __repr__  # Lightning's builds the dataloaders, which need a trainer

    @abstractmethod
    def make_environment(self) -> gymnasium.Env:
        """One more environment of the same kind, for evaluation."""

    @abstractmethod
    def draw(self) -> TensorDictBase:
        """Collects what is due before the next update, then returns what it learns from, on the agent's device."""

    def pause(self, is_between_steps: bool) -> None:
        """Calls the hooks, which may save or stop: between training steps, and while many steps are collected."""
        for hook in self.pause_hooks:
            hook(is_between_steps)

    def drop_open_update(self) -> None:
        """Removes an update that failed from the count, so that it is due again."""
        if self.is_update_open:
            self.updates_done -= 1
            self.is_update_open = False

    @property
    @abstractmethod
    def remaining_updates(self) -> int:
        """Updates until the end of the run."""

    @property
    def env_steps_done(self) -> int:
        """Environment steps collected."""
        return self.collection.env_steps

    @property
    def is_finished(self) -> bool:
        """Whether all environment steps are collected and all updates drawn."""
        return self.remaining_updates == 0 and self.env_steps_done >= self.pace.env_steps

    def _refuse_processes(self, each_would: str) -> None:
        """Raises ``ValueError`` where the trainer runs several, of which each would do something of its own."""
        if self.trainer is not None and self.trainer.world_size > 1:
            raise ValueError(
                f"the trainer runs {self.trainer.world_size} processes; {type(self).__name__} supports one, because "
                f"each would {each_would}. Use devices=1, num_nodes=1 (and num_envs for more environments)."
            )

    def _settle_trainer(self, stage: str) -> None:
        """Changes the trainer. Call last in ``setup``: Lightning does not undo changes if it raises."""
        if self.trainer is not None:
            self._logging_axis.attach(self.trainer.loggers)
            self._limit_validation(stage == TrainerFn.FITTING)
            # Lightning advises to save the weights from before the step; those after it are the ones to resume from
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")

    def _limit_validation(self, is_fitting: bool) -> None:
        """Keeps Lightning's own validation out of ``fit``, where it would count epochs, not environment steps."""
        assert self.trainer is not None
        if self._limit_val_batches is not None:
            self.trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None
        if is_fitting:
            self._limit_val_batches, self.trainer.limit_val_batches = self.trainer.limit_val_batches, 0

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch itself: :meth:`draw` has put it there, and moving a TensorDict to where it is costs 50 µs."""
        return batch

    def start_epoch(self) -> None:
        """Called by the stream: warns if the run has nothing left to do."""
        if self.is_finished:
            rank_zero_warn(
                f"all {self.pace.env_steps} env_steps are collected and updated on; nothing is left to train. Give a "
                f"larger env_steps to go on, or a new {type(self).__name__} to start anew."
            )

    def request_stop(self) -> None:
        """Called by the stream with the last batch: the trainer ends after it."""
        if self.trainer is not None:
            self.trainer.should_stop = True

    @property
    def _agent(self) -> L.LightningModule:
        assert self.trainer is not None
        return self.trainer.lightning_module

    @property
    def _is_fitting(self) -> bool:
        """Whether a checkpoint that is loaded is gone on from; other stages need the weights alone."""
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    def state_dict(self) -> dict[str, Any]:
        """Clocks and generators: tensors and plain values only."""
        state: dict[str, Any] = {"version": 1, "updates": self.updates_done, "collection": self.collection.state_dict()}
        state["torch_generator"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda_generators"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.updates_done = state["updates"]
        self.collection.load_state_dict(state["collection"])
        torch.set_rng_state(state["torch_generator"].cpu())
        if "cuda_generators" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda_generators"]])

    def on_exception(self, exception: BaseException) -> None:
        """Restores the loggers; Lightning calls no ``teardown`` after an error."""
        self._logging_axis.detach()

    def teardown(self, stage: str) -> None:
        """Closes the environments and restores the loggers."""
        self._logging_axis.detach()
        self.collection.close()
        if self.trainer is not None:
            self._limit_validation(False)


def source_of(trainer: L.Trainer, callback: L.Callback) -> EnvStepDataModule:
    """The trainer's data module.

    Raises:
        TypeError: it counts no environment steps.
    """
    source = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(source, EnvStepDataModule):
        raise TypeError(
            f"{type(callback).__name__} counts environment steps, and the trainer's data module is {source!r}, which "
            "does not; fit with datamodule=ReplayDataModule(...) or LevelDataModule(...)."
        )
    return source
