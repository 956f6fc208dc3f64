# SPDX-License-Identifier: Apache-2.0
"""SAC of several seeds at once: stacked networks, with gradients worked out by hand as in :mod:`stacked_networks`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn
from torch.nn.functional import softplus

from tests.benchmarks.learning.learners.stacked_networks import (
    StackedAgent,
    backward,
    forward,
    input_gradient,
    soft_update,
    stacked_parameters,
    twin_parameters,
)

_LOG_DENSITY = math.log(2 * math.pi) / 2 + 2 * math.log(2)
_RAW_SHIFT = math.log(math.expm1(0.99))


class StackedSAC(StackedAgent):
    """The agent :class:`lightning_replay.agents.SAC` of R runs, for :class:`StackedRuns`; actions are in [-1, 1].

    Args:
        observation_size: length of a flat observation.
        action_size: A, dimensions of an action; the target entropy is -A.
        seeds: of weights and noise, one for each run.
        hidden_sizes: widths of the hidden layers of policy and critics.
        learning_rate: Adam's, of the policy, the critics and the entropy coefficient.
        discount: γ.
        target_update_rate: τ of the target critics.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        seeds: Sequence[int],
        hidden_sizes: Sequence[int] = (64, 64),
        learning_rate: float = 1e-3,
        discount: float = 0.99,
        target_update_rate: float = 0.005,
    ) -> None:
        super().__init__()
        self._discount, self._target_update_rate = discount, target_update_rate
        self._target_entropy = -float(action_size)
        self.policy = stacked_parameters([observation_size, *hidden_sizes, 2 * action_size], seeds)
        self.critics = twin_parameters([observation_size + action_size, *hidden_sizes, 1], seeds)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(len(seeds), 1, 1))
        # Lists, which are faster to read in an update than torch's ParameterList.
        networks = (self.policy, self.critics, self.target_critics)
        self._policy, self._critics, self._target_critics = map(list, networks)
        self._optimizers = [
            torch.optim.Adam(parameters, lr=learning_rate, fused=True)
            for parameters in (self._critics, self._policy, [self.log_alpha])
        ]
        self._noise = [Generator().manual_seed(seed) for seed in seeds]

    @torch.no_grad()
    def act(self, observation: Tensor, explore: bool) -> Tensor:
        """Returns actions ``[R, N, A]`` for observations ``[R, N, O]``, drawn from the policy or its mode."""
        mean, raw = forward(self._policy, observation)[-1].chunk(2, -1)
        return torch.tanh(mean + _deviation(raw) * self._draw(mean.shape[1:]) if explore else mean)

    @torch.no_grad()
    def learn(self, batch: TensorDict) -> Tensor:
        """Makes one update of every run from each of the batches ``[R, updates, B]``.

        ``priority_weight`` multiplies each row of the critics' loss, where the batches have one.

        Returns:
            TD errors ``[R, updates, B]`` before the update of each batch, the larger magnitude of the two critics'.
        """
        updates, rows, size = batch["action"].shape[1:]
        noise = self._draw((updates, 2, rows, size))
        columns = [batch["observation"], batch["action"], batch["next", "observation"]]
        columns += [batch["next", key].float() for key in ("reward", "terminated")]
        weight = batch.get("priority_weight", None)
        columns += [noise, torch.ones(*noise.shape[:2], rows, 1) if weight is None else weight.unsqueeze(-1)]
        dealt = zip(*(column.unbind(1) for column in columns), strict=True)
        return torch.stack([self._update(*columns).squeeze(-1) for columns in dealt], 1)

    def _update(
        self,
        observation: Tensor,
        action: Tensor,
        following: Tensor,
        reward: Tensor,
        terminated: Tensor,
        noise: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """Returns TD errors ``[R, B, 1]``; ``noise`` is ``[R, 2, B, A]``, all other arguments are ``[R, B, ...]``."""
        next_noise, noise = noise.unbind(1)
        alpha = self.log_alpha.exp()
        mean, raw = forward(self._policy, following)[-1].chunk(2, -1)
        deviation = _deviation(raw)
        unbounded = mean + deviation * next_noise
        pairs = torch.cat([following, torch.tanh(unbounded)], -1)
        first, second = forward(self._target_critics, torch.cat([pairs, pairs]))[-1].chunk(2)
        value = torch.minimum(first, second) - alpha * _log_density(unbounded, deviation, next_noise)
        target = reward + self._discount * (1.0 - terminated) * value
        pairs = torch.cat([observation, action], -1)
        outputs = forward(self._critics, torch.cat([pairs, pairs]))
        error = outputs[-1] - torch.cat([target, target])
        td_error = torch.maximum(*error.abs().chunk(2))
        backward(self._critics, outputs, error.mul_(torch.cat([weight, weight])).mul_(2.0 / error.shape[1]))
        critic_optimizer, policy_optimizer, entropy_optimizer = self._optimizers
        critic_optimizer.step()
        log_density = self._policy_gradient(observation, noise, alpha)
        policy_optimizer.step()
        self.log_alpha.grad = -(log_density + self._target_entropy).mean(1, keepdim=True)
        entropy_optimizer.step()
        soft_update(self._target_critics, self._critics, self._target_update_rate)
        return td_error

    def _policy_gradient(self, observation: Tensor, noise: Tensor, alpha: Tensor) -> Tensor:
        """Sets the policy's gradients; returns the logarithm of the density of the actions drawn, ``[R, B, 1]``."""
        rows = observation.shape[1]
        policy_outputs = forward(self._policy, observation)
        mean, raw = policy_outputs[-1].chunk(2, -1)
        deviation = _deviation(raw)
        unbounded = mean + deviation * noise
        action = torch.tanh(unbounded)
        pairs = torch.cat([observation, action], -1)
        outputs = forward(self._critics, torch.cat([pairs, pairs]))
        first, second = outputs[-1].chunk(2)
        is_second = (second < first).float()
        chosen = torch.cat([is_second - 1.0, -is_second]).div_(rows)  # that of minus the smaller value
        slopes = input_gradient(self._critics, outputs, chosen)[..., observation.shape[-1] :].chunk(2)
        gradient = (slopes[0] + slopes[1]) * (1.0 - action.square()) + 2.0 * alpha / rows * action
        of_deviation = gradient * noise - alpha / rows / deviation
        backward(
            self._policy, policy_outputs, torch.cat([gradient, of_deviation * torch.sigmoid(raw + _RAW_SHIFT)], -1)
        )
        return _log_density(unbounded, deviation, noise)


def _deviation(raw: Tensor) -> Tensor:
    """Returns standard deviations above 0.01, 1 for an output 0 of the network, as the agent's."""
    return softplus(raw + _RAW_SHIFT) + 0.01


def _log_density(unbounded: Tensor, deviation: Tensor, noise: Tensor) -> Tensor:
    """Returns the logarithm of the density of ``tanh(unbounded)``, ``[..., 1]``."""
    rows = -noise.square() / 2 - deviation.log() + 2 * (unbounded + softplus(-2 * unbounded)) - _LOG_DENSITY
    return rows.sum(-1, keepdim=True)
