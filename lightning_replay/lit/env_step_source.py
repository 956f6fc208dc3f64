# SPDX-License-Identifier: Apache-2.0
"""What callbacks ask of a data module that steps environments, whether it replays transitions or levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import gymnasium
import lightning as L

from lightning_replay.lit.rollout import Episode

__all__ = ["EnvStepSource", "source_of"]


class _Pace(Protocol):
    env_steps: int


class _Collection(Protocol):
    @property
    def episodes(self) -> Sequence[Episode]: ...

    @property
    def recent_return(self) -> float: ...


@runtime_checkable
class EnvStepSource(Protocol):
    """A data module with a clock of environment steps: ``ReplayDataModule``, ``LevelDataModule``.

    Attributes:
        pace: whose ``env_steps`` are those of the whole run.
        collection: finished episodes and their recent return.
        updates_done: batches or rollouts handed to the agent.
    """

    pace: _Pace
    collection: _Collection
    updates_done: int

    @property
    def env_steps_done(self) -> int:
        """Environment steps collected."""

    @property
    def is_finished(self) -> bool:
        """Whether the run is at its end."""

    def make_environment(self) -> gymnasium.Env:
        """One more environment, for evaluation."""


def source_of(trainer: L.Trainer, callback: L.Callback) -> EnvStepSource:
    """The trainer's data module.

    Raises:
        TypeError: it counts no environment steps.
    """
    source = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(source, EnvStepSource):
        raise TypeError(
            f"{type(callback).__name__} counts environment steps, which {type(source).__name__} does not; fit with a "
            "ReplayDataModule or a LevelDataModule."
        )
    return source
