# SPDX-License-Identifier: Apache-2.0
"""MP-DQN of several seeds at once: the agent's two networks, stacked, with gradients worked out by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from tests.benchmarks.learning.learners.stacked_networks import (
    StackedAgent,
    activated,
    backward,
    before_activation,
    clip_gradients,
    forward,
    input_gradient,
    kaiming_parameters,
    soft_update,
)

_SLOPE = 0.01  # of the agent's leaky ReLU


class StackedMPDQN(StackedAgent):
    """The agent :class:`~lightning_replay.agents.MPDQN` of R runs, which share nothing but the time they take.

    Args:
        observation_size: length of a flat observation.
        parameter_sizes: number of parameters of each discrete action.
        parameter_low: smallest value of each parameter, those of all actions one after the other.
        parameter_high: largest value of each.
        seeds: of the weights, one for each run.
        target_high: largest reachable return; the smallest is 0.

    The other arguments are the agent's.
    """

    def __init__(
        self,
        observation_size: int,
        parameter_sizes: Sequence[int],
        parameter_low: np.ndarray,
        parameter_high: np.ndarray,
        seeds: Sequence[int],
        hidden_sizes: tuple[int, ...],
        value_learning_rate: float,
        parameter_learning_rate: float,
        discount: float,
        target_update_rate: float,
        target_high: float,
        gradient_clip: float,
    ) -> None:
        super().__init__()
        self._discount, self._target_update_rate = discount, target_update_rate
        self._target_high, self._gradient_clip = target_high, gradient_clip
        owner = torch.arange(len(parameter_sizes)).repeat_interleave(torch.tensor(parameter_sizes))
        self._masks = nn.functional.one_hot(owner, len(parameter_sizes)).T.float()
        low, high = torch.from_numpy(parameter_low), torch.from_numpy(parameter_high)
        self._low, self._high, self._center, self._half_range = low, high, (low + high) / 2, (high - low) / 2
        joint = sum(parameter_sizes)
        self.values = kaiming_parameters([observation_size + joint, *hidden_sizes, len(parameter_sizes)], seeds)
        self.parameterizer = kaiming_parameters(
            [observation_size, *hidden_sizes, joint], [1_000_000 + seed for seed in seeds]
        )
        self.target_values = copy.deepcopy(self.values).requires_grad_(False)
        self.target_parameterizer = copy.deepcopy(self.parameterizer).requires_grad_(False)
        # Lists, which are faster to read in an update than torch's ParameterList.
        networks = (self.values, self.parameterizer, self.target_values, self.target_parameterizer)
        self._values, self._parameterizer, self._target_values, self._target_parameterizer = map(list, networks)
        self._sources = self._values + self._parameterizer
        self._targets = self._target_values + self._target_parameterizer
        self._rates = (value_learning_rate, parameter_learning_rate)
        self._optimizers = [
            torch.optim.Adam(network, lr=rate, fused=True)
            for network, rate in zip((self._values, self._parameterizer), self._rates, strict=True)
        ]

    def scale_learning_rates(self, factor: float) -> None:
        """Sets both learning rates to this share of those given."""
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = factor * rate

    @torch.no_grad()
    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the most valuable actions int64 ``[R, N]`` and all parameters ``[R, N, P]``, for ``[R, N, O]``."""
        parameters = forward(self._parameterizer, observation, _SLOPE)[-1].clamp_(-1.0, 1.0)
        _, values = self._passes(self._values, observation, parameters)
        unscaled = torch.clamp(self._center + self._half_range * parameters, self._low, self._high)
        return values.argmax(-1), unscaled

    @torch.no_grad()
    def learn(self, batch: TensorDictBase) -> Tensor:
        """Makes one update of every run from the batch ``[R, B]``.

        Returns:
            Magnitudes of the TD errors ``[R, B]`` before the update.
        """
        following, observation = batch.get("next"), batch.get("observation")
        next_observation = following.get("observation")
        next_parameters = forward(self._target_parameterizer, next_observation, _SLOPE)[-1].clamp_(-1.0, 1.0)
        _, next_values = self._passes(self._target_values, next_observation, next_parameters)
        discount = batch.get("discount", None)
        discount = self._discount if discount is None else discount.flatten(1)
        alive = ~following.get("terminated").flatten(1)
        target = following.get("reward").flatten(1) + discount * alive * next_values.amax(-1)
        target.clamp_(0.0, self._target_high)

        discrete = batch.get(("action", "discrete"))
        taken = (batch.get(("action", "parameters")) - self._center) / self._half_range * self._masks[discrete]
        outputs = forward(self._values, torch.cat([observation, taken], -1), _SLOPE)
        chosen = discrete.unsqueeze(-1)
        error = outputs[-1].gather(-1, chosen) - target.unsqueeze(-1)
        gradient = torch.zeros_like(outputs[-1]).scatter_(-1, chosen, error / error.shape[1])
        self._learn_parameters(observation)  # with the values' weights before their update
        backward(self._values, outputs, gradient, _SLOPE)
        for optimizer, network in zip(self._optimizers, (self._values, self._parameterizer), strict=True):
            clip_gradients(network, self._gradient_clip)
            optimizer.step()
        soft_update(self._targets, self._sources, self._target_update_rate)
        return error.squeeze(-1).abs()

    def _learn_parameters(self, observation: Tensor) -> None:
        """Sets the gradients of the parameters' network: those of ``-Σ_k Q_k(s, x(s))``, inverted at the bounds."""
        own = forward(self._parameterizer, observation, _SLOPE)
        parameters, actions = own[-1], len(self._masks)
        outputs, values = self._passes(self._values, observation, parameters)
        gradient = torch.eye(actions).repeat(outputs[-1].shape[0], values.shape[1], 1).mul_(-1.0 / values.shape[1])
        gradient = before_activation(input_gradient(self._values[2:], outputs, gradient, _SLOPE), outputs[0], _SLOPE)
        of_parameters = self._values[0][:, observation.shape[-1] :].transpose(1, 2)
        each = torch.bmm(gradient, of_parameters).view(*values.shape, -1)
        gradient = (each * self._masks).sum(2)
        # 1 - x where the gradient is negative, 1 + x elsewhere
        gradient = gradient * (1.0 + torch.where(gradient < 0, -parameters, parameters)) / 2.0
        backward(self._parameterizer, own, gradient, _SLOPE)

    def _passes(
        self, network: Sequence[Tensor], observation: Tensor, parameters: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Computes the values by a pass for each action, in which all parameters but the action's own are zero.

        Returns:
            Outputs of the layers ``[R, B * K, ...]``, and the values ``[R, B, K]``.
        """
        runs, rows, size = observation.shape
        weight, bias, *others = network
        one_at_a_time = (parameters.unsqueeze(2) * self._masks).flatten(1, 2)
        hidden = torch.bmm(one_at_a_time, weight[:, size:]).view(runs, rows, len(self._masks), -1)
        hidden.add_(torch.baddbmm(bias, observation, weight[:, :size]).unsqueeze(2))
        outputs = forward(others, activated(hidden, _SLOPE).flatten(1, 2), _SLOPE)
        return outputs, outputs[-1].view(runs, rows, len(self._masks), -1).diagonal(dim1=2, dim2=3)
