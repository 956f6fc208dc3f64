# SPDX-License-Identifier: Apache-2.0
"""Common base of TD3, SAC, DQN, MP-DQN and Rainbow: one update per batch, priority feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from tensordict import TensorDictBase
from torch import Tensor

from lightning_replay.agents.feedback import UpdateBatches, UpdatePriorities
from lightning_replay.agents.foreign import training_data
from lightning_replay.agents.sized_agent import SizedAgent
from lightning_replay.replay import Replay

__all__ = ["ExploringAgent", "OffPolicyAgent", "weighted_mean"]


def weighted_mean(rows: Tensor, batch: TensorDictBase) -> Tensor:
    """Mean over the batch of each row's loss times its ``priority_weight``, where the batch has one.

    The sum is divided by B, not by the sum of the weights, which would undo their normalisation.
    """
    weight = batch.get("priority_weight", None)
    return rows.mean() if weight is None else (rows * weight.reshape(rows.shape)).mean()


class OffPolicyAgent(SizedAgent):
    """Learns from replayed batches by manual optimisation; ``global_step`` equals the updates.

    A subclass defines ``build`` (networks, loss), ``update`` (one gradient step on one batch), ``act`` and
    ``configure_optimizers`` (critic first); see :class:`~lightning_replay.agents.sized_agent.SizedAgent`.
    """

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One gradient step; returns ``loss`` and ``td_error`` ``[B]``, both detached."""
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[L.Callback]:
        """Returns the callback that passes TD errors to the replay, so that none is forgotten."""
        return [UpdatePriorities()]

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> dict[str, Tensor]:
        """One update, or one per drawn batch where the stream hands out several per step."""
        if not isinstance(batch, UpdateBatches):
            return self.update(batch)
        outputs: dict[str, Tensor] = {}
        for drawn in batch:
            outputs = self.update(drawn)
            batch.update_priority(drawn, **outputs)
        return outputs

    def on_fit_start(self) -> None:
        """Refuses a replay whose n-step returns are discounted differently."""
        data = training_data(self.trainer)
        replay = None if data is None else data.replay
        for n_steps, discount in replay.returns if isinstance(replay, Replay) else ():
            if discount != self.hparams["discount"]:
                raise ValueError(
                    f"the replay discounts its {n_steps}-step returns by {discount}, the agent by "
                    f"{self.hparams['discount']}; give both the same discount."
                )

    def critic_and_other_optimizers(self) -> tuple[LightningOptimizer, list[torch.optim.Optimizer]]:
        """The critic's, which Lightning counts as the step, and the others raw, so that it does not count them."""
        wrapped = self.optimizers()
        if not isinstance(wrapped, list):
            return wrapped, []
        return wrapped[0], list(self.optimizers(use_pl_optimizer=False)[1:])


class ExploringAgent(OffPolicyAgent):
    """Takes random actions, at first and then ever fewer; the place in their schedule is part of the checkpoint.

    A subclass has the hyperparameters ``exploration_start``, ``exploration_end`` and ``exploration_steps``.
    """

    explored_key: str  # of the checkpoint

    def __init__(self) -> None:
        super().__init__()
        self._explored_steps = 0

    @property
    def exploration_rate(self) -> float:
        """Share of random actions now."""
        done = min(1.0, self._explored_steps / max(1, self.hparams["exploration_steps"]))
        start, end = self.hparams["exploration_start"], self.hparams["exploration_end"]
        return start + (end - start) * done

    def draw_random(self, greedy: Tensor) -> Tensor:
        """Draws which of the actions ``[N]`` are replaced by random ones, bool ``[N]``, and counts the step."""
        is_random = torch.rand(greedy.shape, device=greedy.device) < self.exploration_rate
        self._explored_steps += len(greedy)
        return is_random

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the place in the exploration schedule."""
        checkpoint[self.explored_key] = self._explored_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the place in the exploration schedule."""
        self._explored_steps = checkpoint.get(self.explored_key, 0)
