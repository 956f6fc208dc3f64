# SPDX-License-Identifier: Apache-2.0
"""Returns on held-out levels and on those trained on, and the gap between them."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_replay.lit.callbacks.evaluate import Evaluate
from lightning_replay.lit.datamodules.levels import level_source_of

__all__ = ["GeneralizationGap"]


class GeneralizationGap(Evaluate):
    """Every ``every_n_env_steps`` plays one episode on each held-out level and on as many levels trained on.

    This is the test protocol of Prioritized Level Replay: the policy acts as in training, exploration included, and
    rewards are those of the environment. ``trainer.callback_metrics`` has ``eval/return``, the mean on the data
    module's ``held_out_levels``; ``eval/train_return``, that on levels drawn from those played so far; and
    ``eval/generalization_gap``, the second minus the first. The last two exist once levels have been played. Loggers
    get them against environment steps. It plays at the start and after the last update too; training goes on as if
    nothing had been played.

    Args:
        every_n_env_steps: training steps between evaluations.
        seed: of the actions, of the levels drawn and of the environments' own randomness.
    """

    def __init__(self, every_n_env_steps: int = 50_000, seed: int = 10_000) -> None:
        super().__init__(every_n_env_steps, seed=seed)
        self.training_history: list[tuple[int, float]] = []

    @property
    def gap(self) -> float | None:
        """Return on levels trained on minus that on held-out ones, of the last evaluation that had both."""
        held_out = dict(self.history)
        if not self.training_history or self.training_history[-1][0] not in held_out:
            return None
        steps, trained = self.training_history[-1]
        return trained - held_out[steps]

    def _evaluate(self, trainer: L.Trainer, agent: L.LightningModule) -> None:
        source = level_source_of(trainer, self)
        if not self.history:
            self.training_history.clear()
        played = source.collection.played_levels
        both = set(source.held_out_levels) & set(played)
        held_out = [level_id for level_id in source.held_out_levels if level_id not in both]
        if not held_out:
            raise ValueError("all held_out_levels have been trained on; give levels that are not among the buffer's.")
        if both:
            rank_zero_warn(
                f"{len(both)} of held_out_levels have been trained on meanwhile; they are left out from now."
            )
        trained_on = np.random.default_rng(self.seed).permutation(played)[: len(source.held_out_levels)].tolist()
        for history, level_ids in ((self.history, held_out), (self.training_history, trained_on)):
            if level_ids:
                history.append((source.env_steps_done, float(source.returns_on(level_ids, agent, self.seed).mean())))
        self._publish(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(self._metrics())

    def _metrics(self) -> dict[str, float]:
        metrics = {"eval/return": self.history[-1][1]}
        if self.gap is not None:
            metrics |= {"eval/train_return": self.training_history[-1][1], "eval/generalization_gap": self.gap}
        return metrics

    def _publish(self, trainer: L.Trainer) -> None:
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._metrics().items()})

    def state_dict(self) -> dict[str, Any]:
        """The evaluations so far."""
        return super().state_dict() | {"training_history": [list(point) for point in self.training_history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the evaluations."""
        super().load_state_dict(state_dict)
        self.training_history = [(int(steps), float(value)) for steps, value in state_dict["training_history"]]
