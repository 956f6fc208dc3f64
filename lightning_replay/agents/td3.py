# SPDX-License-Identifier: Apache-2.0
"""TD3: a deterministic policy, two critics, delayed policy updates."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives import TD3Loss

from lightning_replay.agents.networks import BoundedActor, two_critics
from lightning_replay.agents.off_policy import ContinuousAgent, bootstrapped, weighted_mean
from lightning_replay.agents.perceptrons import Layers, both_values, detached, layers_of, perceive


class TD3(ContinuousAgent):
    """Twin delayed deterministic policy gradient: ``Q target = r + γ min(Q1', Q2')(s', π'(s') + clipped noise)``.

    Noise is measured in half action ranges. ``priority_weight`` multiplies each row of the critics' loss. Training
    steps return that loss and ``td_error``, float32 ``[B]``, the larger magnitude of the two critics'.
    Algorithm 1 of Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477: every update steps the critics, every
    ``policy_delay``-th also the policy and then all targets. RLlib's former TD3, with which Neighborhood Mixup
    Experience Replay was published, updates the targets every time; ``target_update_rate=0.01`` with
    ``policy_delay=2`` moves them as far over two updates.

    Args:
        observation_size: length of a flat observation; like the two bounds it is read from the environment if absent.
        action_low: smallest value of each action dimension.
        action_high: largest value of each action dimension.
        hidden_sizes: widths of the hidden layers of policy and critics.
        actor_learning_rate: Adam's, of the policy.
        critic_learning_rate: Adam's, of the critics.
        discount: γ.
        target_update_rate: τ, ``target += τ * (network - target)`` with each policy update.
        policy_delay: critic updates per policy update.
        target_noise: standard deviation of the noise on the target policy's actions.
        target_noise_clip: its largest magnitude.
        exploration_noise: standard deviation of the noise on the actions taken.

    Example:
        >>> agent = TD3(observation_size=3, action_low=[-2.0], action_high=[2.0])
        >>> agent.act(torch.zeros(5, 3), explore=True).shape
        torch.Size([5, 1])
    """

    takes_update_batches = True

    def __init__(
        self,
        observation_size: int | None = None,
        action_low: list[float] | None = None,
        action_high: list[float] | None = None,
        hidden_sizes: tuple[int, ...] = (256, 256),
        actor_learning_rate: float = 3e-4,
        critic_learning_rate: float = 3e-4,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        exploration_noise: float = 0.1,
    ) -> None:
        super().__init__()
        self._updates = 0
        self.set_up(locals())

    def build(self) -> None:
        """Creates the policy, two critics, their targets and the loss."""
        options = self.hparams
        # buffers of the agent's own: the loss moves copies of the network's to another device, not the network's
        low, high = self.register_bounds()
        actor = BoundedActor(options["observation_size"], low, high, options["hidden_sizes"])
        self.loss: Any = TD3Loss(
            TensorDictModule(actor, in_keys=["observation"], out_keys=["action"]),
            two_critics(options["observation_size"], len(low), options["hidden_sizes"]),
            bounds=(low, high),
            loss_function="l2",
            reduction="none",
            use_prioritized_weights=False,
        )
        del self.loss.policy_noise, self.loss.noise_clip
        self.loss.register_buffer("policy_noise", options["target_noise"] * actor.half_range, persistent=False)
        self.loss.register_buffer("noise_clip", options["target_noise_clip"] * actor.half_range, persistent=False)
        self.loss.make_value_estimator(gamma=options["discount"])
        self.associate_targets()

    @cached_property
    def target_actor_layers(self) -> Layers:
        """Of the target policy."""
        return layers_of(self.loss.target_actor_network_params)

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions in the environment's units, ``[N, A]``, with noise if ``explore``."""
        action = torch.tanh(perceive(self.actor_layers, observation))
        if explore:
            noise = self.hparams["exploration_noise"] * torch.randn_like(action)
            action = torch.clamp(action + noise, -1.0, 1.0)
        return self.action_center + self.action_half_range * action

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns both critics' values less their target, ``[2, B]``."""
        loss, action = self.loss, batch.get("action")
        with torch.no_grad():
            clip, following = loss.noise_clip, batch.get("next").get("observation")
            noise = torch.clamp(torch.randn_like(action) * loss.policy_noise, -clip, clip)
            chosen = self.bounded(perceive(self.target_actor_layers, following)) + noise
            chosen = torch.clamp(chosen, loss.min_action, loss.max_action)
            values = both_values(self.target_layers, following, chosen).amin(0)
            target = bootstrapped(batch, values, loss.value_estimator.gamma)
        return both_values(self.layers, batch.get("observation"), action) - target

    def actor_loss(self, batch: TensorDictBase) -> Tensor:
        """Returns minus the first critic's mean value of the policy's actions."""
        observation = batch.get("observation")
        action = self.bounded(perceive(self.actor_layers, observation))
        return -perceive(detached(self.layers, 0), torch.cat([observation, action], dim=-1)).mean()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics, and every ``policy_delay`` updates the policy and the targets."""
        critic_optimizer, (actor_optimizer,) = self.critic_and_other_optimizers()
        distances = self.distances(batch)
        loss = weighted_mean(distances.square().sum(0), batch)
        self.descend(critic_optimizer, loss)
        self._updates += 1
        if self._updates % self.hparams["policy_delay"] == 0:
            self.descend(actor_optimizer, self.actor_loss(batch))
            self.target_update.step()
        return {"loss": loss.detach(), "td_error": distances.detach().abs().amax(dim=0)}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam for the critics, then for the policy."""
        return [self.critic_optimizer(), self.actor_optimizer()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the number of updates, for the policy delay."""
        checkpoint["td3_updates"] = self._updates

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the number of updates."""
        self._updates = checkpoint.get("td3_updates", 0)
