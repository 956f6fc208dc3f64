# SPDX-License-Identifier: Apache-2.0
"""TD3 of several seeds at once: stacked networks, with gradients worked out by hand as in :mod:`stacked_networks`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Generator, Tensor

from tests.benchmarks.learning.learners import stacked_norms
from tests.benchmarks.learning.learners.stacked_networks import (
    StackedAgent,
    backward,
    forward,
    input_gradient,
    soft_update,
    stacked_parameters,
    twin_parameters,
)


class StackedTD3(StackedAgent):
    """TD3 (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477) of R runs; actions are in [-1, 1].

    Args:
        observation_size: length of a flat observation.
        action_size: dimensions of an action.
        seeds: of weights and noise, one for each run.
        hidden_sizes: widths of the hidden layers of policy and critics.
        learning_rate: Adam's, of the policy and the critics.
        discount: γ.
        target_update_rate: τ of the target networks, applied with each policy update.
        policy_delay: critic updates per policy update.
        target_noise: standard deviation of the noise on the target policy's actions.
        target_noise_clip: its largest magnitude.
        exploration_noise: standard deviation of the noise on the actions taken.
        layer_norm: whether layer normalization precedes each ReLU of the critics.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        seeds: Sequence[int],
        hidden_sizes: tuple[int, ...] = (64, 64),
        learning_rate: float = 1e-3,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        exploration_noise: float = 0.1,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self._discount, self._target_update_rate, self._policy_delay = discount, target_update_rate, policy_delay
        self._target_noise, self._target_noise_clip = target_noise, target_noise_clip
        self._exploration_noise = exploration_noise
        self.policy = stacked_parameters([observation_size, *hidden_sizes, action_size], seeds)
        self._layer_norm = layer_norm
        twins = stacked_norms.twin_normalized if layer_norm else twin_parameters
        self.critics = twins([observation_size + action_size, *hidden_sizes, 1], seeds)
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        # Lists, which are faster to read in an update than torch's ParameterList.
        networks = (self.policy, self.critics, self.target_policy, self.target_critics)
        self._policy, self._critics, self._target_policy, self._target_critics = map(list, networks)
        self._sources, self._targets = self._policy + self._critics, self._target_policy + self._target_critics
        self._optimizers = [
            torch.optim.Adam(module.parameters(), lr=learning_rate, fused=True)
            for module in (self.critics, self.policy)
        ]
        self._noise = [Generator().manual_seed(seed) for seed in seeds]
        self._runs = len(seeds)

    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions ``[R, N, A]`` for observations ``[R, N, O]``."""
        with torch.no_grad():
            action = torch.tanh(forward(self._policy, observation)[-1])
            if explore:
                action = (action + self._exploration_noise * self._draw(action.shape[1:])).clamp_(-1.0, 1.0)
        return action

    def learn(self, batch: TensorDict) -> Tensor:
        """Makes one update of every run from each of the batches ``[R, updates, B]``.

        ``priority_weight`` multiplies each row of the critics' loss, where the batches have one.

        Returns:
            TD errors ``[R, updates, B]`` before the update of each batch, the larger magnitude of the two critics'.
        """
        clip = self._target_noise_clip
        noise = self._target_noise * self._draw(batch["action"].shape[1:])
        columns = [batch["observation"], batch["action"], batch["next", "observation"]]
        columns += [batch["next", key].float() for key in ("reward", "terminated")]
        columns += [noise.clamp_(-clip, clip)]
        if (weight := batch.get("priority_weight", None)) is not None:
            columns += [weight.unsqueeze(-1)]
        rows = zip(*(column.unbind(1) for column in columns), strict=True)
        return torch.stack([self._update(*columns).squeeze(-1) for columns in rows], 1)

    @torch.no_grad()
    def _update(
        self,
        observation: Tensor,
        action: Tensor,
        following: Tensor,
        reward: Tensor,
        terminated: Tensor,
        noise: Tensor,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Returns TD errors ``[R, B, 1]``; all arguments are ``[R, B, ...]``."""
        critic_optimizer, policy_optimizer = self._optimizers
        next_action = (torch.tanh(forward(self._target_policy, following)[-1]) + noise).clamp_(-1.0, 1.0)
        first, second = self._values(self._target_critics, _twice(following, next_action))[0].chunk(2)
        target = reward + self._discount * (1.0 - terminated) * torch.minimum(first, second)
        pairs = _twice(observation, action)
        values, layers = self._values(self._critics, pairs)
        error = values - torch.cat([target, target])
        td_error = torch.maximum(*error.abs().chunk(2))
        error.mul_(2.0 / error.shape[1])
        if weight is not None:
            error.mul_(torch.cat([weight, weight]))
        if self._layer_norm:
            stacked_norms.backward(self._critics, pairs, layers, error)
        else:
            backward(self._critics, layers, error)
        critic_optimizer.step()
        self._updates += 1
        if self._updates % self._policy_delay == 0:
            policy_outputs = forward(self._policy, observation)
            taken = torch.tanh(policy_outputs[-1])
            first_critics = [parameter[: self._runs] for parameter in self._critics]
            values, layers = self._values(first_critics, torch.cat([observation, taken], -1))
            gradient = torch.full_like(values, -1.0 / values.shape[1])
            of_input = stacked_norms.input_gradient if self._layer_norm else input_gradient
            gradient = of_input(first_critics, layers, gradient)[..., observation.shape[-1] :]
            backward(self._policy, policy_outputs, gradient * (1.0 - taken.square()))
            policy_optimizer.step()
            soft_update(self._targets, self._sources, self._target_update_rate)
        return td_error

    def _values(self, critics: list[Tensor], pairs: Tensor) -> tuple[Tensor, Any]:
        """Returns values ``[2 R, B, 1]`` and what their gradients need."""
        if self._layer_norm:
            return stacked_norms.forward(critics, pairs)
        outputs = forward(critics, pairs)
        return outputs[-1], outputs


def _twice(observation: Tensor, action: Tensor) -> Tensor:
    """Returns the input of the first critics of all runs, and of the second ones."""
    pairs = torch.cat([observation, action], -1)
    return torch.cat([pairs, pairs])
