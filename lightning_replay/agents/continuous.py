# SPDX-License-Identifier: Apache-2.0
"""Agents for continuous actions: TD3 with a deterministic policy, SAC with a stochastic one."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch.nn.functional import softplus
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import SACLoss, TD3Loss

from lightning_replay.agents.agent import ContinuousAgent, bootstrapped, weighted_mean
from lightning_replay.agents.networks import (
    BoundedActor,
    Layers,
    both_values,
    detached,
    layers_of,
    perceive,
    perceptron,
    two_critics,
)

_LOG_DENSITY = math.log(2 * math.pi) / 2 + 2 * math.log(2)
_RAW_SHIFT = math.log(math.expm1(0.99))


def _deviation(raw: Tensor) -> Tensor:
    """Returns standard deviations above 0.01, 1 for an output 0 of the network, as ``NormalParamExtractor``."""
    return softplus(raw + _RAW_SHIFT) + 0.01


class _ScaledTanhNormal(TanhNormal):
    """A squashed Gaussian whose density is that of the action scaled to [-1, 1], whatever the bounds."""

    def rsample_and_log_prob(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Returns actions in the environment's units, and the logarithm of their scaled density."""
        action, log_density = super().rsample_and_log_prob(sample_shape)
        return action, log_density + ((self.high - self.low) / 2).log().sum()


class SAC(ContinuousAgent):
    """Soft actor-critic: the policy maximises ``Q(s, a) - α log π(a|s)``, α keeps the entropy at its target.

    ``priority_weight`` multiplies each row of the critics' loss. Training steps return that loss and ``td_error``,
    float32 ``[B]``, the larger magnitude of the two critics'. Every update steps critics, policy, α and target
    critics, and π is the density of actions scaled to [-1, 1], as in Haarnoja et al. 2018,
    https://arxiv.org/abs/1812.05905, Algorithm 1 and appendix D.

    Args:
        observation_size: length of a flat observation; like the two bounds it is read from the environment if absent.
        action_low: smallest value of each action dimension.
        action_high: largest value of each action dimension.
        hidden_sizes: widths of the hidden layers of policy and critics.
        actor_learning_rate: Adam's, of the policy.
        critic_learning_rate: Adam's, of the critics.
        entropy_learning_rate: Adam's, of the entropy coefficient.
        initial_entropy_coefficient: α at the start.
        target_entropy: of the policy, in nats; minus the number of action dimensions if absent.
        discount: γ.
        target_update_rate: τ of the target critics, ``target += τ * (critic - target)``.
        actor_regularization: c of the term ``c / 2 * Σ w²`` in the policy's loss, over the weights of its layers
            without biases. SAC as published has none; Neighborhood Mixup Experience Replay (Sander et al. 2022) uses
            1e-4 to 2e-2 by environment, 1e-3 on HalfCheetah and 2e-3 on Ant (rmsander/interreplay, ``SAC_L2_REG``).

    Example:
        >>> agent = SAC(observation_size=3, action_low=[-2.0], action_high=[2.0])
        >>> agent.act(torch.zeros(5, 3), explore=False).shape
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
        entropy_learning_rate: float = 3e-4,
        initial_entropy_coefficient: float = 1.0,
        target_entropy: float | None = None,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        actor_regularization: float = 0.0,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates the policy, two critics, their targets and the loss."""
        options = self.hparams
        low, high = self.register_bounds()
        sizes, action_size = options["hidden_sizes"], len(low)
        network = nn.Sequential(perceptron(options["observation_size"], sizes, 2 * action_size), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=_ScaledTanhNormal,
            distribution_kwargs={"low": low, "high": high},
            return_log_prob=True,
        )
        target_entropy = options["target_entropy"]
        self.loss: Any = SACLoss(
            actor,
            two_critics(options["observation_size"], action_size, sizes),
            loss_function="l2",
            alpha_init=options["initial_entropy_coefficient"],
            target_entropy=-float(action_size) if target_entropy is None else target_entropy,
            reduction="none",
            use_prioritized_weights=False,
            scalar_output_mode="exclude",
        )
        self.loss.make_value_estimator(gamma=options["discount"])
        self.associate_targets()
        _ = self.loss.target_entropy  # TorchRL registers this buffer at the first access; a checkpoint must find it

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions in the environment's units, ``[N, A]``: drawn from the policy, or its mode."""
        mean, raw = perceive(self.actor_layers, observation).chunk(2, dim=-1)
        return self.bounded(mean + _deviation(raw) * torch.randn_like(mean) if explore else mean)

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions ``[B, A]`` of the policy and the logarithm of their density among scaled ones, ``[B]``."""
        mean, raw = perceive(self.actor_layers, observation).chunk(2, dim=-1)
        deviation, noise = _deviation(raw), torch.randn_like(mean)
        unbounded = mean + deviation * noise
        # the logarithm of the normal density less that of tanh's slope, 4 / (exp(x) + exp(-x))²
        density = -noise.square() / 2 - deviation.log() + 2 * (unbounded + softplus(-2 * unbounded)) - _LOG_DENSITY
        return self.bounded(unbounded), density.sum(-1)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns both critics' values less their target, ``[2, B]``."""
        with torch.no_grad():
            following = batch.get("next").get("observation")
            action, log_density = self.draw(following)
            values = (
                both_values(self.target_layers, following, action).amin(0) - self.loss.log_alpha.exp() * log_density
            )
            target = bootstrapped(batch, values, self.loss.value_estimator.gamma)
        return both_values(self.layers, batch.get("observation"), batch.get("action")) - target

    def actor_loss(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the policy's loss, and the logarithms of the densities of the actions drawn for it, ``[B]``."""
        observation = batch.get("observation")
        action, log_density = self.draw(observation)
        values = both_values(detached(self.layers), observation, action).min(0).values
        loss = (self.loss.log_alpha.detach().exp() * log_density - values).mean()
        if self.hparams["actor_regularization"] > 0:
            squares = torch.stack([weight.square().sum() for weight, _ in self.actor_layers])
            loss = loss + self.hparams["actor_regularization"] / 2 * squares.sum()
        return loss, log_density.detach()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics, the policy, the entropy coefficient and the target critics."""
        critic_optimizer, (actor_optimizer, entropy_optimizer) = self.critic_and_other_optimizers()
        distances = self.distances(batch)
        loss = weighted_mean(distances.square().sum(0), batch)
        self.descend(critic_optimizer, loss)
        actor_loss, log_density = self.actor_loss(batch)
        self.descend(actor_optimizer, actor_loss)
        self.descend(entropy_optimizer, -self.loss.log_alpha * (log_density + self.loss.target_entropy).mean())
        self.target_update.step()
        return {"loss": loss.detach(), "td_error": distances.detach().abs().amax(dim=0)}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam for the critics, the policy and the entropy coefficient."""
        entropy_optimizer = self.adam([self.loss.log_alpha], "entropy_learning_rate")
        return [self.critic_optimizer(), self.actor_optimizer(), entropy_optimizer]


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
