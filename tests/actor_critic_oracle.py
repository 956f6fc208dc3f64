# SPDX-License-Identifier: Apache-2.0
"""The published updates of TD3 and SAC in plain torch, on copies of an agent's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_replay.agents import SAC, TD3

Network = list[Tensor]  # weight and bias of each linear layer


def copied(parameters: Iterable[Tensor]) -> Network:
    """Parameters of their own."""
    return [value.detach().clone().requires_grad_() for value in parameters]


def forward(network: Network, inputs: Tensor) -> Tensor:
    for layer in range(0, len(network), 2):
        inputs = inputs @ network[layer].T + network[layer + 1]
        inputs = torch.relu(inputs) if layer < len(network) - 2 else inputs
    return inputs


class ActorCriticOracle:
    """Networks and targets of an agent, with Adam for policy and critics."""

    def __init__(self, agent: TD3 | SAC) -> None:
        self.options = agent.hparams
        self.low, self.high = torch.tensor(agent.hparams["action_low"]), torch.tensor(agent.hparams["action_high"])
        self.center, self.half = (self.high + self.low) / 2, (self.high - self.low) / 2
        self.actor = copied(agent.actor.parameters())
        self.critics = [copied(pair[i] for pair in agent.critics.parameters()) for i in (0, 1)]
        self.target_actor = [value.detach().clone() for value in self.actor]
        self.target_critics = [[value.detach().clone() for value in critic] for critic in self.critics]
        self.actor_adam = torch.optim.Adam(self.actor, lr=self.options["actor_learning_rate"])
        self.critic_adam = torch.optim.Adam(
            [*self.critics[0], *self.critics[1]], lr=self.options["critic_learning_rate"]
        )
        self.updates = 0

    def values(self, critics: list[Network], observation: Tensor, action: Tensor) -> Tensor:
        """``[2, B]``."""
        return torch.stack([forward(c, torch.cat([observation, action], -1)).squeeze(-1) for c in critics])

    def learn(self, adam: torch.optim.Adam, loss: Tensor) -> None:
        adam.zero_grad()
        loss.backward()
        adam.step()

    def learn_critics(self, batch: TensorDict, following: Tensor) -> None:
        """Squared distance of both critics to ``r + γ (1 - terminated) following``."""
        alive = 1.0 - batch["next", "terminated"].squeeze(-1).float()
        target = batch["next", "reward"].squeeze(-1) + self.options["discount"] * alive * following
        distance = self.values(self.critics, batch["observation"], batch["action"]) - target.detach()
        self.learn(self.critic_adam, distance.square().mean(-1).sum())

    def follow(self, networks: list[Network], targets: list[Network]) -> None:
        rate = self.options["target_update_rate"]
        for network, target in zip(networks, targets, strict=True):
            for value, slow in zip(network, target, strict=True):
                slow.copy_(rate * value.detach() + (1 - rate) * slow)


class TD3Oracle(ActorCriticOracle):
    """Algorithm 1 of Fujimoto et al. 2018."""

    def act(self, actor: Network, observation: Tensor) -> Tensor:
        return self.center + self.half * torch.tanh(forward(actor, observation))

    def update(self, batch: TensorDict) -> None:
        clip = self.options["target_noise_clip"]
        noise = (self.options["target_noise"] * torch.randn_like(batch["action"])).clamp(-clip, clip)
        after = batch["next", "observation"]
        action = (self.act(self.target_actor, after) + self.half * noise).clamp(self.low, self.high)
        self.learn_critics(batch, self.values(self.target_critics, after, action).amin(0))
        self.updates += 1
        if self.updates % self.options["policy_delay"] == 0:
            observation = batch["observation"]
            values = self.values(self.critics, observation, self.act(self.actor, observation))
            self.learn(self.actor_adam, -values[0].mean())
            self.follow([*self.critics, self.actor], [*self.target_critics, self.target_actor])


class SACOracle(ActorCriticOracle):
    """Algorithm 1 of Haarnoja et al. 2018, with the policy's weights regularised."""

    def __init__(self, agent: SAC) -> None:
        super().__init__(agent)
        self.log_coefficient = torch.tensor(self.options["initial_entropy_coefficient"]).log().requires_grad_()
        self.entropy_adam = torch.optim.Adam([self.log_coefficient], lr=self.options["entropy_learning_rate"])

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and the logarithm of their density among actions scaled to [-1, 1]."""
        mean, raw = forward(self.actor, observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, torch.nn.functional.softplus(raw + math.log(math.expm1(0.99))) + 0.01)
        before = normal.rsample()
        density = normal.log_prob(before) - torch.log(1 - torch.tanh(before).square())
        return self.center + self.half * torch.tanh(before), density.sum(-1)

    def update(self, batch: TensorDict) -> None:
        coefficient = self.log_coefficient.detach().exp()
        action, log_density = self.draw(batch["next", "observation"])
        values = self.values(self.target_critics, batch["next", "observation"], action).amin(0)
        self.learn_critics(batch, values - coefficient * log_density)
        action, log_density = self.draw(batch["observation"])
        values = self.values(self.critics, batch["observation"], action).amin(0)
        penalty = self.options["actor_regularization"] * sum(weight.square().sum() for weight in self.actor[::2]) / 2
        self.learn(self.actor_adam, (coefficient * log_density - values).mean() + penalty)
        excess = log_density.detach() - len(self.low)  # plus the target entropy, minus the number of dimensions
        self.learn(self.entropy_adam, -(self.log_coefficient * excess).mean())
        self.follow(self.critics, self.target_critics)
