# SPDX-License-Identifier: Apache-2.0
"""DQN, TD3, SAC and PPO in the style of CleanRL: one loop, a ring of NumPy arrays, fused Adam."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from turns import (
    CAPACITY,
    CLIP_RANGE,
    DISCOUNT,
    ENTROPY_COEFFICIENT,
    EPOCHS,
    EPSILON,
    GAE_LAMBDA,
    GRADIENT_NORM,
    ROLLOUT_LENGTH,
    TARGET_UPDATE_RATE,
    WARMUP_STEPS,
    Turns,
    Work,
    main,
)


class Ring:
    """Transitions in arrays."""

    def __init__(self, observation_size: int, action_size: int, action_dtype: type) -> None:
        self.observation = np.zeros((CAPACITY, observation_size), np.float32)
        self.following = np.zeros((CAPACITY, observation_size), np.float32)
        self.action = np.zeros((CAPACITY, action_size), action_dtype)
        self.reward, self.terminated = np.zeros((CAPACITY, 1), np.float32), np.zeros((CAPACITY, 1), np.float32)
        self.position, self.is_full = 0, False

    def add(self, observation: Any, following: Any, action: Any, reward: Any, terminated: Any) -> None:
        """Stores one transition."""
        at = self.position
        self.observation[at], self.following[at], self.action[at] = observation, following, action
        self.reward[at], self.terminated[at] = reward, terminated
        self.position = (at + 1) % CAPACITY
        self.is_full |= self.position == 0

    def sample(self, count: int) -> tuple[Tensor, ...]:
        """Draws observations, actions, next observations, rewards and terminations."""
        index = np.random.randint(0, CAPACITY if self.is_full else self.position, size=count)
        columns = (self.observation, self.action, self.following, self.reward[:, 0], self.terminated[:, 0])
        return tuple(torch.as_tensor(column[index]) for column in columns)


class Critic(nn.Module):
    """Value of an observation with an action."""

    def __init__(self, inputs: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(inputs, sizes[0]), nn.Linear(*sizes), nn.Linear(sizes[1], 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns values ``[B]``."""
        hidden = functional.relu(self.first(torch.cat([observation, action], 1)))
        return self.last(functional.relu(self.second(hidden))).view(-1)


class Actor(nn.Module):
    """Deterministic policy, or mean and deviation of a Gaussian one, with bounded actions."""

    scale: Tensor
    bias: Tensor

    def __init__(self, inputs: int, sizes: tuple[int, int], space: Any, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, sizes[0]), nn.Linear(*sizes)
        self.heads = nn.ModuleList([nn.Linear(sizes[1], space.shape[0]) for _ in range(outputs)])
        self.register_buffer("scale", torch.tensor((space.high - space.low) / 2))
        self.register_buffer("bias", torch.tensor((space.high + space.low) / 2))

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the deterministic action."""
        hidden = functional.relu(self.second(functional.relu(self.first(observation))))
        return torch.tanh(self.heads[0](hidden)) * self.scale + self.bias

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Draws actions; returns them with the logarithm of their densities ``[B]``."""
        hidden = functional.relu(self.second(functional.relu(self.first(observation))))
        mean, deviation = self.heads[0](hidden), torch.tanh(self.heads[1](hidden))
        normal = torch.distributions.Normal(mean, (-5 + 3.5 * (deviation + 1)).exp())
        drawn = normal.rsample()
        squashed = torch.tanh(drawn)
        log_density = normal.log_prob(drawn) - torch.log(self.scale * (1 - squashed.pow(2)) + 1e-6)
        return squashed * self.scale + self.bias, log_density.sum(1)


def adam(*modules: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Fused Adam of the parameters of all modules."""
    return torch.optim.Adam(list(chain.from_iterable(m.parameters() for m in modules)), lr=rate, fused=True)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Takes one gradient step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def move_targets(*pairs: tuple[nn.Module, nn.Module]) -> None:
    """Moves each target network towards its network."""
    for network, target in pairs:
        for parameter, moved in zip(network.parameters(), target.parameters(), strict=True):
            moved.data.copy_(TARGET_UPDATE_RATE * parameter.data + (1 - TARGET_UPDATE_RATE) * moved.data)


def make_environments(work: Work) -> Any:
    """A vector that resets in the same step and records returns."""
    make = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(work.env))  # noqa: E731
    return gym.vector.SyncVectorEnv([make] * work.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def replayed(work: Work, turns: Turns, ring: Ring, act: Any, update: Any) -> None:
    """Steps one environment, with an update per step after the warm-up."""
    environments = make_environments(work)
    space = environments.single_action_space
    observation, _ = environments.reset(seed=0)
    for step in range(10_000_000):
        if step == WARMUP_STEPS:
            turns.start()
        action = act(observation) if step >= WARMUP_STEPS else np.array([space.sample()])
        following, reward, terminated, truncated, infos = environments.step(action)
        last = following
        if terminated.any() or truncated.any():
            last = following.copy()
            for ended in np.flatnonzero(terminated | truncated):
                last[ended] = infos["final_obs"][ended]
        ring.add(observation, last, action, reward, terminated)
        observation = following
        if step >= WARMUP_STEPS:
            update(step, ring.sample(work.batch_size))
            turns.tick()


def dqn(work: Work, turns: Turns) -> None:
    """Double DQN whose target moves with every update."""

    def make() -> nn.Sequential:
        first, second = work.hidden_sizes
        layers = nn.Linear(4, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 2)
        return nn.Sequential(*layers)

    network, target = make(), make()
    target.load_state_dict(network.state_dict())
    optimizer = adam(network, rate=work.learning_rate)

    def act(observation: np.ndarray) -> np.ndarray:
        if random.random() < EPSILON:
            return np.array([random.randrange(2)])
        return torch.argmax(network(torch.Tensor(observation)), dim=1).cpu().numpy()

    def update(step: int, batch: tuple[Tensor, ...]) -> None:
        observation, action, following, reward, terminated = batch
        with torch.no_grad():
            best = network(following).argmax(1, keepdim=True)
            wanted = reward + DISCOUNT * target(following).gather(1, best).squeeze(1) * (1 - terminated)
        current = network(observation).gather(1, action).squeeze(1)
        descend(optimizer, functional.smooth_l1_loss(current, wanted))
        move_targets((network, target))

    replayed(work, turns, Ring(4, 1, np.int64), act, update)


def td3(work: Work, turns: Turns) -> None:
    """TD3."""
    space = gym.make(work.env).action_space
    networks = [Actor(17, work.hidden_sizes, space, 1), Critic(23, work.hidden_sizes), Critic(23, work.hidden_sizes)]
    targets = [Actor(17, work.hidden_sizes, space, 1), Critic(23, work.hidden_sizes), Critic(23, work.hidden_sizes)]
    for network, target in zip(networks, targets, strict=True):
        target.load_state_dict(network.state_dict())
    (actor, first, second), (target_actor, target_first, target_second) = networks, targets
    critic_optimizer = adam(first, second, rate=work.learning_rate)
    actor_optimizer = adam(actor, rate=work.learning_rate)
    low, high = float(space.low[0]), float(space.high[0])

    def act(observation: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            action = actor(torch.Tensor(observation))
            action += torch.normal(0, actor.scale * 0.1)
            return action.cpu().numpy().clip(space.low, space.high)

    def update(step: int, batch: tuple[Tensor, ...]) -> None:
        observation, action, following, reward, terminated = batch
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5) * target_actor.scale
            next_action = (target_actor(following) + noise).clamp(low, high)
            least = torch.min(target_first(following, next_action), target_second(following, next_action))
            wanted = reward + (1 - terminated) * DISCOUNT * least
        loss = functional.mse_loss(first(observation, action), wanted)
        descend(critic_optimizer, loss + functional.mse_loss(second(observation, action), wanted))
        if step % 2 == 0:
            descend(actor_optimizer, -first(observation, actor(observation)).mean())
            move_targets(*zip(networks, targets, strict=True))

    replayed(work, turns, Ring(17, 6, np.float32), act, update)


def sac(work: Work, turns: Turns) -> None:
    """SAC that adapts its entropy coefficient; every update steps critics, policy and coefficient."""
    space = gym.make(work.env).action_space
    actor = Actor(17, work.hidden_sizes, space, 2)
    critics = [Critic(23, work.hidden_sizes) for _ in range(2)]
    targets = [Critic(23, work.hidden_sizes) for _ in range(2)]
    for critic, target in zip(critics, targets, strict=True):
        target.load_state_dict(critic.state_dict())
    critic_optimizer = adam(*critics, rate=work.learning_rate)
    actor_optimizer = adam(actor, rate=work.learning_rate)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=work.learning_rate, fused=True)

    def act(observation: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return actor.draw(torch.Tensor(observation))[0].cpu().numpy()

    def update(step: int, batch: tuple[Tensor, ...]) -> None:
        observation, action, following, reward, terminated = batch
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            next_action, log_density = actor.draw(following)
            least = torch.min(*(target(following, next_action) for target in targets)) - alpha * log_density
            wanted = reward + (1 - terminated) * DISCOUNT * least
        losses = [functional.mse_loss(critic(observation, action), wanted) for critic in critics]
        descend(critic_optimizer, losses[0] + losses[1])
        drawn, log_density = actor.draw(observation)
        least = torch.min(*(critic(observation, drawn) for critic in critics))
        descend(actor_optimizer, (alpha * log_density - least).mean())
        descend(alpha_optimizer, (-log_alpha.exp() * (log_density.detach() - 6)).mean())
        move_targets(*zip(critics, targets, strict=True))

    replayed(work, turns, Ring(17, 6, np.float32), act, update)


def ppo(work: Work, turns: Turns) -> None:
    """PPO; policy and value share a trunk."""
    first, second = work.hidden_sizes
    trunk = nn.Sequential(nn.Linear(4, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU())
    policy, value = nn.Linear(second, 2), nn.Linear(second, 1)
    network = nn.ModuleList([trunk, policy, value])
    optimizer = adam(network, rate=work.learning_rate)
    environments = make_environments(work)
    shape = (ROLLOUT_LENGTH, work.num_envs)
    observations, actions = torch.zeros(*shape, 4), torch.zeros(shape, dtype=torch.int64)
    log_probs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
    observation = torch.Tensor(environments.reset(seed=0)[0])
    done = torch.zeros(work.num_envs)
    turns.start()
    while True:
        for step in range(ROLLOUT_LENGTH):
            observations[step], dones[step] = observation, done
            with torch.no_grad():
                hidden = trunk(observation)
                distribution = torch.distributions.Categorical(logits=policy(hidden))
                action = distribution.sample()
                values[step] = value(hidden).flatten()
            actions[step], log_probs[step] = action, distribution.log_prob(action)
            following, reward, terminated, truncated, _ = environments.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).view(-1)
            observation, done = torch.Tensor(following), torch.Tensor(terminated | truncated)
        with torch.no_grad():
            next_value = value(trunk(observation)).flatten()
            advantages, last = torch.zeros(shape), torch.zeros(work.num_envs)
            for step in reversed(range(ROLLOUT_LENGTH)):
                goes_on = 1.0 - (done if step == ROLLOUT_LENGTH - 1 else dones[step + 1])
                bootstrap = next_value if step == ROLLOUT_LENGTH - 1 else values[step + 1]
                error = rewards[step] + DISCOUNT * bootstrap * goes_on - values[step]
                advantages[step] = last = error + DISCOUNT * GAE_LAMBDA * goes_on * last
            returns = advantages + values
        columns = [column.flatten() for column in (actions, log_probs, advantages, returns, values)]
        _learn_rollout(work, (trunk, policy, value), network, optimizer, observations.reshape(-1, 4), columns)
        turns.tick(ROLLOUT_LENGTH * work.num_envs)


def _learn_rollout(
    work: Work, parts: Any, network: nn.Module, optimizer: Any, observations: Tensor, columns: list[Tensor]
) -> None:
    trunk, policy, value = parts
    rows = np.arange(len(observations))
    for _ in range(EPOCHS):
        np.random.shuffle(rows)
        for start in range(0, len(rows), work.batch_size):
            chosen = rows[start : start + work.batch_size]
            action, old, advantage, wanted, before = (column[chosen] for column in columns)
            hidden = trunk(observations[chosen])
            distribution = torch.distributions.Categorical(logits=policy(hidden))
            ratio = (distribution.log_prob(action) - old).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)).mean()
            current = value(hidden).view(-1)
            clipped = before + (current - before).clamp(-CLIP_RANGE, CLIP_RANGE)
            value_loss = 0.5 * torch.max((current - wanted) ** 2, (clipped - wanted) ** 2).mean()
            loss = surrogate - ENTROPY_COEFFICIENT * distribution.entropy().mean() + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), GRADIENT_NORM)
            optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    main({"dqn": dqn, "td3": td3, "sac": sac, "ppo": ppo})
