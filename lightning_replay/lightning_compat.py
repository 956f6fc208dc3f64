# SPDX-License-Identifier: Apache-2.0
"""Names of Lightning that a release may move: private names, counts of progress, and parts of its loops.

The names were read in Lightning 2.6. Each row has a test in ``tests/unit/lit/test_gates.py``.

=======================================================  ==========================================
name                                                     used in
=======================================================  ==========================================
``ModelCheckpoint._every_n_train_steps``                 :func:`saves_at_steps`
``ModelCheckpoint._save_topk_checkpoint``                :func:`save_best`
``ModelCheckpoint._save_last_checkpoint``                :func:`save_last`
``ModelCheckpoint._monitor_candidates``                  both
``ModelCheckpoint._save_checkpoint``                     overridden in ``lit/checkpoints.py``
``ModelCheckpoint._find_last_checkpoints``               overridden in ``lit/checkpoints.py``
``LightningCLI._parse_ckpt_path``                        overridden in ``lit/cli.py``
``Trainer._accelerator_connector``                       :func:`requeue_signal`
``signal_connector._HandlersCompose``                    :func:`requeue_signal`
``LightningModule._trainer``                             :func:`attached_trainer`
``epoch_loop.manual_optimization.optim_step_progress``   :func:`optimizer_steps`
``epoch_loop.batch_progress.current``                    :func:`training_steps`
``epoch_loop.batch_progress.is_last_batch``              :func:`end_epoch`
``epoch_loop._batches_that_stepped``                     :func:`logged_step`
``fit_loop.total_batch_idx``                             :func:`batches_begun`
``checkpoint["loops"]["fit_loop"]``                      :func:`remove_open_step`
``Trainer.limit_val_batches`` and two intervals          :func:`replace_options`
=======================================================  ==========================================
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.progress import _ProcessedTracker, _Progress
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

#: Options of a trainer without Lightning's own validation. Callbacks wait for it if its interval is not the default.
NO_VALIDATION: Mapping[str, Any] = {"limit_val_batches": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}


def attached_trainer(module: L.LightningModule) -> L.Trainer | None:
    """Returns the trainer of a module. The public property raises an error if there is none."""
    return module._trainer


def saves_at_steps(callback: ModelCheckpoint) -> bool:
    """Returns whether a callback saves after a number of training steps, not only at the ends of epochs."""
    return bool(callback._every_n_train_steps)


def save_best(callback: ModelCheckpoint, trainer: L.Trainer) -> None:
    """Saves a checkpoint that belongs to the best ones, and removes the worst of them if there are too many."""
    callback._save_topk_checkpoint(trainer, callback._monitor_candidates(trainer))


def save_last(callback: ModelCheckpoint, trainer: L.Trainer) -> None:
    """Replaces the last checkpoint."""
    callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))


def requeue_signal(trainer: L.Trainer) -> int | None:
    """Returns the signal at which Lightning saves and requeues a SLURM job, or ``None`` if it handles none."""
    cluster = trainer._accelerator_connector.cluster_environment
    if not isinstance(cluster, SLURMEnvironment) or not cluster.auto_requeue or cluster.requeue_signal is None:
        return None
    # Lightning keeps a handler that the user installed. Then it does not requeue the job.
    is_handled = isinstance(signal.getsignal(cluster.requeue_signal), _HandlersCompose)
    return cluster.requeue_signal if is_handled else None


def optimizer_steps(trainer: L.Trainer) -> _Progress:
    """Returns the counts of optimizer steps in manual optimization, from which ``trainer.global_step`` is computed."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


def training_steps(trainer: L.Trainer) -> _ProcessedTracker:
    """Returns the counts of the epoch's training steps that began, were computed, and are completed."""
    steps = trainer.fit_loop.epoch_loop.batch_progress.current
    assert isinstance(steps, _ProcessedTracker)
    return steps


def end_epoch(trainer: L.Trainer) -> None:
    """Lets the present training step be the last one of its epoch."""
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def logged_step(trainer: L.Trainer) -> int:
    """Returns the step at which Lightning's own ``log`` writes the values of the present training step."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def batches_begun(trainer: L.Trainer) -> int:
    """Returns the number of training steps that began, over all epochs."""
    return trainer.fit_loop.total_batch_idx + 1


def remove_open_step(checkpoint: Mapping[str, Any]) -> None:
    """Removes a training step that began, but was not completed, from the counts of a checkpoint."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(counts, counts["completed"]))
    progress["is_last_batch"] = False


def replace_options(trainer: L.Trainer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Sets options of a trainer after its construction and returns their previous values."""
    previous = {name: getattr(trainer, name) for name in options}
    vars(trainer).update(options)
    return previous
