# SPDX-License-Identifier: Apache-2.0
"""Agents for continuous actions: TD3 with a deterministic policy, SAC with a stochastic one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_replay.agents.agent import OffPolicyAgent, TargetUpdate, bootstrapped, target_of
from lightning_replay.agents.networks import Perceptron, TwoCritics
from lightning_replay.agents.spaces import SizeReader, continuous_sizes
from lightning_replay.schedules import Schedule

_LOG_DENSITY = math.log(2 * math.pi) / 2 + 2 * math.log(2)
_RAW_SHIFT = math.log(math.expm1(0.99))


def _deviation(raw: Tensor) -> Tensor:
    # The deviation is above 0.01. It is 1 for an output 0 of the network, as in TorchRL's NormalParamExtractor.
    return softplus(raw + _RAW_SHIFT) + 0.01


class ContinuousAgent(OffPolicyAgent):
    """Base of agents with continuous actions: bounds, ``actor``, two ``critics`` and their targets.

    Where observations have images, policy and critics share their encoder. The critics' loss alone trains it: the
    policy gets its features without gradients, and the targets those of a target encoder, which moves as the target
    critics do (Yarats et al. 2021, https://arxiv.org/abs/1910.01741, section 5; also DrQ,
    https://arxiv.org/abs/2004.13649).
    """

    size_names: ClassVar[tuple[str, ...]] = ("observation_size", "action_low", "action_high")
    read_sizes: ClassVar[SizeReader] = staticmethod(continuous_sizes)
    outputs_per_action = 1  #: Outputs of the policy's network for each action dimension.
    action_low: Tensor
    action_high: Tensor
    action_center: Tensor
    action_half_range: Tensor

    def build(self) -> None:
        """Creates bounds, policy, critics, and target critics."""
        options = self.hparams
        low = torch.tensor(options["action_low"])
        high = torch.tensor(options["action_high"])
        bounds = {"low": low, "high": high, "center": (high + low) / 2, "half_range": (high - low) / 2}
        for name, bound in bounds.items():
            self.register_buffer(f"action_{name}", bound, persistent=False)
        self.num_features: int = self.build_encoder()
        outputs = self.outputs_per_action * len(low)
        self.actor: Perceptron = Perceptron(self.num_features, options["hidden_sizes"], outputs)
        self.critics: TwoCritics = TwoCritics(self.num_features, len(low), options["hidden_sizes"])
        self.target_critics: TwoCritics = target_of(self.critics)
        self.avert_conflicts(self._critic_parameters())

    def bounded(self, outputs: Tensor) -> Tensor:
        """Returns actions within the bounds, from real numbers ``[..., A]``."""
        return torch.tanh(outputs) * self.action_half_range + self.action_center

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns both critics' values less their target, ``[2, B]``."""
        raise NotImplementedError

    def critic_rows(self, distances: Tensor, batch: TensorDictBase) -> Tensor:
        """Returns the loss of each row and critic, ``[2, B]``."""
        return distances.square()

    def update_critics(self, optimizer: Any, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics. Returns ``loss`` and ``td_error`` ``[B]``, both detached."""
        distances = self.distances(batch)
        loss = self.descend_rows(optimizer, self.critic_rows(distances, batch).sum(0), batch)
        return {"loss": loss, "td_error": distances.detach().abs().amax(dim=0)}

    def _critic_parameters(self) -> list[Tensor]:
        return [*self.critics.parameters(), *self.observation_encoder.parameters()]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam of the critics, then of the policy."""
        return [
            self.adam(self._critic_parameters(), "critic_learning_rate"),
            self.adam(self.actor.parameters(), "actor_learning_rate"),
        ]


class SAC(ContinuousAgent):
    """Soft actor-critic: the policy maximises ``Q(s, a) - α log π(a|s)``, α keeps the entropy at its target.

    ``priority_weight`` multiplies each row of the critics' loss. Training steps return that loss and ``td_error``,
    float32 ``[B]``, the larger magnitude of the two critics'. Every update steps critics, policy, α and target
    critics, and π is the density of actions scaled to [-1, 1], as in Haarnoja et al. 2018,
    https://arxiv.org/abs/1812.05905, Algorithm 1 and appendix D. Images: see
    :class:`~lightning_replay.agents.continuous.ContinuousAgent`.

    Args:
        observation_size: as of :class:`~lightning_replay.agents.DQN`; read from the environment, as the two bounds.
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
        gradient_norm: largest norm of the gradient of each optimizer, 40 on Hopper there; ``None`` does not clip.
        conflict_aversion: of the critics' loss between the tables of a batch, as of
            :class:`~lightning_replay.agents.DQN`.

    Example:
        >>> agent = SAC(observation_size=3, action_low=[-2.0], action_high=[2.0])
        >>> agent.act(torch.zeros(5, 3), explore=False).shape
        torch.Size([5, 1])
    """

    takes_update_batches = True
    outputs_per_action = 2
    backs_up_entropy: ClassVar[bool] = True  # The critics' targets count the entropy of the next action.

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
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
        gradient_norm: float | None = None,
        conflict_aversion: float | Schedule = 0.0,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates also the entropy coefficient and the update of the target critics."""
        super().build()
        coefficient = torch.tensor(self.hparams["initial_entropy_coefficient"])
        self.log_alpha: nn.Parameter = nn.Parameter(coefficient.log())
        given = self.hparams["target_entropy"]
        self.target_entropy: float = -float(len(self.action_low)) if given is None else given
        self.target_update: TargetUpdate = self.target_update_of((self.critics, self.target_critics))

    def act(self, observation: Tensor | TensorDictBase, explore: bool) -> Tensor:
        """Returns actions in the environment's units, ``[N, A]``: drawn from the policy, or its mode."""
        mean, raw = self.actor(self.features_of(observation)).chunk(2, dim=-1)
        return self.bounded(mean + _deviation(raw) * torch.randn_like(mean) if explore else mean)

    def draw(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns actions ``[B, A]`` of the policy and the logarithm of their density among scaled ones, ``[B]``."""
        mean, raw = self.actor(features).chunk(2, dim=-1)
        deviation = _deviation(raw)
        noise = torch.randn_like(mean)
        unbounded = mean + deviation * noise
        # The logarithm of the normal density, less the logarithm of tanh's slope 4 / (exp(x) + exp(-x))²
        density = -noise.square() / 2 - deviation.log() + 2 * (unbounded + softplus(-2 * unbounded)) - _LOG_DENSITY
        return self.bounded(unbounded), density.sum(-1)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns both critics' values less the soft value of the next state, ``[2, B]``."""
        with torch.no_grad():
            following = batch.get("next").get("observation")
            action, log_density = self.draw(self.features_of(following))
            # The larger of two estimates is more often too large.
            values = self.target_critics.values(self.features_of(following, target=True), action).amin(0)
            if self.backs_up_entropy:
                values -= self.log_alpha.exp() * log_density
            target = bootstrapped(batch, values, self.hparams["discount"])
        return self.critics.values(self.features_of(batch.get("observation")), batch.get("action")) - target

    def actor_loss(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the policy's loss and the logarithms of the densities of its actions, ``[B]``. :meta private:"""
        features = self.features_of(batch.get("observation")).detach()
        action, log_density = self.draw(features)
        values = self.critics.values(features, action, frozen=True).min(0).values
        loss = (self.log_alpha.detach().exp() * log_density - values).mean()
        if self.hparams["actor_regularization"] > 0:
            squares = torch.stack([weight.square().sum() for weight in self.actor.parameters() if weight.ndim == 2])
            loss = loss + self.hparams["actor_regularization"] / 2 * squares.sum()
        return loss, log_density.detach()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics, the policy, the entropy coefficient, and the target critics."""
        critic_optimizer, (actor_optimizer, entropy_optimizer) = self.critic_and_other_optimizers()
        outputs = self.update_critics(critic_optimizer, batch)
        actor_loss, log_density = self.actor_loss(batch)
        self.descend(actor_optimizer, actor_loss)
        self.descend(entropy_optimizer, -self.log_alpha * (log_density + self.target_entropy).mean())
        self.target_update.step()
        return outputs

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam of the critics, of the policy, and of the entropy coefficient."""
        return [*super().configure_optimizers(), self.adam([self.log_alpha], "entropy_learning_rate")]


class TD3(ContinuousAgent):
    """Twin delayed deterministic policy gradient: ``Q target = r + γ min(Q1', Q2')(s', π'(s') + clipped noise)``.

    Noise is measured in half action ranges. Weights, images and what training steps return are as of :class:`SAC`.
    Algorithm 1 of Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477: every update steps the critics, every
    ``policy_delay``-th also the policy and then all targets. RLlib's former TD3, with which Neighborhood Mixup
    Experience Replay was published, updates the targets every time; ``target_update_rate=0.01`` with
    ``policy_delay=2`` moves them as far over two updates.

    Args:
        target_update_rate: τ, ``target += τ * (network - target)`` with each policy update.
        policy_delay: critic updates per policy update.
        target_noise: standard deviation of the noise on the target policy's actions.
        target_noise_clip: its largest magnitude.
        exploration_noise: standard deviation of the noise on the actions taken.

    The other arguments are those of :class:`SAC`.

    Example:
        >>> agent = TD3(observation_size=3, action_low=[-2.0], action_high=[2.0])
        >>> agent.act(torch.zeros(5, 3), explore=True).shape
        torch.Size([5, 1])
    """

    takes_update_batches = True
    counters: ClassVar[dict[str, str]] = {"td3_updates": "_updates"}  #: The policy delay counts updates.

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
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
        gradient_norm: float | None = None,
        conflict_aversion: float | Schedule = 0.0,
    ) -> None:
        super().__init__()
        self._updates = 0
        self.set_up(locals())

    def build(self) -> None:
        """Creates also the target policy and the update of all targets."""
        super().build()
        self.target_actor: Perceptron = target_of(self.actor)
        pairs = (self.actor, self.target_actor), (self.critics, self.target_critics)
        self.target_update: TargetUpdate = self.target_update_of(*pairs)

    def act(self, observation: Tensor | TensorDictBase, explore: bool) -> Tensor:
        """Returns actions in the environment's units, ``[N, A]``, with noise if ``explore``."""
        action = torch.tanh(self.actor(self.features_of(observation)))
        if explore:
            noise = self.hparams["exploration_noise"] * torch.randn_like(action)
            action = torch.clamp(action + noise, -1.0, 1.0)
        return self.action_center + self.action_half_range * action

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns both critics' values less the value of the target policy's noisy action, ``[2, B]``."""
        action = batch.get("action")
        with torch.no_grad():
            following = self.features_of(batch.get("next").get("observation"), target=True)
            clip = self.hparams["target_noise_clip"] * self.action_half_range
            noise = torch.randn_like(action) * (self.hparams["target_noise"] * self.action_half_range)
            chosen = self.bounded(self.target_actor(following)) + torch.clamp(noise, -clip, clip)
            chosen = torch.clamp(chosen, self.action_low, self.action_high)
            values = self.target_critics.values(following, chosen).amin(0)
            target = bootstrapped(batch, values, self.hparams["discount"])
        return self.critics.values(self.features_of(batch.get("observation")), action) - target

    def actor_loss(self, batch: TensorDictBase) -> Tensor:
        """Returns minus the first critic's mean value of the policy's actions. :meta private:"""
        features = self.features_of(batch.get("observation")).detach()
        return -self.critics.first(features, self.bounded(self.actor(features))).mean()

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the critics, and with every ``policy_delay``-th update also the policy and all targets."""
        critic_optimizer, (actor_optimizer,) = self.critic_and_other_optimizers()
        outputs = self.update_critics(critic_optimizer, batch)
        self._updates += 1
        if self._updates % self.hparams["policy_delay"] == 0:
            self.descend(actor_optimizer, self.actor_loss(batch))
            self.target_update.step()
        return outputs
