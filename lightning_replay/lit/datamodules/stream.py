# SPDX-License-Identifier: Apache-2.0
"""Lightning's view of the training data: an epoch of batches or rollouts, each drawn when it is requested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from tensordict import TensorDictBase

from lightning_replay.agents.feedback import UpdateBatches
from lightning_replay.lit.datamodules.env_steps import EnvStepDataModule

__all__ = ["UpdateBatches", "UpdateStream"]


class UpdateStream:
    """One epoch. It has a length, so that Lightning requests a batch only after the agent has learned from the last.

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
            for hook in source.pause_hooks:
                hook(True)
            remaining = source.remaining_updates
            if remaining <= self._updates_per_step:
                source.request_stop()
            if remaining == 0:
                return
            if self._updates_per_step == 1:
                yield source.draw()
            else:
                yield UpdateBatches(source, min(self._updates_per_step, remaining))
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
        """Nothing: the data module keeps the place. By this method Lightning recognises a stream that can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`state_dict`."""


def _not_for_data_loaders() -> RuntimeError:
    return RuntimeError(
        "an UpdateStream cannot be wrapped in a DataLoader: its workers would draw from a copy of the replay and of "
        "the policy made at the start. Hand the data module (or the stream itself) to the trainer."
    )
