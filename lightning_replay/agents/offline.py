# SPDX-License-Identifier: Apache-2.0
"""Agents for rows that another policy has collected: IQL, which evaluates stored actions alone, and CQL."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from lightning_replay.agents.agent import TargetUpdate, bootstrapped, weighted_mean
from lightning_replay.agents.continuous import SAC, ContinuousAgent
from lightning_replay.agents.networks import Perceptron

_LARGEST_WEIGHT = 100.0  # The paper limits the weights of rows in the policy's loss.
_LOG_DEVIATIONS = (-5.0, 2.0)


class IQL(ContinuousAgent):
    """Implicit Q-learning: values are an expectile of stored actions' values. The policy imitates the better actions.

    Kostrikov et al. 2021, https://arxiv.org/abs/2110.06169. Every update steps the value ``V(s)`` towards the
    ``expectile`` of the smaller target critic. It also steps the policy on ``exp(β (Q(s, a) - V(s))) log π(a|s)``, the
    critics towards ``r + γ V(s')``, and the target critics. The policy is a normal distribution around ``tanh`` of its
    network, with one deviation for each action dimension. ``priority_weight`` multiplies each row of all losses.

    Args:
        value_learning_rate: Adam's, of the value.
        expectile: Expectile τ in (0, 1). 0.5 is the mean over stored actions, towards 1 it is their maximum. The paper
            takes 0.7 on locomotion and 0.9 if trajectories have to be joined (AntMaze).
        inverse_temperature: Inverse temperature β from 0, which clones all actions alike. The paper takes 3 on
            locomotion and 10 on AntMaze.

    The other arguments are the arguments of :class:`SAC`.

    Example:
        >>> agent = IQL(observation_size=3, action_low=[-2.0], action_high=[2.0])
        >>> agent.act(torch.zeros(5, 3), explore=False).shape
        torch.Size([5, 1])
    """

    takes_update_batches = True

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
        action_low: list[float] | None = None,
        action_high: list[float] | None = None,
        hidden_sizes: tuple[int, ...] = (256, 256),
        actor_learning_rate: float = 3e-4,
        critic_learning_rate: float = 3e-4,
        value_learning_rate: float = 3e-4,
        expectile: float = 0.7,
        inverse_temperature: float = 3.0,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        gradient_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.set_up(locals())

    def build(self) -> None:
        """Creates also the value and the deviation of the policy."""
        super().build()
        self.value: Perceptron = Perceptron(self.num_features, self.hparams["hidden_sizes"], 1)
        self.log_deviation: nn.Parameter = nn.Parameter(torch.zeros(len(self.action_low)))
        self.target_update: TargetUpdate = self.target_update_of((self.critics, self.target_critics))

    def act(self, observation: Tensor | TensorDictBase, explore: bool) -> Tensor:
        """Returns actions in the environment's units, ``[N, A]``: drawn from the policy, or its mean."""
        policy = self._policy(self.features_of(observation))
        action = policy.sample() if explore else policy.mean
        return self.action_center + self.action_half_range * action.clamp(-1.0, 1.0)

    def _policy(self, features: Tensor) -> torch.distributions.Normal:
        """Returns the distribution of actions scaled to [-1, 1], ``[..., A]``."""
        deviation = self.log_deviation.clamp(*_LOG_DEVIATIONS).exp()
        return torch.distributions.Normal(torch.tanh(self.actor(features)), deviation, validate_args=False)

    def distances(self, batch: TensorDictBase) -> Tensor:
        """Returns both critics' values less the value of the next state, ``[2, B]``."""
        with torch.no_grad():
            values = self.value(self.features_of(batch.get("next").get("observation"))).squeeze(-1)
            target = bootstrapped(batch, values, self.hparams["discount"])
        return self.critics.values(self.features_of(batch.get("observation")), batch.get("action")) - target

    def value_loss(self, batch: TensorDictBase, advantage: Tensor) -> Tensor:
        """Returns the expectile loss of advantages ``[B]``, whose gradient is the value's."""
        expectile = self.hparams["expectile"]
        return weighted_mean(torch.where(advantage > 0, expectile, 1 - expectile) * advantage.square(), batch)

    def actor_loss(self, batch: TensorDictBase, advantage: Tensor) -> Tensor:
        """Returns minus the mean log density of stored actions, weighted by their advantages ``[B]``.

        :meta private:
        """
        weight = (self.hparams["inverse_temperature"] * advantage.detach()).exp().clamp(max=_LARGEST_WEIGHT)
        policy = self._policy(self.features_of(batch.get("observation")).detach())
        # A dimension that cannot vary is 0, as in the policy's mean.
        scaled = ((batch.get("action") - self.action_center) / self.action_half_range).nan_to_num(0.0)
        return -weighted_mean(weight * policy.log_prob(scaled).sum(-1), batch)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Steps the value, the policy, the critics, and the target critics."""
        critic_optimizer, (actor_optimizer, value_optimizer) = self.critic_and_other_optimizers()
        features = self.features_of(batch.get("observation")).detach()
        with torch.no_grad():
            target_features = self.features_of(batch.get("observation"), target=True)
            values = self.target_critics.values(target_features, batch.get("action")).amin(0)
        self.descend(value_optimizer, self.value_loss(batch, values - self.value(features).squeeze(-1)))
        with torch.no_grad():
            advantage = values - self.value(features).squeeze(-1)  # As in the paper, the value has just been stepped.
        self.descend(actor_optimizer, self.actor_loss(batch, advantage))
        outputs = self.update_critics(critic_optimizer, batch)
        self.target_update.step()
        return outputs

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam of the critics, of the policy, and of the value."""
        critics, _ = super().configure_optimizers()
        return [
            critics,
            self.adam([*self.actor.parameters(), self.log_deviation], "actor_learning_rate"),
            self.adam(self.value.parameters(), "value_learning_rate"),
        ]


class CQL(SAC):
    """Conservative Q-learning: SAC whose critics are lowered at actions of the policy and raised at stored ones.

    Kumar et al. 2020, https://arxiv.org/abs/2006.04779, equation 4 with the entropy as regularizer, CQL(H), by
    importance sampling (appendix F). It samples ``sampled_actions`` uniform actions, and as many each of the policy in
    the state and in the next state. Targets are without entropy, as in the authors' code, and the weight is fixed.
    TorchRL's ``CQLLoss`` sums over three of the sampled actions at a time, and values the actions of the next state
    there and not in the state. ``td_error`` is without the conservative term.

    Args:
        conservative_weight: Weight α of the conservative term. The authors take 5 on locomotion.
        sampled_actions: Number of actions of each of the three kinds.

    The other arguments are the arguments of :class:`SAC`.

    Example:
        >>> agent = CQL(observation_size=3, action_low=[-2.0], action_high=[2.0], conservative_weight=1.0)
        >>> agent.act(torch.zeros(5, 3), explore=False).shape
        torch.Size([5, 1])
    """

    takes_update_batches = True
    backs_up_entropy = False

    def __init__(
        self,
        observation_size: int | dict[str, Any] | None = None,
        action_low: list[float] | None = None,
        action_high: list[float] | None = None,
        hidden_sizes: tuple[int, ...] = (256, 256),
        actor_learning_rate: float = 1e-4,
        critic_learning_rate: float = 3e-4,
        entropy_learning_rate: float = 1e-4,
        initial_entropy_coefficient: float = 1.0,
        target_entropy: float | None = None,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        actor_regularization: float = 0.0,
        conservative_weight: float = 5.0,
        sampled_actions: int = 10,
        gradient_norm: float | None = None,
    ) -> None:
        super(SAC, self).__init__()  # SAC's constructor would save its arguments.
        self.set_up(locals())

    def overestimate(self, batch: TensorDictBase) -> Tensor:
        """Returns ``log Σ exp(Q - log density)`` of sampled actions less Q of stored ones, both critics ``[2, B]``."""
        features = self.features_of(batch.get("observation"))
        here = features.expand(self.hparams["sampled_actions"], *features.shape)
        with torch.no_grad():
            random = torch.rand(*here.shape[:-1], len(self.action_low), device=features.device)
            random = self.action_low + (self.action_high - self.action_low) * random
            of_policy, density = self.draw(here)
            following = self.features_of(batch.get("next").get("observation"))
            of_next, next_density = self.draw(following.expand_as(here))
        uniform = torch.full_like(density, len(self.action_low) * math.log(0.5))  # All densities are of scaled actions.
        # Q [2, 3 N, B], less the logarithm of the density that each action was drawn with
        values = self.critics.values(torch.cat([here] * 3), torch.cat([random, of_policy, of_next]))
        weighted = values - torch.cat([uniform, density, next_density])
        return weighted.logsumexp(1) - self.critics.values(features, batch.get("action"))

    def critic_rows(self, distances: Tensor, batch: TensorDictBase) -> Tensor:
        """Returns also the conservative term in the loss of each row, ``[2, B]``.

        :meta private:
        """
        return distances.square() + self.hparams["conservative_weight"] * self.overestimate(batch)
