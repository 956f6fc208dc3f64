# SPDX-License-Identifier: Apache-2.0
"""Double DQN for discrete actions."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from lightning_replay.agents.cagrad import ConflictAverseStep
from lightning_replay.agents.networks import QNetwork
from lightning_replay.agents.off_policy import (
    Columns,
    ExploringAgent,
    bootstrapped,
    plain_columns,
    weighted_mean,
)
from lightning_replay.agents.perceptrons import (
    Layers,
    activations_of,
    can_set_gradients,
    layers_of,
    perceive,
    perceptron_layers,
    set_gradients,
    tensors_of,
)
from lightning_replay.agents.spaces import SizeReader, discrete_sizes
from lightning_replay.agents.value_losses import ScalarValueLoss
from lightning_replay.schedules import Constant, Linear, Schedule

# Checkpoints hold the hyperparameters, and torch.load reads only classes that are registered as safe.
torch.serialization.add_safe_globals([Constant, Linear])


class DQN(ExploringAgent):
    """Double deep Q-learning: ``Q target = r + γ Q'(s', argmax Q(s', ·))``, epsilon-greedy exploration.

    ``priority_weight`` multiplies each row of the loss, which is smooth L1; training steps return the loss and
    ``td_error``, float32 ``[B]``, magnitude. Van Hasselt et al. 2016,
    https://arxiv.org/abs/1509.06461, but the target network moves with every update, as in Lillicrap et al. 2016,
    https://arxiv.org/abs/1509.02971.

    Args:
        observation_size: length of a flat observation; read from the environment if absent.
        num_actions: number of actions; read from the environment if absent.
        hidden_sizes: widths of the hidden layers.
        learning_rate: Adam's.
        discount: γ.
        target_update_rate: τ, ``target += τ * (network - target)`` with every update.
        exploration_start: share of random actions at the first action taken.
        exploration_end: share of random actions after ``exploration_steps``.
        exploration_steps: environment steps, random warm-up not counted, over which the share falls linearly.
        conflict_aversion: c of :class:`~lightning_replay.agents.cagrad.ConflictAverseStep` between the tables of a
            batch (its column ``table``), a number or a schedule of updates; the number 0 uses the plain gradient.

    Example:
        >>> agent = DQN(observation_size=4, num_actions=2)
        >>> agent.act(torch.zeros(5, 4), explore=False).shape
        torch.Size([5])
    """

    takes_update_batches = True
    explored_key = "dqn_explored_steps"
    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "num_actions")
    read_sizes: ClassVar[SizeReader] = staticmethod(discrete_sizes)

    def __init__(
        self,
        observation_size: int | None = None,
        num_actions: int | None = None,
        hidden_sizes: tuple[int, ...] = (128, 128),
        learning_rate: float = 5e-4,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        exploration_start: float = 1.0,
        exploration_end: float = 0.05,
        exploration_steps: int = 5_000,
        conflict_aversion: float | Schedule = 0.0,
    ) -> None:
        super().__init__()
        self._averse_step: ConflictAverseStep | None = None
        self._conflict_aversion = conflict_aversion  # with a command line, hparams hold its class path instead
        self.set_up(locals())

    def build(self) -> None:
        """Creates the network, its target and the loss."""
        options = self.hparams
        network = QNetwork(options["observation_size"], options["num_actions"], options["hidden_sizes"])
        self.loss: Any = ScalarValueLoss(network, discount=options["discount"])
        self.associate_targets()
        if self._conflict_aversion != 0:
            self._averse_step = ConflictAverseStep(tensors_of(self.layers), self._conflict_aversion)

    @cached_property
    def layers(self) -> Layers:
        """Of the network."""
        return perceptron_layers(self.loss, "value_network")

    @cached_property
    def target_layers(self) -> Layers:
        """Of the target network."""
        return layers_of(self.loss.target_value_network_params)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives a copy's conflict-averse step the copy's parameters."""
        super().__setstate__(state)
        if self._averse_step is not None:
            position = self._averse_step.state_dict()
            self._averse_step = ConflictAverseStep(tensors_of(self.layers), self._conflict_aversion)
            self._averse_step.load_state_dict(position)

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions, int64 ``[N]``: the most valuable, or random with probability ``exploration_rate``."""
        greedy = perceive(self.layers, observation).argmax(dim=-1)
        return self.with_random(greedy) if explore else greedy

    def losses(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the loss and the magnitude of the TD error of each row, ``[B]``."""
        columns = plain_columns(batch)
        taken, target = self._taken_and_target(columns)
        current = perceive(self.layers, columns["observation"]).gather(-1, taken).squeeze(-1)
        return smooth_l1_loss(current, target, reduction="none"), (target - current.detach()).abs()

    @torch.no_grad()
    def _taken_and_target(self, batch: Columns) -> tuple[Tensor, Tensor]:
        following = batch["next"]["observation"]
        best = perceive(self.layers, following).argmax(dim=-1, keepdim=True)
        values = perceive(self.target_layers, following).gather(-1, best).squeeze(-1)
        target = bootstrapped(batch, values, self.loss.value_estimator.gamma)
        return batch["action"].reshape(best.shape), target

    @torch.no_grad()
    def _differentiate(self, batch: Columns) -> tuple[Tensor, Tensor]:
        """Sets the gradients of the weighted mean of :meth:`losses`, in two thirds of the time of autograd's graph.

        Returns:
            The loss, and the magnitude of the TD error of each row ``[B]``.
        """
        taken, target = self._taken_and_target(batch)
        *inputs, values = activations_of(self.layers, batch["observation"])
        current = values.gather(-1, taken).squeeze(-1)
        loss = weighted_mean(smooth_l1_loss(current, target, reduction="none"), batch)
        difference, weight = current - target, batch.get("priority_weight", None)
        share = 1.0 / len(values)
        slope = difference.clamp(-1.0, 1.0).mul_(share if weight is None else weight.reshape(-1) * share)
        set_gradients(self.layers, inputs, torch.zeros_like(values).scatter_(-1, taken, slope.unsqueeze(-1)))
        return loss, difference.abs_()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the network and its target."""
        optimizer, _ = self.critic_and_other_optimizers()
        if self._sets_gradients(batch):
            loss, td_error = self._differentiate(plain_columns(batch))
            self.take_step(optimizer)
        else:
            rows, td_error = self.losses(batch)
            if self._averse_step is None:
                loss = weighted_mean(rows, batch)
                self.descend(optimizer, loss)
            else:
                loss = self._averse_step.backward(*_weighted_parts(rows, batch))
                self.take_step(optimizer)
        self.target_update.step()
        return {"loss": loss.detach(), "td_error": td_error}

    def _sets_gradients(self, batch: TensorDictBase) -> bool:
        """Returns whether :meth:`losses` and ``descend`` are those of this class, and nothing acts on gradients."""
        kind = type(self)
        return (
            self._averse_step is None
            and batch.ndim == 1
            and kind.losses is DQN.losses
            and kind.descend is DQN.descend
            and kind.take_gradients is DQN.take_gradients
            and vars(self).keys().isdisjoint(("losses", "descend", "take_gradients"))
            and self.takes_plain_gradients
            and can_set_gradients(self.layers)
        )

    def on_fit_start(self) -> None:
        """Refuses conflict aversion where the trainer scales gradients or syncs them between devices."""
        super().on_fit_start()
        if self._averse_step is not None and not self.takes_plain_gradients:
            raise ValueError(
                f"conflict_aversion is {self.hparams['conflict_aversion']!r}, which needs one device and 32-bit "
                "precision. Use Trainer(devices=1, precision=32), or conflict_aversion=0.0."
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam."""
        return self.adam(tensors_of(self.layers))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the positions in the schedules of exploration and conflict aversion."""
        super().on_save_checkpoint(checkpoint)
        if self._averse_step is not None:
            checkpoint["dqn_conflict_aversion"] = self._averse_step.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores both positions."""
        super().on_load_checkpoint(checkpoint)
        if self._averse_step is not None and "dqn_conflict_aversion" in checkpoint:
            self._averse_step.load_state_dict(checkpoint["dqn_conflict_aversion"])


def _weighted_parts(rows: Tensor, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Returns the weighted loss of each row, and the table it was drawn from."""
    table, weight = batch.get("table", None), batch.get("priority_weight", None)
    if table is None:
        raise ValueError(
            'the batch has no column "table", which conflict_aversion splits it by; draw from event tables '
            "(recipes.event_tables), or set conflict_aversion=0.0."
        )
    return rows if weight is None else rows * weight.reshape(rows.shape), table
