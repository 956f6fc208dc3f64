# SPDX-License-Identifier: Apache-2.0
"""Double DQN for discrete actions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from gymnasium.spaces import Space
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from lightning_replay.agents.networks import QNetwork
from lightning_replay.agents.off_policy import OffPolicyAgent, weighted_mean
from lightning_replay.agents.spaces import discrete_sizes

__all__ = ["DQN"]


class DQN(OffPolicyAgent):
    """Double deep Q-learning: ``Q target = r + γ Q'(s', argmax Q(s', ·))``, epsilon-greedy exploration.

    ``priority_weight`` multiplies each row of the loss.
    Van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461.

    Args:
        observation_size: length of a flat observation; read from the environment if absent.
        num_actions: number of actions; read from the environment if absent.
        hidden_sizes: widths of the hidden layers.
        learning_rate: Adam's.
        discount: γ.
        target_update_rate: τ of the target network.
        exploration_start: share of random actions at the first action taken.
        exploration_end: share of random actions after ``exploration_steps``.
        exploration_steps: environment steps, random warm-up not counted, over which the share falls linearly.

    Returned by each training step:
        loss: the weighted loss.
        td_error: float32 ``[B]``, magnitude.

    Example:
        >>> agent = DQN(observation_size=4, num_actions=2)
        >>> agent.act(torch.zeros(5, 4), explore=False).shape
        torch.Size([5])
    """

    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "num_actions")

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
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self._explored_steps = 0
        self.build_if_sized()

    @classmethod
    def sizes_from(cls, observation_space: Space, action_space: Space) -> dict[str, Any]:
        """Observation length and number of actions."""
        return discrete_sizes(observation_space, action_space, cls.__name__)

    def build(self) -> None:
        """Creates the network, its target and the loss."""
        options = self.hparams
        network = QNetwork(options["observation_size"], options["num_actions"], options["hidden_sizes"])
        self.loss = DQNLoss(
            QValueActor(network, in_keys=["observation"], action_space="categorical"),
            loss_function="smooth_l1",
            delay_value=True,
            double_dqn=True,
            action_space="categorical",
            reduction="none",
            use_prioritized_weights=False,
        )
        self.loss.make_value_estimator(gamma=options["discount"])
        self._target_update = SoftUpdate(self.loss, tau=options["target_update_rate"])
        self._network = (network,)  # in a tuple: its parameters already belong to the loss

    @property
    def exploration_rate(self) -> float:
        """Share of random actions now."""
        done = min(1.0, self._explored_steps / max(1, self.hparams["exploration_steps"]))
        start, end = self.hparams["exploration_start"], self.hparams["exploration_end"]
        return start + (end - start) * done

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Actions, int64 ``[N]``: the most valuable, or random with probability ``exploration_rate``."""
        greedy = self._network[0](observation).argmax(dim=-1)
        if not explore:
            return greedy
        is_random = torch.rand(greedy.shape, device=greedy.device) < self.exploration_rate
        self._explored_steps += len(greedy)
        return torch.where(is_random, torch.randint_like(greedy, self.hparams["num_actions"]), greedy)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the network and its target."""
        optimizer, _ = self.critic_and_other_optimizers()
        rows = self.loss(batch)["loss"]
        loss = weighted_mean(rows, batch)
        optimizer.zero_grad()
        self.take_gradients(loss)
        optimizer.step()
        self._target_update.step()
        # TorchRL's "td_error", written into the batch, is the square
        return {"loss": loss.detach(), "td_error": batch["td_error"].detach().squeeze(-1).sqrt()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(list(self._network[0].parameters()), lr=self.hparams["learning_rate"], fused=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the place in the exploration schedule."""
        checkpoint["dqn_explored_steps"] = self._explored_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the place in the exploration schedule."""
        self._explored_steps = checkpoint.get("dqn_explored_steps", 0)
