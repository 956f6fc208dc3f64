# SPDX-License-Identifier: Apache-2.0
"""The training data of on-policy agents as Lightning sees it: an epoch of rollouts, each collected when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from lightning_replay.lit.level_datamodule import LevelDataModule

__all__ = ["RolloutStream"]


class RolloutStream:
    """One epoch. It has a length, so that Lightning asks for a rollout only after the policy learned from the last one.

    Args:
        source: the data module that collects.
        length: rollouts per epoch; the last epoch may be shorter.
    """

    def __init__(self, source: LevelDataModule, length: int) -> None:
        self._source = source
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDictBase]:
        source = self._source
        source.start_epoch()
        for _ in range(self._length):
            if source.remaining_updates <= 1:
                source.request_stop()
            if source.remaining_updates == 0:
                return
            yield source.draw()

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
        "a RolloutStream cannot be wrapped in a DataLoader: its workers would play with a copy of the policy made at "
        "the start. Hand the LevelDataModule (or the stream itself) to the trainer."
    )
