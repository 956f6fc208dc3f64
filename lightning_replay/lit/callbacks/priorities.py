# SPDX-License-Identifier: Apache-2.0
"""Feeds the TD errors of each training step back to the replay."""

from __future__ import annotations

from typing import Any

import lightning as L
from tensordict import TensorDictBase

from lightning_replay.lit.datamodules.stream import signals_of

__all__ = ["UpdatePriorities"]


class UpdatePriorities(L.Callback):
    """After each training step calls ``replay.update_priority`` with the step's ``td_error`` and other signals.

    Return it from ``configure_callbacks`` of a LightningModule whose ``training_step`` returns ``{"td_error": ...}``,
    detached, ``[B]``, and, where it has them, ``surprise`` ``[B]``, ``action_values`` ``[B, A]`` and ``action``
    ``[B]``, which a replay that keeps transitions by their priority learns from. What a replay does not use it ignores.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the rows of this batch."""
        source: Any = getattr(trainer, "datamodule", None)
        if not isinstance(batch, TensorDictBase) or not hasattr(source, "update_priority"):
            return
        if not isinstance(outputs, dict) or "td_error" not in outputs:
            raise KeyError(
                f"training_step of {type(pl_module).__name__} returned no 'td_error'; return "
                "{'loss': ..., 'td_error': detached TD errors [B]} so that the priorities can be updated."
            )
        source.update_priority(batch, outputs["td_error"], **signals_of(outputs))
