# SPDX-License-Identifier: Apache-2.0
"""Environment steps as the horizontal axis of all loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger

__all__ = ["EnvStepAxis"]


class _Clocks(Protocol):
    @property
    def clocks(self) -> tuple[int, int]: ...


class EnvStepAxis:
    """Makes loggers record ``step=env_steps_done`` and the metric ``updates``, also for other callbacks.

    Lightning logs against the number of batches, so that one file would have losses and returns in two units on one
    axis. ``{step}`` in the file names of ``ModelCheckpoint`` still counts optimizer steps, ``trainer.global_step``.

    An attribute of each logger shadows its method ``log_metrics``. The loggers themselves stay in ``trainer.loggers``,
    because callbacks test their types and ``trainer.log_dir`` is their folder.

    Args:
        source: its ``clocks`` are the environment steps and the updates done.
    """

    def __init__(self, source: _Clocks) -> None:
        self._source = source
        self._restorations = ExitStack()

    def attach(self, loggers: Sequence[Logger]) -> None:
        """Adds the clocks to every record of these loggers until :meth:`detach`."""
        self.detach()
        for logger in loggers:
            attributes = vars(logger)
            if "log_metrics" in attributes:
                self._restorations.callback(attributes.__setitem__, "log_metrics", attributes["log_metrics"])
            else:
                self._restorations.callback(attributes.pop, "log_metrics")
            attributes["log_metrics"] = partial(self._log_metrics, logger.log_metrics)

    def detach(self) -> None:
        self._restorations.close()

    def _log_metrics(self, log_metrics: Any, metrics: Mapping[str, Any], step: int | None = None) -> None:
        env_steps, updates = self._source.clocks
        log_metrics({**metrics, "updates": updates}, step=env_steps)
