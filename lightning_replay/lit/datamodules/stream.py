# SPDX-License-Identifier: Apache-2.0
"""The training data as Lightning sees it: an epoch of batches or rollouts, each drawn when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

from tensordict import TensorDictBase
from torch import Tensor

if TYPE_CHECKING:
    from lightning_replay.lit.datamodules.env_steps import EnvStepDataModule
    from lightning_replay.lit.datamodules.replay import ReplayDataModule

__all__ = ["UpdateBatches", "UpdateStream", "signals_of"]

_SIGNALS = ("surprise", "action_values", "action")


def signals_of(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a training step returned for the replay beside ``td_error``."""
    return {name: outputs[name] for name in _SIGNALS if name in outputs}


class UpdateBatches:
    """Several batches for one ``training_step``, each collected for and drawn when the loop reaches it.

    Update the priorities inside the loop; the callback that does it between steps would come too late.

    Example::

        for batch in batches:
            outputs = self.update(batch)
            batches.update_priority(batch, **outputs)
    """

    def __init__(self, source: ReplayDataModule, count: int) -> None:
        self._source = source
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TensorDictBase]:
        for _ in range(self._count):
            yield self._source.draw()

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **outputs: Any) -> None:
        """Gives the TD errors of one batch back to the replay, and of what else a step returned the signals."""
        self._source.update_priority(batch, td_error, **signals_of(outputs))


class UpdateStream:
    """One epoch. It has a length, so that Lightning asks for a batch only once the agent has learned from the last.

    Args:
        source: the data module that collects and draws.
        length: training steps per epoch; the last epoch may be shorter.
        updates_per_step: batches per training step; more than one come as :class:`UpdateBatches`.
    """

    def __init__(self, source: EnvStepDataModule, length: int, updates_per_step: int = 1) -> None:
        self._source = source
        self._length = length
        self._updates_per_step = updates_per_step

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDictBase | UpdateBatches]:
        source = self._source
        source.start_epoch()
        for _ in range(self._length):
            source.pause(is_between_steps=True)
            remaining = source.remaining_updates
            if remaining <= self._updates_per_step:
                source.request_stop()
            if remaining == 0:
                return
            if self._updates_per_step == 1:
                yield source.draw()
            else:
                yield UpdateBatches(cast("ReplayDataModule", source), min(self._updates_per_step, remaining))
                if source.remaining_updates == remaining:
                    raise RuntimeError(
                        f"training_step drew none of its {self._updates_per_step} batches. With "
                        "updates_per_training_step above 1 it gets an iterable: `for drawn in batch: ...`."
                    )

    def __getitem__(self, index: int) -> NoReturn:
        raise _not_for_data_loaders()

    def __reduce__(self) -> NoReturn:
        raise _not_for_data_loaders()  # a DataLoader is about to send the stream to a worker

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module keeps the place. Its presence tells Lightning that the stream can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`state_dict`."""


def _not_for_data_loaders() -> RuntimeError:
    return RuntimeError(
        "an UpdateStream cannot be wrapped in a DataLoader: its workers would draw from a copy of the replay and of "
        "the policy made at the start. Hand the data module (or the stream itself) to the trainer."
    )
