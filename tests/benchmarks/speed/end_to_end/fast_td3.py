# SPDX-License-Identifier: Apache-2.0
"""TD3 on a vectorized simulator in one file, in the way of FastTD3: a ring per environment, returns at the draw.

Written from the description of Seo et al. 2025, https://arxiv.org/abs/2505.22642: large batches of one tensor for each
column, a few updates after each step of all environments, noise of another size in each environment.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Settings:
    """Sizes and rates that all contenders share."""

    num_envs: int = 1_024
    ring_length: int = 64
    batch_size: int = 1_024
    updates_per_step: int = 2
    n_steps: int = 3
    hidden_sizes: tuple[int, int] = (64, 64)
    warmup_steps: int = 8
    discount: float = 0.97
    learning_rate: float = 1e-3
    target_update_rate: float = 0.05
    policy_delay: int = 2
    exploration_noise: float = 0.2
    target_noise: float = 0.2
    target_noise_clip: float = 0.5


class Rings:
    """A ring for each environment, ``[N, T, ...]``, and returns over ``n_steps`` that are summed at the draw."""

    def __init__(self, settings: Settings, observation_size: int, action_size: int) -> None:
        self.settings = settings
        shape = settings.num_envs, settings.ring_length
        self.observation = torch.zeros(*shape, observation_size)
        self.following = torch.zeros(*shape, observation_size)
        self.action = torch.zeros(*shape, action_size)
        self.reward = torch.zeros(shape)
        self.terminated = torch.zeros(shape, dtype=torch.bool)
        self.truncated = torch.zeros(shape, dtype=torch.bool)
        self.environment = torch.arange(settings.num_envs)[:, None]
        self.length = 0

    def add(self, row: tuple[Tensor, ...]) -> None:
        """Stores a step of all environments."""
        at = self.length % self.settings.ring_length
        columns = self.observation, self.action, self.following, self.reward, self.terminated, self.truncated
        for column, values in zip(columns, row, strict=True):
            column[:, at] = values
        self.length += 1

    def draw(self) -> tuple[Tensor, ...]:
        """Draws as many rows of each environment, ``[B, ...]``, with their returns and numbers of steps."""
        settings, size = self.settings, self.settings.ring_length
        n_steps = settings.n_steps
        count = settings.batch_size // settings.num_envs
        held = min(self.length, size)
        oldest = self.length % size if self.length > size else 0
        ages = torch.randint(held - n_steps + 1, (settings.num_envs, count))
        start = (oldest + ages) % size
        steps = (start[:, :, None] + torch.arange(n_steps)) % size
        at = self.environment[:, :, None], steps
        done = self.terminated[at] | self.truncated[at]
        continues = torch.ones_like(done)
        continues[:, :, 1:] = torch.cumprod(~done[:, :, :-1], -1).bool()
        discounts = settings.discount ** torch.arange(n_steps)
        returned = (self.reward[at] * continues * discounts).sum(-1)
        taken = continues.sum(-1)
        last = (start + taken - 1) % size
        drawn = (
            self.observation[self.environment, start],
            self.action[self.environment, start],
            self.following[self.environment, last],
            returned,
            self.terminated[self.environment, last],
            taken,
        )
        return tuple(column.flatten(0, 1) for column in drawn)


def perceptron(inputs: int, hidden_sizes: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class FileLoop:
    """The whole training: collection, rings, networks, updates."""

    def __init__(self, simulator: Any, settings: Settings) -> None:
        self.simulator = simulator
        self.settings = settings
        observation_size = simulator.single_observation_space.shape[0]
        action_size = simulator.single_action_space.shape[0]
        self.high = float(simulator.single_action_space.high[0])
        self.actor = perceptron(observation_size, settings.hidden_sizes, action_size)
        sizes = observation_size + action_size, settings.hidden_sizes, 1
        self.critics = nn.ModuleList([perceptron(*sizes), perceptron(*sizes)])
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        rate = settings.learning_rate
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=rate, fused=True)
        self.rings = Rings(settings, observation_size, action_size)
        self.updates = 0
        self.observation, _ = simulator.reset(seed=0)

    def step(self) -> None:
        """Takes a step in all environments, and the updates that follow it."""
        settings = self.settings
        with torch.no_grad():
            if self.rings.length < settings.warmup_steps:
                scaled = torch.rand(settings.num_envs, self.rings.action.shape[-1]) * 2 - 1
            else:
                scaled = torch.tanh(self.actor(self.observation))
                scaled = (scaled + settings.exploration_noise * torch.randn_like(scaled)).clamp(-1, 1)
            action = scaled * self.high
            before = self.observation
            self.observation, reward, terminated, truncated, info = self.simulator.step(action)
            self.rings.add((before, action, info["final_observation"], reward, terminated, truncated))
        if self.rings.length > settings.warmup_steps:
            for _ in range(settings.updates_per_step):
                self.update(*self.rings.draw())

    def update(self, observation: Tensor, action: Tensor, following: Tensor, *ends: Tensor) -> None:
        """Steps the critics, and every second time the policy and the targets."""
        settings = self.settings
        returned, terminated, taken = ends
        with torch.no_grad():
            noise = (torch.randn_like(action) * settings.target_noise).clamp(
                -settings.target_noise_clip, settings.target_noise_clip
            )
            chosen = (torch.tanh(self.target_actor(following)) + noise).clamp(-1, 1) * self.high
            inputs = torch.cat([following, chosen], 1)
            value = torch.minimum(*(critic(inputs)[:, 0] for critic in self.target_critics))
            target = returned + settings.discount**taken * ~terminated * value
        inputs = torch.cat([observation, action], 1)
        loss = sum(functional.mse_loss(critic(inputs)[:, 0], target) for critic in self.critics)
        self.descend(self.critic_optimizer, loss)
        self.updates += 1
        if self.updates % settings.policy_delay == 0:
            chosen = torch.tanh(self.actor(observation)) * self.high
            self.descend(self.actor_optimizer, -self.critics[0](torch.cat([observation, chosen], 1)).mean())
            with torch.no_grad():
                for network, target_network in (
                    (self.actor, self.target_actor),
                    (self.critics, self.target_critics),
                ):
                    torch._foreach_lerp_(
                        [*target_network.parameters()], [*network.parameters()], settings.target_update_rate
                    )

    def descend(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """Takes one gradient step."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
