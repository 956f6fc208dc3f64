# SPDX-License-Identifier: Apache-2.0
"""Training steps of several updates, which end where a callback acts, so that each acts where it does after one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
from tensordict import TensorDictBase

from lightning_replay.agents.feedback import UpdateBatches
from lightning_replay.agents.foreign import observes_batches, takes_update_batches
from lightning_replay.lit.datamodules.env_steps import EnvStepDataModule, UpdateStream

__all__ = ["ActsAtUpdates", "StepsToCallbacks", "may_join_updates"]

# Lightning takes 100 to 200 us for a training step: 2 % of 16 updates of a small network.
_MOST_UPDATES = 16
# With fewer updates the environment steps take longer than Lightning, and many episodes would end in one training step.
_LEAST_UPDATES_PER_ENV_STEP = 0.25


class ActsAtUpdates(ABC):
    """A callback that acts after some of the updates: a training step of several ends there."""

    @abstractmethod
    def is_due(self, source: EnvStepDataModule) -> bool:
        """Returns whether the callback has something to do after the update that was made last."""


def may_join_updates(trainer: L.Trainer, source: EnvStepDataModule, updates_per_env_step: float) -> bool:
    """Returns whether nothing but the speed changes where a training step has several updates.

    That is so if the agent declares that it takes them, see
    :func:`~lightning_replay.agents.foreign.takes_update_batches`; if callbacks, agent and data module have no hooks
    that Lightning calls for every batch, other than those of this library and Lightning's progress bars; and if the
    trainer does not limit the number of training steps.
    """
    agent = trainer.lightning_module
    limits = (trainer.limit_train_batches != 1.0, trainer.overfit_batches, trainer.fast_dev_run)  # type: ignore[attr-defined]
    parts: list[Any] = [agent, source, *trainer.callbacks]  # type: ignore[attr-defined]
    return (
        takes_update_batches(agent)
        and updates_per_env_step >= _LEAST_UPDATES_PER_ENV_STEP
        and not any(limits)
        and not any(observes_batches(part) for part in parts)
    )


class _StepBatches(UpdateBatches):
    """The batches of one training step: ``count``, or fewer where ``is_over`` returns true after an update."""

    def __init__(self, source: EnvStepDataModule, count: int, is_over: Callable[[], bool]) -> None:
        super().__init__(source, count)
        self._is_over = is_over

    def __iter__(self) -> Iterator[TensorDictBase]:
        for batch in super().__iter__():
            yield batch
            if self._is_over():
                return


class StepsToCallbacks(UpdateStream):
    """One epoch of exactly ``updates`` updates, up to the next multiple of these, in training steps of up to 16.

    Its length is that of training steps of one update, the most there can be.

    Args:
        source: the data module that collects and draws.
        updates: per epoch.
    """

    def __init__(self, source: EnvStepDataModule, updates: int) -> None:
        super().__init__(source, updates, _MOST_UPDATES)

    def __iter__(self) -> Iterator[TensorDictBase | UpdateBatches]:
        source = self._source
        source.start_epoch()
        assert source.trainer is not None
        acting = [one for one in source.trainer.callbacks if isinstance(one, ActsAtUpdates)]  # type: ignore[attr-defined]
        end = (source.updates_done // self._length + 1) * self._length
        while source.updates_done < end:
            for hook in source.pause_hooks:
                hook(True)
            before = source.updates_done
            if source.remaining_updates == 0:
                source.trainer.should_stop = True
                return
            count = min(self._updates_per_step, source.remaining_updates, end - before)
            yield _StepBatches(source, count, lambda: self._is_over(acting))
            self._check_drawn(before)

    def _is_over(self, acting: list[ActsAtUpdates]) -> bool:
        source, trainer = self._source, self._source.trainer
        assert trainer is not None
        if source.remaining_updates == 0:
            trainer.should_stop = True
        is_last = trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps
        return trainer.should_stop or is_last or any(one.is_due(source) for one in acting)
