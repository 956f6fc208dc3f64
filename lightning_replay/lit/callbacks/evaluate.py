# SPDX-License-Identifier: Apache-2.0
"""Evaluates the agent during training, on a clock of environment steps."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch

from lightning_replay.lit.callbacks.progress import ReplayProgressBar
from lightning_replay.lit.datamodules.env_steps import source_of
from lightning_replay.lit.evaluation import episode_returns
from lightning_replay.validation import checked_count

__all__ = ["Evaluate"]


class Evaluate(L.Callback):
    """Every ``every_n_env_steps`` plays episodes without exploration in an environment of its own.

    Their mean is ``trainer.callback_metrics["eval/return"]`` from before the first update on, so that
    ``ReplayCheckpoint``, ``EarlyStopping`` and Tune find it; loggers get it against
    environment steps. It is evaluated at the start and with the last update too. All evaluations of a run start from
    the same seeds, and none touches the training's random numbers.

    Args:
        every_n_env_steps: training steps between evaluations.
        episodes: episodes per evaluation.
        seed: of the first episode; the others count on from it.
    """

    def __init__(self, every_n_env_steps: int = 5_000, episodes: int = 5, seed: int = 10_000) -> None:
        self.every_n_env_steps = checked_count("every_n_env_steps", every_n_env_steps)
        self.episodes = checked_count("episodes", episodes)
        self.seed = checked_count("seed", seed, 0)
        self.history: list[tuple[int, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates the untrained agent, or publishes the last evaluation again after a resume."""
        if self.history and self.history[-1][0] <= source_of(trainer, self).env_steps_done > 0:
            self._publish(trainer)
        else:
            self.history.clear()
            self._evaluate(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluates when due."""
        source = source_of(trainer, self)
        last = self.history[-1][0]
        is_due = source.env_steps_done // self.every_n_env_steps > last // self.every_n_env_steps
        if is_due or (source.is_finished and source.env_steps_done > last):
            self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
        source = source_of(trainer, self)
        environment = source.make_environment()
        bar = trainer.progress_bar_callback
        returns: list[float] = []
        for episode_return in episode_returns(agent, environment, self.episodes, self.seed):
            returns.append(episode_return)
            if isinstance(bar, ReplayProgressBar):  # games may be long
                bar.describe(
                    "" if len(returns) == self.episodes else f"evaluating, {len(returns)} of {self.episodes} played"
                )
        environment.close()
        self.history.append((source.env_steps_done, float(np.mean(returns))))
        self._publish(trainer)
        for logger in trainer.loggers:
            logger.log_metrics({"eval/return": self.history[-1][1]})

    def _publish(self, trainer: L.Trainer) -> None:
        trainer.callback_metrics["eval/return"] = torch.tensor(self.history[-1][1])

    def state_dict(self) -> dict[str, Any]:
        """The evaluations so far."""
        return {"history": [list(point) for point in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the evaluations."""
        self.history = [(int(steps), float(value)) for steps, value in state_dict["history"]]
