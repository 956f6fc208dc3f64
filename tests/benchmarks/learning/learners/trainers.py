# SPDX-License-Identifier: Apache-2.0
"""A Lightning trainer without output, for experiments that train through the library's data module."""

from __future__ import annotations

import logging

import lightning as L


def quiet_lightning() -> None:
    """Silences Lightning's messages about hardware and the end of training."""
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_trainer(callback: L.Callback) -> L.Trainer:
    """Returns a trainer on the CPU that the data module stops, with this callback and without files."""
    quiet_lightning()
    return L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
