# SPDX-License-Identifier: Apache-2.0
"""Feedback of training steps to the replay: after each step, or for each of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import lightning as L
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.agents.foreign import training_data
from lightning_replay.agents.interfaces import TrainingData
from lightning_replay.replay import SIGNALS


class UpdateBatches:
    """Several batches for one ``training_step``; each is drawn, after due collection, when the loop reaches it.

    Update the priorities inside the loop, because :class:`UpdatePriorities` runs only after the step.

    Example::

        for batch in batches:
            outputs = self.update(batch)
            batches.update_priority(batch, **outputs)
    """

    def __init__(self, source: TrainingData, count: int, is_over: Callable[[], bool] | None = None) -> None:
        self._source = source
        self._count = count
        self._is_over = is_over  # whether the step ends with the update that was made last
        self._is_drawn = False

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TensorDictBase]:
        if self._is_drawn:
            raise RuntimeError(
                "the batches of a training step are drawn as they are iterated over, once. If Lightning iterates over "
                "them for the batch size, give it: self.log(name, value, batch_size=len(batch))"
            )
        self._is_drawn = True
        for _ in range(self._count):
            yield self._source.draw()
            if self._is_over is not None and self._is_over():
                return

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(_several(f"[{key!r}]"))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_several(f".{name}"), name=name, obj=self)

    def update_priority(self, batch: TensorDictBase, td_error: Tensor, **outputs: Any) -> None:
        """Passes the TD errors of one batch to the replay, with the signals among the other outputs."""
        self._source.update_priority(batch, td_error, **_signals_of(outputs))


class UpdatePriorities(L.Callback):
    """After each training step calls ``replay.update_priority`` with the step's ``td_error`` and other signals.

    Return it from ``configure_callbacks`` of a LightningModule whose ``training_step`` returns ``{"td_error": ...}``,
    detached, ``[B]``, and optionally ``surprise`` ``[B]``, ``action_values`` ``[B, A]`` and ``action`` ``[B]`` for a
    replay that keeps transitions by their priority. Others ignore these.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        source = training_data(trainer)
        if not isinstance(batch, TensorDictBase) or source is None or not source.takes_td_errors:
            return
        if not isinstance(outputs, dict) or "td_error" not in outputs:
            raise KeyError(
                f"training_step of {type(pl_module).__name__} returned no 'td_error'; return "
                "{'loss': ..., 'td_error': detached TD errors [B]} so that the priorities can be updated."
            )
        source.update_priority(batch, outputs["td_error"], **_signals_of(outputs))


def _several(used: str) -> str:
    return (
        f"a training step has several batches, and {used} is of one; with updates_per_training_step above 1 iterate "
        "over them (for batch in batches: ...), or leave the option at None, which gives such code single batches"
    )


def _signals_of(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: outputs[name] for name in SIGNALS if name in outputs}
